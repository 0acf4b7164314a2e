"""Metrics of the task: the score of labelled samples, on the float model and on the bundle's.

They are accuracy, detection as COCO measures it, text by the decoder that the user names, and language models by the
probability of their tokens. Packages that only some metrics need are imported when such a metric is used.
"""

import contextlib
import importlib
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from edgekit.data.intervals import bootstrap_pairs, interval_of_pairs
from edgekit.data.samples import FUNCTION, Samples, load_function
from edgekit.data.sets import Boxes, Label, LabelKind
from edgekit.errors import DataError, EdgekitError, MissingExtraError, look_up, quote_error, reraised
from edgekit.machine import spell_install
from edgekit.model.model import Model
from edgekit.model.tensors import Array, Tensors, is_text, ranks_classes
from edgekit.quantize.accuracy.loss import spell_answer
from edgekit.quantize.accuracy.predict import LABELS, FloatReference, Prediction
from edgekit.target import TaskLimit
from edgekit.verify.metrics.agreement import count_edits
from edgekit.verify.metrics.tensor_metrics import DB_LIMIT, MAX_CLASSES, count_classes, decibels, mean_iou
from edgekit.verify.task_scores import TaskReport, Unit


def decode_text(value: Array, limit: TaskLimit) -> str:
    """Returns the text that an output decodes to.

    Raises:
        UsageError: there is no such decoder.
        DataError: the output is nothing that the decoder reads.
    """
    name = limit.decoder or ("strings" if is_text(value) else "ctc-greedy")
    return look_up(DECODERS, name, f"there is no decoder '{name}'")(value, limit)


def decode_ctc(value: Array, limit: TaskLimit) -> str:
    """Returns the best path of a [time, classes] output: the best class per step, repeats merged, blanks dropped.

    Graves et al. 2006, "Connectionist temporal classification", section 3.2 (best path decoding). Axes of size 1 are
    ignored. `blank` of the limit is the class of the blank, counted from the end if it is negative.
    """
    dims = [dim for dim in value.shape if dim != 1]
    if len(dims) != 2 or value.dtype.kind != "f":
        raise DataError(f"ctc-greedy cannot read {value.dtype}{list(value.shape)}", hint="it reads [time, classes]")
    classes = dims[1]
    scores, blank, letters = value.reshape(dims), limit.blank % classes, list(limit.alphabet)
    if len(letters) == classes - 1:
        letters.insert(blank, "")
    return _spell(spell_answer(scores.argmax(axis=1), blank), letters, classes)


def decode_indices(value: Array, limit: TaskLimit) -> str:
    """Returns the letters of the alphabet at the indices that an output holds."""
    if value.dtype.kind not in "iu":
        raise DataError(f"the decoder 'indices' cannot read {value.dtype}", hint="it reads whole numbers")
    return _spell([int(item) for item in value.flat], limit.alphabet, len(limit.alphabet))


def _spell(places: list[int], letters: Sequence[str], classes: int) -> str:
    if len(letters) != classes or any(not 0 <= place < classes for place in places):
        words = f"an alphabet of {len(letters)} letters does not fit {classes} classes"
        raise DataError(words, hint="alphabet has one letter a class, with or without the blank")
    return "".join(letters[place] for place in places)


DECODERS: dict[str, Callable[[Array, TaskLimit], str]] = {
    "strings": lambda value, _: " ".join(str(item) for item in value.flat),
    "ctc-greedy": decode_ctc,
    "indices": decode_indices,
}


Weights = npt.NDArray[np.int64]
Scorer = Callable[[Weights], float]
Detections = tuple[Boxes, Array, Array, Array]
"""The labelled objects of an image, and the detected ones: boxes [left, top, right, bottom], scores and classes."""


