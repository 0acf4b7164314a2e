"""One stage at a time, for a model as the user has it: it is prepared, then the stage runs."""

from importlib.metadata import version
from pathlib import Path

import msgspec

from edgekit import _ort
from edgekit._files import move_file, work_folder
from edgekit.data.images import Preprocess
from edgekit.jobs.check import TargetGain, fix_for_target
from edgekit.model.model import Model
from edgekit.prepare import Fix, fix_model
from edgekit.prepare.clean import prepare_model
from edgekit.prepare.external import place_weights, refuse_inline
from edgekit.prepare.interface import InterfaceChanges, change_interface, remaining_preprocess
from edgekit.progress import Progress, say_nothing
from edgekit.target import Target


class PrepareOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to prepare a model; see `prepare_model`, `change_interface` and `fix_model`.

    `external` puts the weights beside the model or into it; None decides by size. With a `target` the rewrites by which
    it takes more are applied too.
    """

    dims: dict[str, int] = {}
    opset: int | None = None
    outputs: tuple[str, ...] = ()
    constants: dict[str, float] = {}
    changes: InterfaceChanges = InterfaceChanges()
    fix: bool = True
    external: bool | None = None
    target: Target | None = None


class PrepareReport(msgspec.Struct, frozen=True, kw_only=True):
    """A prepared model and the rewrites that were applied; `preprocess` is what an app still does to an image.

    `gain` is what a target takes of it before and after the rewrites, where one was named.
    """

    model: Model
    fixes: tuple[Fix, ...]
    is_refaced: bool
    preprocess: Preprocess | None
    gain: TargetGain | None = None


def prepare_for(source: Model, out: Path, options: PrepareOptions, progress: Progress = say_nothing) -> PrepareReport:
    """Writes the prepared form of a model to `out`.

    Raises:
        EdgekitError: the model or an option is wrong.
    """
    changes = options.changes
    if options.external is False:
        refuse_inline(source)
    progress("prepare the model")
    # Beside the result, so that moving it there is a rename within one file system.
    with work_folder(out.parent) as work:
        staged = work / out.name
        prepared = prepare_model(
            source, staged, options.dims, opset=options.opset, outputs=options.outputs, constants=options.constants
        )
        prepared = change_interface(prepared, staged, changes)
        fixes: tuple[Fix, ...] = ()
        gain: TargetGain | None = None
        if options.fix and options.target is not None:
            better, gain = fix_for_target(prepared, staged, options.target)
            prepared, fixes = better.model, better.fixes
        elif options.fix:
            fixed = fix_model(prepared, staged)
            prepared, fixes = fixed.model, fixed.fixes
        if options.external is not None:
            prepared = place_weights(prepared, external=options.external)
        # Weights first: at no moment is the model there without them.
        for name in (*prepared.external_files, out.name):
            move_file(work / name, out.with_name(name))
    prepared = msgspec.structs.replace(prepared, path=out)
    left = None if changes.preprocess is None else remaining_preprocess(changes.preprocess)
    return PrepareReport(model=prepared, fixes=fixes, is_refaced=not changes.is_empty, preprocess=left, gain=gain)


def list_versions() -> dict[str, str]:
    """Returns the versions of edgekit and of what it stands on."""
    return {"edgekit": version("edgekit-onnx"), "onnxruntime": _ort.VERSION, "onnx": version("onnx")}
