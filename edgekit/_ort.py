"""The only module that uses onnxruntime in this process: sessions, graph optimisation, and translated exceptions."""

import contextlib
import enum
import functools
import importlib
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import msgspec
import onnx
import onnxruntime as _ort
from google.protobuf.message import DecodeError

from edgekit._files import hide_work
from edgekit.errors import ModelError, RuntimeRefusal
from edgekit.machine import may_saturate
from edgekit.model.external import point_into, skim_model
from edgekit.model.model import Model, has_large_weights_inside
from edgekit.model.tensors import Array, Tensors, flatten_value

_P = ParamSpec("_P")
_R = TypeVar("_R")
_state: Any = importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state")
VERSION: str = _ort.__version__
AVAILABLE_PROVIDERS: tuple[str, ...] = tuple(cast("Any", _ort).get_available_providers())
"""The providers that this ONNX Runtime was built with; the libraries or hardware that they need may be missing."""
TESTED_VERSIONS = ("1.31.1", "1.32.0")
"""The versions of ONNX Runtime that edgekit was tested with; the first is that of the lock file.

docs/reference/measured.md lists their differences.
"""
CPU_PROVIDER = "CPUExecutionProvider"

REFUSALS: tuple[type[Exception], ...] = tuple(
    cast("type[Exception]", getattr(_state, name))
    for name in (
        "EPFail", "EngineError", "Fail", "InvalidArgument", "InvalidGraph", "InvalidProtobuf", "ModelLoadCanceled",
        "ModelLoaded", "ModelRequiresCompilation", "NoModel", "NoSuchFile", "NotFound", "NotImplemented",
        "RuntimeException", "DeviceReset",
    )
)  # fmt: skip
"""Every exception class that onnxruntime defines; they share no base class (a test enumerates them)."""

# The exceptions into which pybind11 translates those of C++ (its page "Exceptions"); UnicodeDecodeError comes from a
# message that is not valid UTF-8.
_TRANSLATED: tuple[type[Exception], ...] = (
    *REFUSALS, UnicodeDecodeError, IndexError, MemoryError, OverflowError, RuntimeError, ValueError
)  # fmt: skip


# What ONNX Runtime says where shapes contradict each other: the node, its operator, and what is wrong.
_UNFIT = re.compile(r"^(?!.*Op \((?:If|Loop|Scan)\)).*?Node \((.*?)\) Op \((.*?)\) \[ShapeInferenceError\] (.*)")


def describe_untested(version: str = VERSION) -> str | None:
    """Returns a warning if a version of ONNX Runtime is newer than every tested one, else None."""
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


PRECISE = "session.x64quantprecision"
EXACT_SUMS: Mapping[str, str] = {PRECISE: "1", "session.qdqisint8allowed": "0"}
"""The session config entries with which an x64 without VNNI adds products of 8 bits in 32 bits, as a phone does.

Otherwise pairs of u8 x s8 products are added in 16 bits, which saturate (VPMADDUBSW). The first entry makes s8 weights
u8, for which there is no kernel with s8 activations: the second makes these u8 too. Neither changes a file in ORT
format. With VNNI all sums have 32 bits, and products would only be slower: the runs of ViT-S by 1.4 times.
"""
IN_FLOAT: Mapping[str, str] = {"session.disable_quant_qdq": "1"}
"""The entry with which nodes between Q and DQ nodes compute in float: as exact, and up to 1.8 times as slow."""
# What avx2_weight_s8_to_u8.cc changes.
_INTEGER_PRODUCTS = frozenset({
    "DynamicQuantizeLSTM", "DynamicQuantizeMatMul", "MatMulInteger", "MatMulIntegerToFloat", "QAttention", "QGemm",
    "QLinearConv", "QLinearMatMul",
})  # fmt: skip


class SessionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a session on the CPU provider; `libraries` are libraries of custom operators.

    `threads` is the number of threads of one run (intra-op), 0 for one per core. Independent runs take fewer CPU
    seconds if they run concurrently with one thread each (`machine.map_in_order`). Without an `arena`, memory is freed
    as soon as a tensor is no longer needed: this suits sessions with many large outputs, which are copied.

    `one_block` enables ONNX Runtime's memory pattern and its reuse of buffers. With the pattern, every run after the
    first allocates one block for all tensors: faster for small nodes, but the arena of the first run and the blocks of
    concurrent runs are held at the same time. A buffer that a later tensor of equal size will reuse is not freed in
    between: 108 MB for the attention scores of Whisper's encoder.

    With `in_order`, nodes run in the order of the file as soon as they are ready; otherwise ONNX Runtime walks back
    from each output in turn, and keeps tensors that other outputs need until it reaches those. `save_to` is where the
    optimized graph is written.
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
    """A loaded model on the CPU provider of this process; `output_types` are ORT's names, such as `tensor(float)`."""

    def __init__(self, model: Path | bytes, settings: SessionSettings, *, subject: str | None = None) -> None:
        name = subject or (str(model) if isinstance(model, Path) else "the model")
        source = str(model) if isinstance(model, Path) else model
        # Threads that spin while they wait for work cost as many CPU seconds as the work itself, and even more if other
        # threads compete for the cores.
        config = {"session.intra_op.allow_spinning": "0", **settings.config}
        if settings.save_to is None and isinstance(model, Path) and has_large_weights_inside(model):
            # Memory-mapped: otherwise ONNX Runtime would hold the protobuf in memory beside its own copy of the
            # weights. A file that is no model is passed on: ONNX Runtime refuses it itself.
            with contextlib.suppress(ModelError):
                source = point_into(model).SerializeToString()
                config |= external_config(model.parent)

        def open_session(level: Level, more: Mapping[str, str]) -> Any:
            options = cast("Any", _ort).SessionOptions()
            kind = "DISABLE_ALL" if level == Level.DISABLED else f"ENABLE_{level.name}"
            options.graph_optimization_level = getattr(_ort.GraphOptimizationLevel, f"ORT_{kind}")
            # Errors come as exceptions; the same text on stderr would be mixed with the lines of progress.
            options.log_severity_level = 4
            # What checks shapes has no session: its warnings, as of a deprecated attribute, go to the logger of the
            # process.
            cast("Any", _ort).set_default_logger_severity(4)
            options.intra_op_num_threads, options.enable_cpu_mem_arena = settings.threads, settings.arena
            options.enable_mem_pattern = options.enable_mem_reuse = settings.one_block
            for key, value in {**more, **config}.items():
                options.add_session_config_entry(key, value)
            if settings.in_order:
                options.execution_order = cast("Any", _ort).ExecutionOrder.PRIORITY_BASED
            for library in settings.libraries:
                options.register_custom_ops_library(str(library))
            if settings.save_to is not None:
                options.optimized_model_filepath = str(settings.save_to)
            return _ort.InferenceSession(
                source,
                options,
                providers=[CPU_PROVIDER],
                disabled_optimizers=list(settings.disabled_optimizers) or None,
                # With the fallback, the Python package opens another session on the CPU provider if the first fails,
                # and only prints a line about it.
                enable_fallback=False,
            )

        with translated(name):
            self._session: Any = None
            # A file that is written must not depend on the CPU that writes it.
            saturates = settings.save_to is None and may_saturate() and PRECISE not in settings.config
            with contextlib.suppress(*_TRANSLATED):
                self._session = open_session(_choose_level(model, settings), EXACT_SUMS) if saturates else None
            if self._session is None:
                self._session = open_session(settings.level, {})
                if saturates:
                    # ONNX Runtime 1.31 fails with exact sums if nodes share an int8 constant or its zero point. In
                    # float it may load what it refuses otherwise, so that comes last, when the other is out of memory.
                    self._session = None
                    self._session = open_session(settings.level, IN_FLOAT)
        self.output_names: tuple[str, ...] = tuple(value.name for value in self._session.get_outputs())
        self.output_types: tuple[str, ...] = tuple(value.type for value in self._session.get_outputs())
        self._name = name

    def run(self, inputs: Tensors, outputs: Sequence[str] | None = None) -> dict[str, Array]:
        """Returns the outputs (all, or the named ones) for one sample; sequences and maps as in `flatten_value`."""
        names = list(self.output_names if outputs is None else outputs)
        with translated(self._name):
            values = self._session.run(names, dict(inputs))
        parts = (flatten_value(name, value) for name, value in zip(names, values, strict=True))
        return {name: array for part in parts for name, array in part.items()}


def _choose_level(model: Path | bytes, settings: SessionSettings) -> Level:
    """Returns the level for exact sums: ONNX Runtime makes weights u8 from "extended" on.

    Without optimisation Q and DQ nodes compute in float, so that only a model with products of integers needs more.
    """
    if settings.level not in {Level.DISABLED, Level.BASIC} or (isinstance(model, Path) and model.suffix == ".ort"):
        return settings.level
    try:
        proto = skim_model(model) if isinstance(model, Path) else onnx.ModelProto.FromString(model)
    except (ModelError, DecodeError):
        return settings.level
    return Level.EXTENDED if has_integer_products(proto.graph) else settings.level


def has_integer_products(graph: onnx.GraphProto) -> bool:
    """Returns True if operators of a graph multiply integers themselves, other than between Q and DQ nodes."""
    return any(node.op_type in _INTEGER_PRODUCTS for node in graph.node)


def makes_session(model: Path | bytes, settings: SessionSettings) -> bool:
    """Returns True if ONNX Runtime loads the model."""
    try:
        CpuSession(model, settings)
    except RuntimeRefusal:
        return False
    return True


