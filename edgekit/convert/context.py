"""Compiling a QNN context model in a child process, one process a model."""

import importlib.util
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import onnx

from edgekit._proc import Finished, run_process
from edgekit.errors import DeviceError, MissingExtraError, RuntimeRefusal
from edgekit.target import Target

CONTEXT_FILE = "model_ctx.onnx"
_PROGRAM = Path(__file__).parent / "far" / "qnn_context.py"
_COMPATIBILITY = "ep_compatibility_info.QNNExecutionProvider"
_REFUSED = 3
_NAMED_NODES = 8
_NAME_LENGTH = 80


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """A compiled context model: its files, the first to load, and what it says of the device that can load it.

    `compatibility` is Qualcomm's string (format, API, QAIRT, backend, architecture, SoC, VTCM, flags).
    """

    files: tuple[str, ...]
    compatibility: str
    versions: Mapping[str, str]

    @property
    def qairt_version(self) -> str:
        """The version of Qualcomm's runtime that compiled it; the device needs the same or a newer one."""
        parts = self.compatibility.split(":")
        return parts[2] if len(parts) > 2 else ""


def require_compiler() -> None:
    """Makes sure that QNN's compiler is installed.

    Raises:
        MissingExtraError: onnxruntime-qnn is not installed.
    """
    if importlib.util.find_spec("onnxruntime_qnn") is None:
        raise MissingExtraError(
            "a QNN context needs the package 'onnxruntime-qnn'", hint="pip install 'edgekit[qnn]' (Linux, x86-64)"
        )


def compile_context(model: str, target: Target, folder: Path, *, timeout_s: float = 900.0) -> Context:
    """Compiles the model file of that name in `folder` for the target's SoC, beside it.

    The child works inside the folder, since the model's path as it is given enters the bytes of the context.

    Raises:
        MissingExtraError: onnxruntime-qnn is not installed.
        RuntimeRefusal: QNN does not take the whole model.
        DeviceError: the compiler crashed or ran out of time.
    """
    require_compiler()
    job = {
        "model": model,
        "out": CONTEXT_FILE,
        "provider_options": target.session.provider_options,
        "config": target.session.config,
    }
    child = run_process(
        [sys.executable, str(_PROGRAM), json.dumps(job, sort_keys=True)], timeout_s=timeout_s, cwd=folder
    )
    if not child.succeeded:
        raise _failure(child, target)
    data = sorted(path.name for path in folder.glob(f"{Path(CONTEXT_FILE).stem}*.bin"))
    return Context(
        files=(CONTEXT_FILE, *data),
        compatibility=_read_compatibility(folder / CONTEXT_FILE),
        versions=json.loads(child.stdout.strip().splitlines()[-1])["versions"],
    )


def _failure(child: Finished, target: Target) -> DeviceError | RuntimeRefusal:
    last = (child.stderr.strip().splitlines() or [""])[-1]
    if child.status != _REFUSED or child.timed_out:
        return DeviceError(
            f"QNN's compiler {child.ending}: {last[:300]}", hint="edgekit check MODEL --target qnn --observe"
        )
    settings = ", ".join(f"{key}={value}" for key, value in target.settings.items())
    left = re.findall(r"\{ name: (.*?), type: (\w+) \}", child.stderr)
    nodes = ", ".join(f"'{_shorten(name)}' ({op})" for name, op in list(dict.fromkeys(left))[:_NAMED_NODES])
    reason = f"does not take the whole model, for one {nodes}" if nodes else f"refuses the model: {last[:300]}"
    return RuntimeRefusal(
        f"QNN for {settings} {reason}", hint="edgekit check MODEL --target qnn tells why, and what to change"
    )


def _shorten(name: str) -> str:
    return name if len(name) <= _NAME_LENGTH else f"{name[:_NAME_LENGTH]}..."


def _read_compatibility(path: Path) -> str:
    props = onnx.load(str(path), load_external_data=False).metadata_props
    return next((entry.value for entry in props if entry.key == _COMPATIBILITY), "")
