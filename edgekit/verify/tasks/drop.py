"""What quantizing costs by a metric of the task: measured on labelled samples."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from edgekit.data.labels import Label
from edgekit.data.samples import Samples
from edgekit.errors import DataError
from edgekit.model.model import Model
from edgekit.model.outputs import StatedOutput
from edgekit.quantize.accuracy.predict import LABELS, FloatReference, Likeness, Prediction
from edgekit.target import TaskLimit
from edgekit.verify.tasks.scores import TaskReport
from edgekit.verify.tasks.tasks import compare_records, read_record

MOST_SAMPLES = 1024
"""Where the models agree on so many, 0.2 points of doubt are left to each side (Agresti and Min 2005)."""
TOP1 = TaskLimit(name="top1")
"""What labels are taken to be for where nobody says it."""


def measure_drop(
    model: Model,
    quantized: Model,
    samples: Samples,
    labels: Sequence[Label],
    limit: TaskLimit = TOP1,
    outputs: Mapping[str, StatedOutput] | None = None,
) -> Prediction:
    """Runs both models over at most MOST_SAMPLES labelled samples, spread evenly, and returns the true drop.

    A drop of what lies between 0 and 1 is in shares of one, another one in shares of the float model's own figure.
    Outputs of the quantized model that the metric cannot read have lost everything. `outputs` states what outputs are.

    Raises:
        UsageError: there is no such metric or decoder.
        DataError: the outputs of the float model or the labels are nothing that the metric reads.
        MissingExtraError: the metric needs a package that is not installed.
        RuntimeRefusal: ONNX Runtime refuses a model.
    """
    return measure_drop_from(FloatReference(model, samples, outputs, most=MOST_SAMPLES), quantized, labels, limit)


def measure_drop_from(
    reference: FloatReference, quantized: Model, labels: Sequence[Label], limit: TaskLimit = TOP1
) -> Prediction:
    """Returns the true drop against a float model that is held against several; else as `measure_drop`."""
    likeness, mine, theirs = Likeness(reference.parts), list[Any](), list[Any]()
    kept = [labels[index] for index in reference.indices]
    for pair, label in zip(reference.run_pairs(quantized), kept, strict=True):
        likeness.add(pair)
        mine.append(read_record(limit, pair.expected, label))
        try:
            theirs.append(read_record(limit, pair.found, label))
        except DataError:
            return _with_all_lost(likeness.predict(), limit)
    return _with_drop(likeness.predict(), compare_records(limit, mine, theirs))


def _with_drop(prediction: Prediction, report: TaskReport) -> Prediction:
    got = report.reference if report.got is None else report.got
    sign = 1.0 if report.higher_is_better else -1.0
    scale = 1.0 if report.unit == "share" or report.reference <= 0 else report.reference
    ends = None if report.interval is None else [round(-sign * end / scale, 6) for end in report.interval]
    return msgspec.structs.replace(
        prediction,
        measure=report.name,
        drop_estimate=round(sign * (report.reference - got) / scale, 6),
        drop_interval=None if ends is None else (min(ends), max(ends)),
        source=LABELS,
        reference=round(report.reference, 6),
        got=round(got, 6),
    )


def _with_all_lost(prediction: Prediction, limit: TaskLimit) -> Prediction:
    return msgspec.structs.replace(
        prediction, measure=limit.name, drop_estimate=1.0, drop_interval=(1.0, 1.0), source=LABELS
    )