def tells_refusal(step: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorates a step that reads a model: if the step fails and ONNX Runtime refuses the model, the refusal is raised.

    A step does not check everything that it relies on: the weight of a Conv may have an axis too few, for example. If
    ONNX Runtime loads the model, the step's exception is raised unchanged, because the fault is in the step.
    """

    @functools.wraps(step)
    def read(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return step(*args, **kwargs)
        except (ArithmeticError, LookupError, TypeError, ValueError):
            model = next(each for each in (*args, *kwargs.values()) if isinstance(each, Model))
            CpuSession(model.path, SessionSettings(level=Level.DISABLED), subject=model.path.name)
            raise

    return read


def optimize_graph(model: Path | bytes, out: Path, settings: SessionSettings, *, subject: str | None = None) -> None:
    """Writes a model's graph as ONNX Runtime optimises it at `settings.level`; `subject` names the model in errors.

    Raises:
        RuntimeRefusal: ONNX Runtime cannot load or write the model.
    """
    CpuSession(model, msgspec.structs.replace(settings, save_to=out), subject=subject)


@contextlib.contextmanager
def translated(subject: str) -> Generator[None]:
    """Turns any exception of onnxruntime into a `RuntimeRefusal` that names the subject in one line.

    If the message quotes bytes of the model that are not valid UTF-8, pybind11 raises a `UnicodeDecodeError` instead.
    """
    try:
        yield
    except _TRANSLATED as error:
        text = error.object.decode(errors="replace") if isinstance(error, UnicodeDecodeError) else str(error)
        # The other lines are a stack trace with file names of the machine that built ONNX Runtime.
        first = text.strip().splitlines()[0] if text.strip() else type(error).__name__
        if found := _UNFIT.search(first):
            words = f"ONNX Runtime refuses '{subject}': sizes do not fit at node '{found[1]}' ({found[2]}): {found[3]}"
            hint = "give sizes that do: --dim NAME=INT, or export it again"
            raise RuntimeRefusal(hide_work(words[:600]), hint=hint) from error
        message = hide_work(f"ONNX Runtime refuses '{subject}': {first[:400]}")
        # The message has the path, and a file may be called after its opset.
        found_hints = ((re.search(pattern, first.replace(subject, "")), hint) for pattern, hint in _HINTS.items())
        hint = next(hint.format(*match.groups()) for match, hint in found_hints if match is not None)
        raise RuntimeRefusal(message, hint=hint) from error


def external_config(folder: Path) -> dict[str, str]:
    """Returns the session config entry with the folder of external weights, for a model loaded from bytes."""
    return {"session.model_external_initializers_file_folder_path": str(folder.absolute())}


_NO_LOCALE = (
    "StringNormalizer wants a locale that this machine lacks, and a device may lack it too: apt-get install"
    " locales && locale-gen en_US.UTF-8, or lower the text before the model: TfidfVectorizer(lowercase=False)"
)
# What to do about an error of ONNX Runtime: the first whose pattern occurs in the message, with its groups in {}.
_HINTS = {
    "[Oo]pset": "lower the opset: edgekit prepare MODEL --opset 21 --out FILE",
    "construct locale": _NO_LOCALE,
    r"tensor\(bfloat16\)": "export it in float32: ONNX Runtime computes little in bfloat16",
    "NOT_IMPLEMENTED": "this ONNX Runtime lacks the operator, or its element type: export bfloat16 in float32, say",
    # In ONNX's own domain: tf2onnx leaves what it cannot convert, such as TensorFlow's Lgamma.
    r"No Op registered for (\w+) with domain_version of (\d+)": (
        "export the model with other operators of ONNX, or a newer opset: there is no {0} in {1}"
    ),
    "is not a registered function/op": (
        "give the library that has the operator, if the command takes one: --custom-ops LIB.so"
    ),
    # flatbuffers_utils.cc, where a model is saved in ORT format.
    "We do not support type": (
        "the ORT format holds tensors, sequences and maps: end the model at these, edgekit prepare --outputs NAMES"
    ),
    r"Unsupported tensor data type '<unknown>'": (
        "the ORT format holds no weights of 4 bits with a scale for each block: edgekit prepare --target NAME stores"
        " them in float, or ship the .onnx"
    ),
    # A voice detector has one branch for 8 kHz and one for 16, of which only one fits a fixed length.
    r"Op \(If\)": "a branch of an If does not fit; make the input that chooses it a constant: --freeze INPUT=NUMBER",
    # The session opened, so it is the values: an index beyond a table, sizes that do not fit each other.
    "while running": "the inputs do not fit this node: give samples such as the app has, or look at the node's inputs",
    "same node name": "give nodes names of their own: edgekit prepare MODEL --out FILE",
    "serialization failed": "is the disk full? free some space, or set TMPDIR to a larger place",
    "": "check that the model runs in ONNX Runtime: edgekit inspect MODEL",
}