def read_detections(outputs: Tensors, label: Boxes, limit: TaskLimit) -> Detections:
    """Returns the detections of one sample, from the outputs `boxes,scores,classes` or those that the limit names.

    Raises:
        DataError: there are no such outputs, or their sizes do not fit.
    """
    names = (limit.output or "boxes,scores,classes").split(",")
    if len(names) != 3 or any(name not in outputs for name in names):
        words = f"map needs three outputs, {','.join(names)}; there are {', '.join(outputs)}"
        raise DataError(words, hint='name them: output = "BOXES,SCORES,CLASSES", or write a module:function')
    boxes, scores, classes = (np.asarray(outputs[name], dtype=np.float64).reshape(-1) for name in names)
    if boxes.size != 4 * scores.size or classes.size != scores.size:
        counts = f"{boxes.size} coordinates, {scores.size} scores and {classes.size} classes"
        hint = "a detection has four coordinates, one score and one class"
        raise DataError(f"the outputs {', '.join(names)} hold {counts}", hint=hint)
    return label, boxes.reshape(-1, 4), scores, classes


def prepare_map(records: Sequence[Detections]) -> Scorer:
    """Returns the scorer of the mean AP over IoU 0.50 to 0.95.

    Computed by pycocotools (Lin et al. 2014, "Microsoft COCO"): over the classes that occur in the labels, 0 to 1.

    Raises:
        MissingExtraError: pycocotools is not installed.
    """
    with reraised(ImportError, MissingExtraError("metric 'map' needs pycocotools", hint=spell_install("pycocotools"))):
        coco = importlib.import_module("pycocotools.coco").COCO
        evaluate = importlib.import_module("pycocotools.cocoeval").COCOeval

    def place(image: int, box: Iterable[float], name: float) -> dict[str, Any]:
        left, top, right, bottom = map(float, box)
        size = (right - left, bottom - top)
        return {"image_id": image, "category_id": int(name), "bbox": [left, top, *size], "area": math.prod(size)}

    objects, detections = list[dict[str, Any]](), list[dict[str, Any]]()
    for image, (label, *found) in enumerate(records):
        for box, name in zip(label.boxes, label.classes, strict=True):
            objects.append({**place(image, box, name), "id": len(objects) + 1, "iscrowd": 0})
        for box, chance, name in zip(*found, strict=True):
            detections.append({**place(image, box, name), "score": float(chance)})
    if not detections:
        return lambda _weights: 0.0
    images = len(records)
    with contextlib.redirect_stdout(io.StringIO()):
        truth = coco()
        truth.dataset = {
            "images": [{"id": image} for image in range(images)],
            "categories": [{"id": name} for name in sorted({each["category_id"] for each in objects})],
            "annotations": objects,
        }
        truth.createIndex()
        evaluation = evaluate(truth, truth.loadRes(detections), "bbox")
        evaluation.evaluate()
    every = list(evaluation.evalImgs)

    def score(weights: Weights) -> float:
        drawn = np.repeat(np.arange(images), weights)
        evaluation.evalImgs = [every[start + image] for start in range(0, len(every), images) for image in drawn]
        with contextlib.redirect_stdout(io.StringIO()):
            evaluation.accumulate()
        precision = evaluation.eval["precision"][:, :, :, 0, -1]
        known = precision[precision > -1]
        return float(known.mean()) if known.size else 0.0

    return score


def read_token_losses(outputs: Tensors, label: Array, limit: TaskLimit) -> tuple[float, float]:
    """Returns the sum of -log p over the tokens of a text and their number, from scores [..., tokens, words].

    `label` holds the token that each position must predict; a negative one does not count.

    Raises:
        DataError: the scores do not fit the label, or a token is no word of theirs.
    """
    scores, wanted = _match_tokens(outputs, label, limit)
    scores = scores.astype(np.float64)
    highest = scores.max(axis=1, initial=-np.inf)
    spread = np.log(np.exp(scores - highest[:, None]).sum(axis=1)) + highest
    return float((spread - scores[np.arange(len(wanted)), wanted]).sum()), float(len(wanted))


def read_next_tokens(outputs: Tensors, label: Array, limit: TaskLimit) -> tuple[float, float]:
    """Returns for how many tokens of a text the best score is the right token's, and the number of tokens.

    Raises:
        DataError: the scores do not fit the label, or a token is no word of theirs.
    """
    scores, wanted = _match_tokens(outputs, label, limit)
    return float(np.count_nonzero(scores.argmax(axis=1) == wanted)), float(len(wanted))


