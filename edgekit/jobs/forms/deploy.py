"""The last steps of a model on its way to a target: halved where it is to be, and converted to every form."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from edgekit.bundle.golden.golden import read_inputs
from edgekit.check.check import check_model
from edgekit.check.report import CheckReport
from edgekit.convert.convert import ConvertedModel, convert_model
from edgekit.errors import MissingExtraError
from edgekit.jobs.build_inputs import BuildInputs, BuildJob
from edgekit.jobs.forms.half_model import halve_model
from edgekit.model.model import Model, read_proto
from edgekit.prepare.weights.float_weights import disable_harmful
from edgekit.target import Precision, Target


class Deployed(msgspec.Struct, frozen=True, kw_only=True):
    """A model in the forms that a target loads; target and check are as they became on the way."""

    target: Target
    check: CheckReport
    converted: ConvertedModel


def deploy_model(
    model: Model,
    precision: Precision,
    check: CheckReport,
    inputs: BuildInputs,
    target: Target,
    job: BuildJob,
    work: Path,
    notes: list[str],
) -> Deployed:
    """Halves a model where its precision is fp16, and converts it to the forms that the target loads.

    `notes` says what was done on the way.

    Raises:
        EdgekitError: the model cannot be halved or converted.
    """
    ort_source: Model | None = None
    if precision == "fp16":
        # Files in ORT format are made of the float model: around each node of a half one ONNX Runtime bakes casts.
        ort_source, model = model, halve_model(model, check, target, inputs.golden, work / "half.onnx", notes)
        check = check_model(model, target)
    target, told = disable_harmful(target, read_proto(model, weights=False).graph)
    notes += told
    job.watch.begin("convert", target.name)
    converted = _convert(_converter(model, ort_source, inputs, work / "converted"), target, notes)
    return Deployed(target=target, check=check, converted=converted)


def _converter(model: Model, ort_source: Model | None, inputs: BuildInputs, out: Path) -> Callable[..., ConvertedModel]:
    golden = read_inputs(inputs.golden)
    return partial(convert_model, model, out=out, ort_source=ort_source, origin=inputs.source, samples=golden)


def _convert(convert: Callable[..., ConvertedModel], target: Target, notes: list[str]) -> ConvertedModel:
    """Converts to every form, or to those that need no absent extra: then `notes` says what is missing."""
    try:
        return convert(target=target)
    except MissingExtraError as error:
        # A context needs the vendor's compiler; without it the other forms of the bundle are still good.
        forms = tuple(form for form in target.conversion.forms if form != "context")
        if not forms:
            raise
        notes.append(f"no context model: {error}")
        conversion = msgspec.structs.replace(target.conversion, forms=forms)
        return convert(target=msgspec.structs.replace(target, conversion=conversion))
