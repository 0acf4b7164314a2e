"""The only door to onnxruntime in this process: sessions, graph optimisation, and its errors in our words."""

import contextlib
import enum
import importlib
import re
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import onnxruntime as _ort

from edgekit.errors import ModelError, RuntimeRefusal
from edgekit.model.external import point_into
from edgekit.model.model import keeps_inside
from edgekit.model.tensors import Array, Tensors, flatten_value

_state: Any = importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state")
VERSION: str = _ort.__version__
AVAILABLE_PROVIDERS: tuple[str, ...] = tuple(cast("Any", _ort).get_available_providers())
"""The providers that this ONNX Runtime was built with; what they need to run may be missing."""
TESTED_VERSIONS = ("1.31.1", "1.32.0")
"""The versions of ONNX Runtime that were tried: docs/reference/measured.md says what differs; the first is locked."""
CPU_PROVIDER = "CPUExecutionProvider"

REFUSALS: tuple[type[Exception], ...] = tuple(
    cast("type[Exception]", getattr(_state, name))
    for name in (
        "EPFail", "EngineError", "Fail", "InvalidArgument", "InvalidGraph", "InvalidProtobuf", "ModelLoadCanceled",
        "ModelLoaded", "ModelRequiresCompilation", "NoModel", "NoSuchFile", "NotFound", "NotImplemented",
        "RuntimeException", "DeviceReset",
    )
)  # fmt: skip
"""Every exception class that onnxruntime defines; they share no base (a test enumerates them)."""

# What pybind11 makes of the standard exceptions of C++ (its page "Exceptions"), beside a message that is no text.
_TRANSLATED: tuple[type[Exception], ...] = (
    *REFUSALS, UnicodeDecodeError, IndexError, MemoryError, OverflowError, RuntimeError, ValueError
)  # fmt: skip


def describe_untested(version: str = VERSION) -> str | None:
    """Returns the warning about a version of ONNX Runtime that is newer than each that was tested, None for others."""
    numbers = [tuple(map(int, re.findall(r"\d+", each)[:2])) for each in (version, *TESTED_VERSIONS)]
    if numbers[0] <= max(numbers[1:]):
        return None
    tested = f"{TESTED_VERSIONS[0]} to {TESTED_VERSIONS[-1]}"
    return f"edgekit was tested with ONNX Runtime {tested}, and this is {version}: its results may differ"


class Level(enum.StrEnum):
    """How far ONNX Runtime optimises a graph."""

    DISABLED = "disabled"
    BASIC = "basic"
    EXTENDED = "extended"
    LAYOUT = "layout"
    ALL = "all"


_LEVELS: dict[Level, Any] = {
    Level.DISABLED: _ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    Level.BASIC: _ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    Level.EXTENDED: _ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    Level.LAYOUT: _ort.GraphOptimizationLevel.ORT_ENABLE_LAYOUT,
    Level.ALL: _ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}


class SessionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a session on the CPU provider is made with; `libraries` hold custom operators.

    `threads` work on one run, 0 for as many as there are cores. Runs that do not wait for each other take fewer CPU
    seconds with one thread each, side by side (`machine.map_in_order`). Without an `arena` memory is given back as soon
    as a tensor is gone: for sessions with many large outputs, which are copied. With `one_block` a run that follows
    another gets one block for all that it needs, as by default: it is quicker where nodes are small, and what the first
    run and the blocks of runs side by side take is held at once. With `in_order` a node that is ready
    runs before those behind it in the file; else ONNX Runtime goes back from each output in turn, and holds what the
    others need until it comes to them.
    """

    level: Level = Level.ALL
    config: dict[str, str] = {}
    disabled_optimizers: tuple[str, ...] = ()
    threads: int = 0
    arena: bool = True
    one_block: bool = True
    in_order: bool = False
    save_to: Path | None = None
    libraries: tuple[Path, ...] = ()


class CpuSession:
    """A loaded model on the CPU provider of this process; `output_types` are ORT's words, such as `tensor(float)`."""

    def __init__(self, model: Path | bytes, settings: SessionSettings, *, subject: str | None = None) -> None:
        name = subject or (str(model) if isinstance(model, Path) else "the model")
        source, config = _leave_weights(model) if settings.save_to is None else (model, {})
        with translated(name):
            self._session: Any = _ort.InferenceSession(
                str(source) if isinstance(source, Path) else source,
                _session_options(msgspec.structs.replace(settings, config={**settings.config, **config})),
                providers=[CPU_PROVIDER],
                disabled_optimizers=list(settings.disabled_optimizers) or None,
                # Python's own fallback makes another session on the CPU provider where one fails, and only prints that
                # it did.
                enable_fallback=False,
            )
        self.output_names: tuple[str, ...] = tuple(value.name for value in self._session.get_outputs())
        self.output_types: tuple[str, ...] = tuple(value.type for value in self._session.get_outputs())
        self._name = name

    def run(self, inputs: Tensors, outputs: Sequence[str] | None = None) -> dict[str, Array]:
        """Returns the outputs (all of them, or the named ones) for one sample; sequences and maps become tensors."""
        names = list(self.output_names if outputs is None else outputs)
        with translated(self._name):
            values = self._session.run(names, dict(inputs))
        return {
            part: array
            for name, value in zip(names, values, strict=True)
            for part, array in flatten_value(name, value).items()
        }