def _match_tokens(outputs: Tensors, label: Array, limit: TaskLimit) -> tuple[Array, Array]:
    """Returns the scores [tokens, words] of the positions that count, and the tokens to predict there."""
    wanted = np.asarray(label).reshape(-1)
    scores = find_output(outputs, limit, lambda value: value.ndim > 1 and value.shape[-2] == wanted.size)
    words = scores.shape[-1] if scores.ndim else 0
    if wanted.dtype.kind not in "iu" or not words or scores.size != wanted.size * words:
        said = f"scores {list(scores.shape)} do not fit a text of {wanted.size} tokens"
        raise DataError(said, hint="a token for each position")
    if (wanted >= words).any():
        raise DataError(f"token {wanted.max()} is no word of {words}", hint="tokens count from 0")
    counted = wanted >= 0
    return scores.reshape(-1, words)[counted], wanted[counted].astype(np.int64)


LEAST_FOR_INTERVAL = 30
"""Fewer samples than this say too little about their own spread for a bootstrap (percentile intervals of 20 normal
values hold the truth in 93 %, not 95 %)."""

Reader = Callable[[Tensors, Any, TaskLimit], Any]


class TaskMetric(msgspec.Struct, frozen=True, kw_only=True):
    """A metric of the task.

    Attributes:
        labels: the kind of labels that it needs.
        read: returns the record of a sample from its outputs, its label and the limit.
        prepare: returns the scorer of all records: a function of how often each sample counts, so that the score of a
            bootstrap draw is cheap.
        unit: the unit of the score.
        higher_is_better: whether a higher score is better.
        hits: whether a sample is either right or wrong.
        rounds: the number of bootstrap draws.
    """

    labels: LabelKind
    read: Reader
    prepare: Callable[[Sequence[Any]], Scorer]
    unit: Unit = "share"
    higher_is_better: bool = True
    hits: bool = False
    rounds: int = 500


def find_metric(limit: TaskLimit) -> TaskMetric:
    """Returns the metric that a limit names.

    Raises:
        UsageError: there is no such metric, or no such function.
    """
    if FUNCTION.fullmatch(limit.name):
        function = load_function(limit.name, "metric")

        def read(outputs: Tensors, label: Label, _: TaskLimit) -> tuple[float, float]:
            """Returns what the user's function keeps of a sample: a number, or two whose sums are divided."""
            try:
                value = function(outputs, label)
            except Exception as error:  # it is the user's own code, which may raise anything
                words = f"metric '{limit.name}' raises {type(error).__name__}: {quote_error(error)}"
                raise DataError(words, hint="it is called with outputs by name and a label") from error
            with contextlib.suppress(TypeError, ValueError):
                above, below = np.broadcast_to(np.asarray(value, np.float64), (2,)) if np.ndim(value) else (value, 1.0)
                if math.isfinite(above) and math.isfinite(below):
                    return float(above), float(below)
            words = f"the metric's own function gave {value!r}"
            raise DataError(words, hint="it returns a number, or (above, below) whose sums are divided")

        return TaskMetric(
            labels="any",
            read=read,
            prepare=prepare_ratio,
            unit="value",
            higher_is_better=limit.higher_is_better,
        )
    return look_up(METRICS, limit.name, f"there is no metric '{limit.name}'")


def measure_task(limit: TaskLimit, reference: Samples, got: Samples, labels: Sequence[Label]) -> TaskReport:
    """Returns a metric on both models, over all labelled samples, with the interval of their difference.

    Only one sample, and the records of all, are in memory.

    Raises:
        UsageError: there is no such metric or decoder.
        DataError: the outputs of the float model or the labels are nothing that the metric reads.
        MissingExtraError: the metric needs a package that is not installed.
    """
    mine = list(read_records(limit, reference, labels))
    try:
        theirs = list(read_records(limit, got, labels))
        mismatch = None if len(theirs) == len(mine) else f"{len(theirs)} of {len(mine)} samples came back"
    except EdgekitError as error:
        theirs, mismatch = [], error.message
    return compare_records(limit, mine, theirs, mismatch)


