"""Writes ORT-format files: both styles, every level, for Arm and x64, in canonical order."""

import contextlib
from pathlib import Path
from typing import Literal

import msgspec

from edgekit._files import replacing_file
from edgekit._ort import CpuSession, Level, SessionSettings, optimize_graph
from edgekit.convert.ort_format.canonical import canonicalize_file
from edgekit.errors import ModelError
from edgekit.model.external import skim_model
from edgekit.model.model import Model
from edgekit.prepare.constants import find_harmful

REPLAY = {"session.enable_saved_runtime_optimizations": "1"}
"""The session config entry without which ONNX Runtime 1.31 ignores saved optimisations (its PR 32077)."""

Style = Literal["full", "runtime"]
Cpu = Literal["arm", "x64"]

MAX_ORT_BYTES = 2**31 - (64 << 20)
"""A larger model is refused before work starts: the format has at most 2 GB, of which its tables need a part."""


class OrtOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to write an ORT-format file.

    "full" contains every fusion for the CPU. "runtime" keeps the operators that providers take, and saves the fusions
    for the nodes that they leave to the CPU. `cpu` is the CPU that will run it: Arm has kernels for signed 8-bit
    activations, x64 has blocked layouts.
    """

    style: Style
    cpu: Cpu
    level: Level = Level.ALL


def write_ort(model: Model, out: Path, options: OrtOptions, *, subject: str | None = None) -> None:
    """Writes a model in canonical ORT format to `out`, whole or not at all, after loading it as an app would.

    `subject` names the model in errors.

    Raises:
        ModelError: the model is too large for the format.
        RuntimeRefusal: ONNX Runtime cannot load or convert the model.
        OutputError: `out` cannot be written.
    """
    refuse_size(model.path, model.size_bytes)
    with replacing_file(out) as temporary:
        settings = session_settings(options, options.level, model)
        # By default the format follows from the file's suffix, and the temporary file's suffix is not `.ort`.
        config = {**settings.config, "session.save_model_format": "ORT"}
        if options.style == "runtime":
            config["optimization.minimal_build_optimizations"] = "save"
        settings = msgspec.structs.replace(settings, config=config, libraries=model.custom_ops)
        optimize_graph(model.path, temporary, settings, subject=subject)
        canonicalize_file(temporary)
        # Loaded as an app would, but memory-mapped, so that this test does not copy the weights.
        settings = load_settings(options, model)
        mapped = {"session.use_memory_mapped_ort_model": "1", "session.use_ort_model_bytes_for_initializers": "1"}
        config = {**settings.config, **mapped}
        settings = msgspec.structs.replace(settings, config=config, libraries=model.custom_ops)
        CpuSession(temporary, settings, subject=subject)


def refuse_size(path: Path, size_bytes: int, having: str = "has") -> None:
    """Refuses a size that the ORT format cannot hold; `having` is its verb, "has" or "with X weights has at least".

    Raises:
        ModelError: the model is too large for the format.
    """
    if size_bytes > MAX_ORT_BYTES:
        raise ModelError(
            f"'{path}' {having} {size_bytes / 1e9:.1f} GB, and the ORT format ends at 2 GB",
            hint="ship the .onnx with its external data: a target whose forms are only 'onnx' does",
        )


def session_settings(options: OrtOptions, level: Level, source: Model) -> SessionSettings:
    """Returns the session settings under which the source runs like the converted file."""
    # Blocked layouts exist on x64 alone: a file for Arm that is written on x64 must not have them.
    disabled = () if options.cpu == "x64" else ("NchwcTransformer",)
    disabled = (*disabled, *_list_harmful(source))
    return SessionSettings(level=level, config=_config(options), disabled_optimizers=disabled, threads=1)


def load_settings(options: OrtOptions, source: Model | None = None) -> SessionSettings:
    """Returns the session settings with which an app would open the converted file."""
    disabled = () if source is None else _list_harmful(source)
    return SessionSettings(config={**_config(options), **REPLAY}, disabled_optimizers=disabled, threads=1)


def _list_harmful(source: Model) -> tuple[str, ...]:
    with contextlib.suppress(ModelError):  # a file that cannot be read is refused when it is opened
        return tuple(find_harmful(skim_model(source.path).graph))
    return ()


def _config(options: OrtOptions) -> dict[str, str]:
    # Prepacked weights would be in the layout of this machine's kernels. Without the second key ONNX Runtime turns s8
    # activations into u8 on x64 (qdq_s8_to_u8.cc), and the file for Arm would lose its faster kernels.
    return {"session.disable_prepacking": "1", "session.qdqisint8allowed": "1" if options.cpu == "arm" else "0"}
