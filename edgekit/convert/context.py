"""Compiles QNN context models (EPContext nodes with a binary for the NPU), each in a child process of its own."""

import importlib.util
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import onnx

from edgekit._proc import run_process
from edgekit.errors import DeviceError, MissingExtraError, RuntimeRefusal, UsageError, require_known
from edgekit.machine import spell_install
from edgekit.prepare.constants import DISABLED, OPTIMIZER
from edgekit.target import Target

CONTEXT_FILE = "model_ctx.onnx"
INSTALL_QNN = spell_install("onnxruntime-qnn==2.7.0")
# ONNX Runtime's message if a provider takes no node, for example of a decision tree.
_TAKES_NONE = "Unable to compile any nodes"
_PROGRAM = Path(__file__).parent / "standalone" / "qnn_context.py"
_COMPATIBILITY = "ep_compatibility_info.QNNExecutionProvider"
_REFUSED = 3
_QAIRT_AT, _ARCHS_AT, _SOCS_AT = 2, 4, 5
"""The positions of QAIRT's version, HTP versions and SoCs in the compatibility string (found in QAIRT 2.51)."""
_NAMED_NODES = 8
_NAME_LENGTH = 80


class ContextOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options to compile a context.

    `socs` are Qualcomm's numbers of the SoCs it is for, `archs` versions of the HTP, such as 73; if both are empty, the
    target's SoC is used. Several give one binary for all. With `embedded` the binary is inside the ONNX file.
    """

    socs: tuple[str, ...] = ()
    archs: tuple[str, ...] = ()
    embedded: bool = False


DEFAULT_CONTEXT = ContextOptions()
HTP_SOCS: Mapping[str, str] = {"68": "30", "69": "36", "73": "43", "75": "57", "79": "69", "81": "87"}
"""The versions of the Hexagon Tensor Processor that QAIRT 2.51 compiles for, each with an example of its SoCs."""


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """A compiled context model: its files, of which an app loads the first, and which devices can load it.

    `compatibility` is Qualcomm's string (format, API, QAIRT, backend, architecture, SoC, VTCM, flags). `versions` names
    what compiled it; the device needs "qairt", Qualcomm's runtime, in the same version or a newer one.
    """

    files: tuple[str, ...]
    compatibility: str
    versions: Mapping[str, str]


def require_compiler() -> None:
    """Checks that QNN's compiler is installed.

    Raises:
        MissingExtraError: onnxruntime-qnn is not installed.
    """
    if importlib.util.find_spec("onnxruntime_qnn") is None:
        words = "a QNN context needs the package 'onnxruntime-qnn'"
        raise MissingExtraError(words, hint=f"{INSTALL_QNN} (Linux, x86-64)")


def compile_context(
    model: str, target: Target, folder: Path, options: ContextOptions = DEFAULT_CONTEXT, *, timeout_s: float = 900.0
) -> Context:
    """Compiles the file `model` in `folder` to a context in the same folder, for the options' SoCs or the target's.

    Each compilation has a child process of its own, since QNN keeps state that breaks the next one. The child works
    inside the folder, since the model's path as it is given enters the bytes of the context. To test the context,
    another child loads it. A context for several chips cannot be loaded on a PC: a context for each single chip is
    compiled and loaded instead.

    Raises:
        UsageError: there is no such SoC number or HTP version.
        MissingExtraError: onnxruntime-qnn is not installed.
        RuntimeRefusal: QNN does not take the whole model.
        DeviceError: the compiler crashed or ran out of time.
    """
    require_compiler()
    _check_options(options)
    whole = _describe_job(model, CONTEXT_FILE, target, options)
    versions = _run_child(whole, folder, timeout_s)
    chips = [ContextOptions(socs=(soc,), embedded=True) for soc in options.socs]
    chips += [ContextOptions(archs=(arch,), embedded=True) for arch in options.archs]
    parts = enumerate(chips if len(chips) > 1 else ())
    singles = [_describe_job(model, f"single{at}.onnx", target, one) for at, one in parts]
    for job in singles:
        _run_child(job, folder, timeout_s)
    for job in singles or [whole]:
        _run_child({**job, "load": True}, folder, timeout_s)
    props = onnx.load(str(folder / CONTEXT_FILE), load_external_data=False).metadata_props
    compatibility = next((entry.value for entry in props if entry.key == _COMPATIBILITY), "")
    fields = dict(enumerate(compatibility.split(":")))
    for wanted, place in ((options.archs, _ARCHS_AT), (options.socs, _SOCS_AT)):
        missing = [name for name in wanted if name not in fields.get(place, "").split(",")]
        if missing:
            words = f"QNN's compiler left out {', '.join(missing)}: the context says '{compatibility}'"
            raise RuntimeRefusal(words, hint="compile one context for each chip")
    data = sorted(path.name for path in folder.glob(f"{Path(CONTEXT_FILE).stem}*.bin"))
    versions["qairt"] = fields.get(_QAIRT_AT, "")
    return Context(files=(CONTEXT_FILE, *data), compatibility=compatibility, versions=versions)


def plan_context(model: str, soc: str, folder: Path, *, timeout_s: float) -> str:
    """Compiles the file `model` in `folder` for a SoC, and returns the compiler's plan as text.

    The plan lists the NPU's operations in their order, and the bytes that each moves, without nodes on the CPU.

    Raises:
        MissingExtraError: onnxruntime-qnn is not installed.
        RuntimeRefusal: QNN takes no node of the model.
        DeviceError: the compiler crashed, ran out of time or wrote no plan.
    """
    require_compiler()
    options = {"backend_type": "htp", "soc_model": soc, "profiling_level": "optrace"}
    provider = {**options, "profiling_file_path": "profile.csv"}
    job = {"model": model, "out": "planned.onnx", "provider_options": provider, "config": {}, "embed": False}
    _run_child(job, folder, timeout_s)
    # One plan for each part of the graph that the NPU takes.
    if not (plans := sorted(folder.glob("*_schematic.bin"))):
        raise DeviceError(f"QNN's compiler wrote no plan of '{model}'", hint="forecast without --compile")
    return "\n".join(path.read_text(errors="replace") for path in plans)


def _describe_job(model: str, out: str, target: Target, options: ContextOptions) -> dict[str, Any]:
    provider = dict(target.session.provider_options)
    if options.socs or options.archs:
        # The target's own SoC must not be passed together with the requested chips.
        provider.pop("soc_model", None)
        wanted = {"soc_model": ",".join(options.socs), "htp_arch": ",".join(options.archs)}
        provider |= {key: value for key, value in wanted.items() if value}
    # Float weights of a quantized model would be rounded; a device loads what is compiled here.
    config = {DISABLED: OPTIMIZER, **target.session.config}
    return {"model": model, "out": out, "provider_options": provider, "config": config, "embed": options.embedded}


def _check_options(options: ContextOptions) -> None:
    """Refuses invalid values: the provider would accept them silently and compile for the oldest chip."""
    if options.socs and options.archs:
        raise UsageError("a context is for SoCs or for HTP versions, not both", hint="give --soc or --htp-arch")
    for soc in options.socs:
        if not re.fullmatch(r"[1-9][0-9]{0,2}", soc):
            raise UsageError(f"'{soc}' is no number of a SoC", hint="for example 43 (SM8550), 57 (SM8650), 69 (SM8750)")
    for arch in options.archs:
        require_known(arch, HTP_SOCS, f"there is no HTP version '{arch}'")


def _run_child(job: Mapping[str, Any], folder: Path, timeout_s: float) -> dict[str, str]:
    argv = [sys.executable, str(_PROGRAM), json.dumps(job, sort_keys=True)]
    child = run_process(argv, timeout_s=timeout_s, cwd=folder)
    if child.succeeded:
        versions: dict[str, str] = json.loads(child.stdout.strip().splitlines()[-1])["versions"]
        return versions
    last, options = (child.stderr.strip().splitlines() or [""])[-1], job["provider_options"]
    # Any other status means that the compiler itself died, often by a signal: it says nothing of the model.
    if child.status != _REFUSED or child.timed_out:
        words = f"QNN's compiler {child.ending}: {last[:300]}"
        raise DeviceError(words, hint="edgekit check MODEL --target qnn --observe")
    settings = ", ".join(f"{key}={options[key]}" for key in ("soc_model", "htp_arch") if key in options)
    left = re.findall(r"\{ name: (.*?), type: (\w+) \}", child.stderr)
    nodes = ", ".join(f"'{shorten_name(name)}' ({op})" for name, op in list(dict.fromkeys(left))[:_NAMED_NODES])
    reason = f"does not take the whole model, for example not {nodes}" if nodes else f"refuses the model: {last[:300]}"
    hint = "edgekit check MODEL --target qnn tells why, and what to change"
    if _TAKES_NONE in last:
        reason, hint = "takes no node of the model", f"build it for the CPU: --target cpu; {hint}"
    raise RuntimeRefusal(f"QNN for {settings} {reason}", hint=hint, nodes=[name for name, _ in left])


def shorten_name(name: str) -> str:
    """Returns the name of a node, shortened for a message: some converters write a whole path for each fused layer."""
    return name if len(name) <= _NAME_LENGTH else f"{name[:_NAME_LENGTH]}..."