def compare_records(
    limit: TaskLimit, mine: Sequence[Any], theirs: Sequence[Any], mismatch: str | None = None
) -> TaskReport:
    """Returns a metric on both models from the records of each sample, with the interval of their difference.

    A `mismatch` says why the other model has no figure.

    Raises:
        UsageError: there is no such metric.
        DataError: the labels are nothing that the metric reads.
        MissingExtraError: the metric needs a package that is not installed.
    """
    metric, once = find_metric(limit), np.ones(len(mine), dtype=np.int64)
    scores = metric.prepare(mine)
    report = TaskReport(
        name=limit.name,
        output=limit.output,
        samples=len(mine),
        unit=metric.unit,
        higher_is_better=metric.higher_is_better,
        reference=scores(once),
        got=None,
        mismatch=mismatch,
    )
    if mismatch is not None:
        return report
    others = metric.prepare(theirs)
    report = msgspec.structs.replace(report, got=others(once))
    if metric.hits:
        before, now = (np.array([record[0] for record in side], dtype=bool) for side in (mine, theirs))
        gained, lost = int(np.count_nonzero(now & ~before)), int(np.count_nonzero(before & ~now))
        interval = interval_of_pairs(len(mine), gained, lost)
        share = None if report.reference <= 0.0 else tuple(1.0 + end / report.reference for end in interval)
        return msgspec.structs.replace(report, interval=interval, share_interval=share, gained=gained, lost=lost)
    if len(mine) < LEAST_FOR_INTERVAL:
        return report
    interval, share = bootstrap_pairs(scores, others, len(mine), metric.rounds)
    return msgspec.structs.replace(report, interval=interval, share_interval=share)


def read_record(limit: TaskLimit, outputs: Tensors, label: Label) -> Any:
    """Returns the record of one sample for the metric of a limit (`TaskMetric.read`).

    Raises:
        DataError: an output is not finite, or is nothing that the metric reads.
    """
    for name, value in outputs.items():
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            raise DataError(f"output '{name}' has values that are not finite", hint="mend the model")
    return find_metric(limit).read(outputs, label, limit)


def read_records(limit: TaskLimit, samples: Samples, labels: Sequence[Label]) -> Iterator[Any]:
    """Yields the record of each sample for the metric of a limit.

    Raises:
        DataError: an output is not finite, or is nothing that the metric reads.
    """
    return (read_record(limit, outputs, label) for outputs, label in zip(samples, labels, strict=False))


def read_hit(outputs: Tensors, label: int, limit: TaskLimit, *, k: int) -> tuple[float, float]:
    """Returns whether the label is among the k best classes; ties count against it, as constant scores must fail."""
    scores = find_output(outputs, limit, ranks_classes).reshape(-1)
    if not 0 <= label < scores.size:
        raise DataError(f"label {label} is no class of an output of {scores.size}", hint="classes count from 0")
    better = int(np.count_nonzero(scores >= scores[label])) - 1
    return float(better < k or scores.argmax() == label), 1.0


def read_words(outputs: Tensors, limit: TaskLimit) -> str:
    """Returns the text that the output of a limit, or the first one, decodes to."""
    return decode_text(find_output(outputs, limit, lambda _: True), limit)


def read_exact(outputs: Tensors, label: str, limit: TaskLimit) -> tuple[float, float]:
    """Returns whether the decoded text is exactly the label."""
    return float(read_words(outputs, limit) == label), 1.0


def read_edits(
    outputs: Tensors, label: str, limit: TaskLimit, *, split: Callable[[str], Sequence[str]]
) -> tuple[float, float]:
    """Returns the edit distance (Levenshtein 1966) of the decoded text to the label, and the label's length.

    Both count the parts into which `split` divides a text: letters, or words.
    """
    wanted, found = (split(text) for text in (label, read_words(outputs, limit)))
    return float(count_edits(wanted, found)), float(len(wanted))