def optimize_graph(model: Path | bytes, out: Path, settings: SessionSettings, *, subject: str | None = None) -> None:
    """Writes the graph that ONNX Runtime makes of a model at `settings.level`; errors call the model `subject`.

    Raises:
        RuntimeRefusal: ONNX Runtime cannot load or write the model.
    """
    CpuSession(model, msgspec.structs.replace(settings, save_to=out), subject=subject)


@contextlib.contextmanager
def translated(subject: str) -> Generator[None]:
    """Turns any exception of onnxruntime into a `RuntimeRefusal` that names the subject in one line.

    A message that quotes bytes of the model which are no text arrives as a `UnicodeDecodeError`.
    """
    try:
        yield
    except _TRANSLATED as error:
        text = error.object.decode(errors="replace") if isinstance(error, UnicodeDecodeError) else str(error)
        # The rest is a stack of file names of the machine that built ONNX Runtime.
        first = text.strip().splitlines()[0] if text.strip() else type(error).__name__
        raise RuntimeRefusal(f"ONNX Runtime refuses '{subject}': {first[:400]}", hint=_hint(first)) from error


def external_config(folder: Path) -> dict[str, str]:
    """Returns the session entry by which a model that comes as bytes finds external weights in a folder."""
    return {"session.model_external_initializers_file_folder_path": str(folder.absolute())}


def _leave_weights(model: Path | bytes) -> tuple[Path | bytes, dict[str, str]]:
    """Returns what to load and with which entries, so that weights inside a large file are mapped.

    ONNX Runtime would hold the protobuf beside what it makes of it.
    """
    if isinstance(model, Path) and keeps_inside(model):
        # What is no model ONNX Runtime refuses itself.
        with contextlib.suppress(ModelError):
            return point_into(model).SerializeToString(), external_config(model.parent)
    return model, {}


def _hint(message: str) -> str:
    if "Opset" in message or "opset" in message:
        return "lower the opset: edgekit prepare MODEL --opset 21 --out FILE"
    if "construct locale" in message:
        return (
            "StringNormalizer wants a locale that this machine lacks, and a device may lack it too: apt-get install"
            " locales && locale-gen en_US.UTF-8, or lower the text before the model: TfidfVectorizer(lowercase=False)"
        )
    if "NOT_IMPLEMENTED" in message:
        return "the model uses an operator that this ONNX Runtime does not have"
    if "serialization failed" in message:
        return "is the disk full? it could not write what it made"
    return "check that the model runs in ONNX Runtime: edgekit inspect MODEL"


def _session_options(settings: SessionSettings) -> Any:
    options = cast("Any", _ort).SessionOptions()
    options.graph_optimization_level = _LEVELS[settings.level]
    # Refusals come as exceptions; the same words on stderr would stand between the lines of progress.
    options.log_severity_level = 4
    options.intra_op_num_threads, options.enable_cpu_mem_arena = settings.threads, settings.arena
    options.enable_mem_pattern = settings.one_block
    # Threads that wait for work in a loop cost as many CPU seconds as the work itself, most of all beside others.
    for key, value in {"session.intra_op.allow_spinning": "0", **settings.config}.items():
        options.add_session_config_entry(key, value)
    if settings.in_order:
        options.execution_order = cast("Any", _ort).ExecutionOrder.PRIORITY_BASED
    for library in settings.libraries:
        options.register_custom_ops_library(str(library))
    if settings.save_to is not None:
        options.optimized_model_filepath = str(settings.save_to)
    return options