def read_masks(outputs: Tensors, label: Array, limit: TaskLimit) -> Array:
    """Returns intersection and union of each class of a mask as an array [256, 2]; the class `ignore` does not count.

    An output of scores becomes a mask of its best classes, along the axis that the label lacks.
    """
    wanted = np.asarray(label).astype(np.int64).squeeze()
    found = find_output(outputs, limit, lambda value: value.size >= wanted.size).squeeze()
    if found.dtype.kind == "f" or found.ndim == wanted.ndim + 1:
        axes = [axis for axis in range(found.ndim) if np.delete(found.shape, axis).tolist() == list(wanted.shape)]
        found = found.argmax(axis=axes[0]) if axes else found
    if found.shape != wanted.shape:
        words = f"a mask {list(found.shape)} does not fit a label {list(wanted.shape)}"
        raise DataError(words, hint="give both one shape")
    kept = wanted != limit.ignore
    wanted, found = wanted[kept], found[kept].astype(np.int64)
    if wanted.size and (min(wanted.min(), found.min()) < 0 or max(wanted.max(), found.max()) >= MAX_CLASSES):
        raise DataError("a mask has classes beyond 0 to 255", hint="give masks of at most 256 classes")
    return count_classes(wanted, found)


def read_score(outputs: Tensors, label: int, limit: TaskLimit) -> tuple[float, float]:
    """Returns the score of the class `positive` (or the only score), and whether the label is that class."""
    scores = find_output(outputs, limit, lambda value: value.dtype.kind == "f").reshape(-1)
    if scores.size == 1:
        return float(scores[0]), float(label == limit.positive)
    if not 0 <= limit.positive < scores.size:
        raise DataError(f"positive = {limit.positive} is no class of {scores.size}", hint="classes count from 0")
    return float(scores[limit.positive]), float(label == limit.positive)


def read_psnr(outputs: Tensors, label: Array, limit: TaskLimit) -> tuple[float, float]:
    """Returns 10 log10(peak^2 / MSE) of an image against its label, in dB.

    The peak is that of the limit, else 255 for labels of whole numbers and 1 for others.
    """
    wanted = np.asarray(label)
    found = find_output(outputs, limit, lambda value: value.size == wanted.size)
    if found.size != wanted.size:
        words = f"an image {list(found.shape)} does not fit a label {list(wanted.shape)}"
        raise DataError(words, hint="give both one shape")
    peak = limit.peak or (255.0 if wanted.dtype.kind in "iu" else 1.0)
    error = found.astype(np.float64).reshape(-1) - wanted.astype(np.float64).reshape(-1)
    return min(decibels(peak * peak, float(np.mean(error * error))), DB_LIMIT / 2), 1.0


def prepare_ratio(records: Sequence[tuple[float, float]]) -> Scorer:
    """Returns the scorer sum a / sum b, for a pair (a, b) kept of each sample."""
    table = np.array(records, dtype=np.float64).reshape(-1, 2)

    def score(weights: Weights) -> float:
        above, below = weights @ table
        return float(above / below) if below else 0.0

    return score


def prepare_perplexity(records: Sequence[tuple[float, float]]) -> Scorer:
    """Returns the scorer of the perplexity: e to the mean of -log p over all tokens."""
    mean_loss = prepare_ratio(records)
    return lambda weights: float(np.exp(min(mean_loss(weights), 700.0)))


def prepare_masks(records: Sequence[Array]) -> Scorer:
    """Returns the scorer of the mean over classes of intersection / union, each summed over the samples."""
    table = np.stack(records).astype(np.float32)

    return lambda weights: mean_iou(np.tensordot(weights.astype(np.float64), table, axes=1)) or 0.0


def prepare_auc(records: Sequence[tuple[float, float]]) -> Scorer:
    """Returns the scorer of the area under the ROC curve (Hanley and McNeil 1982).

    Of all pairs of a sample of the class and a sample that is not, it is the share in which the former has the higher
    score; equal scores count half.

    Raises:
        DataError: all labels are of one class, so that nothing can be told apart.
    """
    scores, labels = np.array(records, dtype=np.float64).reshape(-1, 2).T
    if not 0 < labels.sum() < labels.size:
        raise DataError("metric 'auc' needs samples of both kinds", hint="`positive` names the class that is ranked")
    ranks = np.unique(scores, return_inverse=True)[1]

    def score(weights: Weights) -> float:
        ranked, others = (np.bincount(ranks, weights * kind) for kind in (labels, 1.0 - labels))
        pairs = ranked.sum() * others.sum()
        return float(ranked @ (others.cumsum() - others / 2) / pairs) if pairs else 0.5

    return score


def find_output(outputs: Tensors, limit: TaskLimit, fits: Callable[[Array], bool]) -> Array:
    """Returns the output that a limit names, else the first that fits.

    Raises:
        DataError: there is no such output.
    """
    if limit.output:
        return look_up(outputs, limit.output, f"there is no output '{limit.output}'", DataError)
    if (found := next((value for value in outputs.values() if fits(value)), None)) is None:
        words = f"metric '{limit.name}' can read no output of {', '.join(outputs)}"
        raise DataError(words, hint="name it: output = ...")
    return found


_SPLITS: Mapping[str, Callable[[str], Sequence[str]]] = {"edit-distance": list, "wer": str.split, "cer": str.strip}
METRICS: Mapping[str, TaskMetric] = {
    "top1": TaskMetric(labels="class", read=partial(read_hit, k=1), prepare=prepare_ratio, hits=True),
    "top3": TaskMetric(labels="class", read=partial(read_hit, k=3), prepare=prepare_ratio, hits=True),
    "top5": TaskMetric(labels="class", read=partial(read_hit, k=5), prepare=prepare_ratio, hits=True),
    "exact-match": TaskMetric(labels="text", read=read_exact, prepare=prepare_ratio, hits=True),
    **{
        # The spaces around a text are no errors of letters or words.
        name: TaskMetric(
            labels="text", read=partial(read_edits, split=split), prepare=prepare_ratio, higher_is_better=False
        )
        for name, split in _SPLITS.items()
    },
    "miou": TaskMetric(labels="array", read=read_masks, prepare=prepare_masks),
    "auc": TaskMetric(labels="class", read=read_score, prepare=prepare_auc, rounds=200),
    "map": TaskMetric(labels="boxes", read=read_detections, prepare=prepare_map, rounds=100),
    "perplexity": TaskMetric(
        labels="array", read=read_token_losses, prepare=prepare_perplexity, unit="value", higher_is_better=False
    ),
    "next-token": TaskMetric(labels="array", read=read_next_tokens, prepare=prepare_ratio),
    "psnr": TaskMetric(labels="array", read=read_psnr, prepare=prepare_ratio, unit="dB"),
}


MOST_SAMPLES = 1024
"""The most samples that are compared with labels: if the models agree on this many, the interval of the drop is 0.2
points to each side (Agresti and Min 2005)."""
TOP1 = TaskLimit(name="top1")
"""The metric for labels if none is named."""


def measure_drop(
    reference: FloatReference, quantized: Model, labels: Sequence[Label], limit: TaskLimit = TOP1
) -> Prediction:
    """Returns the true drop of a metric from a float model, over its labelled samples, to a quantized one.

    The drop of a metric between 0 and 1 is a difference of shares; that of another metric is relative to the float
    model's figure. If the metric cannot read the quantized model's outputs, everything is lost.

    Raises:
        UsageError: there is no such metric or decoder.
        DataError: the outputs of the float model or the labels are nothing that the metric reads.
        MissingExtraError: the metric needs a package that is not installed.
        RuntimeRefusal: ONNX Runtime refuses a model.
    """
    mine, theirs = list[Any](), list[Any]()
    kept = [labels[index] for index in reference.indices]
    for pair, label in zip(reference.run_pairs(quantized), kept, strict=True):
        mine.append(read_record(limit, pair.expected, label))
        with contextlib.suppress(DataError):
            theirs.append(read_record(limit, pair.found, label))
    # The models do not run again.
    predicted = msgspec.structs.replace(reference.predict_drop(quantized), measure=limit.name, source=LABELS)
    if len(theirs) < len(mine):
        return msgspec.structs.replace(predicted, drop_estimate=1.0, drop_interval=(1.0, 1.0))
    report = compare_records(limit, mine, theirs)
    got = report.reference if report.got is None else report.got
    scale = 1.0 if report.unit == "share" or report.reference <= 0 else report.reference
    scale = scale if report.higher_is_better else -scale
    ends = sorted(round(-end / scale, 6) for end in report.interval or ())
    return msgspec.structs.replace(
        predicted,
        drop_estimate=round((report.reference - got) / scale, 6),
        drop_interval=(ends[0], ends[1]) if ends else None,
        reference=round(report.reference, 6),
        got=round(got, 6),
    )
