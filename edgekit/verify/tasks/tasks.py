"""Metrics of the task: what a labelled sample is worth, on the float model and on a device, and how sure that is."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from edgekit.data.labels import Label, LabelKind
from edgekit.data.samples import Samples
from edgekit.data.user_code import load_function
from edgekit.errors import DataError, EdgekitError, MissingExtraError, UsageError, quote_error, suggest_name
from edgekit.model.tensors import Array, Tensors, ranks_classes
from edgekit.target import TaskLimit
from edgekit.verify.metrics.intervals import bootstrap_pairs, interval_of_pairs
from edgekit.verify.metrics.tensor_metrics import DB_LIMIT, decibels
from edgekit.verify.tasks.decoders import decode_text
from edgekit.verify.tasks.detection import Weights, prepare_map, read_detections
from edgekit.verify.tasks.extras import import_extra
from edgekit.verify.tasks.language import prepare_perplexity, read_next_tokens, read_token_losses
from edgekit.verify.tasks.scores import TaskReport, Unit

LEAST_FOR_INTERVAL = 30
"""Fewer samples than this say too little about their own spread for a bootstrap (percentile intervals of 20 normal
values hold the truth in 93 %, not 95 %)."""

Reader = Callable[[Tensors, Any, TaskLimit], Any]
Scorer = Callable[[Weights], float]


class TaskMetric(msgspec.Struct, frozen=True, kw_only=True):
    """A metric of the task: which labels it needs, what it keeps of a sample, and the score of all that was kept.

    `prepare` returns a function of how often each sample counts, so that the score of a bootstrap's draw costs little.
    `hits` tells that a sample is right or wrong and nothing between.
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
    if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", limit.name):
        function = load_function(limit.name, "metric")
        return TaskMetric(
            labels="any",
            read=lambda outputs, label, limit: _as_fraction(_call(limit.name, function, outputs, label)),
            prepare=prepare_ratio,
            unit="value",
            higher_is_better=limit.higher_is_better,
        )
    metric = METRICS.get(limit.name)
    if metric is None:
        raise UsageError(f"there is no metric '{limit.name}'", hint=suggest_name(limit.name, METRICS))
    return metric


def measure_task(limit: TaskLimit, reference: Samples, got: Samples, labels: Sequence[Label]) -> TaskReport:
    """Returns a metric on both sides, over all labelled samples, with the interval of their difference.

    Memory holds one sample and what the metric keeps of each.

    Raises:
        UsageError: there is no such metric or decoder.
        DataError: the outputs of the float model or the labels are nothing that the metric reads.
        MissingExtraError: the metric needs a package that is not installed.
    """
    mine = list(read_records(limit, reference, labels))
    try:
        theirs = list(read_records(limit, got, labels))
    except MissingExtraError:
        raise
    except EdgekitError as error:
        return _mismatch(limit, mine, error.message)
    if len(theirs) != len(mine):
        return _mismatch(limit, mine, f"{len(theirs)} of {len(mine)} samples came back")
    return compare_records(limit, mine, theirs)


def compare_records(limit: TaskLimit, mine: Sequence[Any], theirs: Sequence[Any]) -> TaskReport:
    """Returns a metric on both sides from what was kept of each sample, with the interval of their difference.

    Raises:
        UsageError: there is no such metric.
        DataError: the labels are nothing that the metric reads.
        MissingExtraError: the metric needs a package that is not installed.
    """
    metric = find_metric(limit)
    scores, others = metric.prepare(mine), metric.prepare(theirs)
    report = _report_reference(limit, mine, scores)
    report = msgspec.structs.replace(report, got=others(np.ones(len(mine), dtype=np.int64)))
    if metric.hits:
        before, now = ([bool(record[0]) for record in side] for side in (mine, theirs))
        gained = sum(new and not old for old, new in zip(before, now, strict=True))
        lost = sum(old and not new for old, new in zip(before, now, strict=True))
        interval = interval_of_pairs(len(mine), gained, lost)
        share = None if report.reference <= 0.0 else tuple(1.0 + end / report.reference for end in interval)
        return msgspec.structs.replace(report, interval=interval, share_interval=share, gained=gained, lost=lost)
    if len(mine) < LEAST_FOR_INTERVAL:
        return report
    interval, share = bootstrap_pairs(scores, others, len(mine), metric.rounds)
    return msgspec.structs.replace(report, interval=interval, share_interval=share)


def read_record(limit: TaskLimit, outputs: Tensors, label: Label) -> Any:
    """Returns what the metric of a limit keeps of one sample.

    Raises:
        DataError: an output is not finite, or is nothing that the metric reads.
    """
    for name, value in outputs.items():
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            raise DataError(f"output '{name}' has values that are not finite", hint="mend the model")
    return find_metric(limit).read(outputs, label, limit)


def _call(name: str, function: Callable[..., Any], outputs: Tensors, label: Label) -> Any:
    try:
        return function(outputs, label)
    except Exception as error:  # it is the user's own code, which may raise anything
        raise DataError(
            f"metric '{name}' raises {type(error).__name__}: {quote_error(error)}",
            hint="it is called with outputs by name and a label",
        ) from error


def _mismatch(limit: TaskLimit, mine: Sequence[Any], why: str) -> TaskReport:
    return msgspec.structs.replace(_report_reference(limit, mine, find_metric(limit).prepare(mine)), mismatch=why)


def _report_reference(limit: TaskLimit, mine: Sequence[Any], scores: Scorer) -> TaskReport:
    metric = find_metric(limit)
    return TaskReport(
        name=limit.name,
        output=limit.output,
        samples=len(mine),
        unit=metric.unit,
        higher_is_better=metric.higher_is_better,
        reference=scores(np.ones(len(mine), dtype=np.int64)),
        got=None,
    )


def read_records(limit: TaskLimit, samples: Samples, labels: Sequence[Label]) -> Iterator[Any]:
    """Returns what the metric of a limit keeps of each sample, lazily.

    Raises:
        DataError: an output is not finite, or is nothing that the metric reads.
    """
    return (read_record(limit, outputs, label) for outputs, label in zip(samples, labels, strict=False))


def read_hit(outputs: Tensors, label: int, limit: TaskLimit, *, k: int) -> tuple[float, float]:
    """Returns whether the label is among the k classes ranked first; the label loses ties, as a constant must."""
    scores = find_output(outputs, limit, ranks_classes).reshape(-1)
    if not 0 <= label < scores.size:
        raise DataError(f"label {label} is no class of an output of {scores.size}", hint="classes count from 0")
    better = int(np.count_nonzero(scores >= scores[label])) - 1
    first = bool(scores.argmax() == label)
    return (1.0 if first or better < k else 0.0), 1.0


def read_exact(outputs: Tensors, label: str, limit: TaskLimit) -> tuple[float, float]:
    """Returns whether the decoded text is exactly the label."""
    return (1.0 if decode_text(find_output(outputs, limit, lambda _: True), limit) == label else 0.0), 1.0


def read_edits(outputs: Tensors, label: str, limit: TaskLimit) -> tuple[float, float]:
    """Returns the edit distance (Levenshtein 1966) of the decoded text to the label, and the label's length."""
    text = decode_text(find_output(outputs, limit, lambda _: True), limit)
    row = np.arange(len(label) + 1)
    places = np.arange(len(label) + 1)
    letters = np.array(list(label), dtype=np.str_)
    for index, letter in enumerate(text, start=1):
        changed = np.minimum(row[1:] + 1, row[:-1] + (letters != letter))
        row = np.minimum.accumulate(np.concatenate([[index], changed]) - places) + places
    return float(row[-1]), float(len(label))


def read_word_errors(outputs: Tensors, label: str, limit: TaskLimit, *, letters: bool) -> tuple[float, float]:
    """Returns the edits that jiwer counts, of words or of letters, and how many the label has.

    Raises:
        MissingExtraError: jiwer is not installed.
    """
    jiwer = import_extra("jiwer", f"'{limit.name}'")
    text = decode_text(find_output(outputs, limit, lambda _: True), limit)
    if not label.strip():
        return float(len(text) if letters else len(text.split())), 0.0
    counted = jiwer.process_characters(label, text) if letters else jiwer.process_words(label, text)
    edits = counted.substitutions + counted.deletions + counted.insertions
    return float(edits), float(counted.hits + counted.substitutions + counted.deletions)


def read_masks(outputs: Tensors, label: Array, limit: TaskLimit) -> Array:
    """Returns intersection and union of each class of a mask as an array [256, 2]; the class `ignore` does not count.

    An output of scores becomes a mask by its best class, along the axis that the label lacks.
    """
    wanted = np.asarray(label).astype(np.int64).squeeze()
    found = find_output(outputs, limit, lambda value: value.size >= wanted.size).squeeze()
    if found.dtype.kind == "f" or found.ndim == wanted.ndim + 1:
        axes = [axis for axis in range(found.ndim) if np.delete(found.shape, axis).tolist() == list(wanted.shape)]
        found = found.argmax(axis=axes[0]) if axes else found
    if found.shape != wanted.shape:
        raise DataError(f"a mask {list(found.shape)} does not fit a label {list(wanted.shape)}", hint="one shape")
    kept = wanted != limit.ignore
    wanted, found = wanted[kept], found[kept].astype(np.int64)
    if wanted.size and (min(wanted.min(), found.min()) < 0 or max(wanted.max(), found.max()) > 255):
        raise DataError("a mask has classes beyond 0 to 255", hint="give masks of at most 256 classes")
    both = np.bincount(wanted[wanted == found], minlength=256)
    either = np.bincount(wanted, minlength=256) + np.bincount(found, minlength=256) - both
    return np.stack([both, either], axis=1)


def read_score(outputs: Tensors, label: int, limit: TaskLimit) -> tuple[float, float]:
    """Returns the score of the class `positive`, or the only one there is, and whether the label is that class."""
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
        raise DataError(f"an image {list(found.shape)} does not fit a label {list(wanted.shape)}", hint="one shape")
    peak = limit.peak or (255.0 if wanted.dtype.kind in "iu" else 1.0)
    error = found.astype(np.float64).reshape(-1) - wanted.astype(np.float64).reshape(-1)
    return min(decibels(peak * peak, float(np.mean(error * error))), DB_LIMIT / 2), 1.0


def read_text(
    outputs: Tensors, label: Array, limit: TaskLimit, *, count: Callable[[Array, Array], tuple[float, float]]
) -> tuple[float, float]:
    """Returns what `count` makes of the scores of a text's tokens and of the tokens."""
    tokens = np.asarray(label)
    found = find_output(outputs, limit, lambda value: value.ndim > 1 and value.shape[-2] == tokens.size)
    return count(found, tokens)


def prepare_ratio(records: Sequence[tuple[float, float]]) -> Scorer:
    """Returns the scorer sum a / sum b over what was kept as (a, b) of each sample."""
    table = np.array(records, dtype=np.float64).reshape(-1, 2)

    def score(weights: Weights) -> float:
        above, below = weights @ table
        return float(above / below) if below else 0.0

    return score


def prepare_masks(records: Sequence[Array]) -> Scorer:
    """Returns the scorer of the mean over classes of intersection / union, each summed over the samples."""
    table = np.stack(records).astype(np.float32)

    def score(weights: Weights) -> float:
        both, either = np.tensordot(weights.astype(np.float64), table, axes=1).T
        known = either > 0
        return float((both[known] / either[known]).mean()) if known.any() else 0.0

    return score


def prepare_auc(records: Sequence[tuple[float, float]]) -> Scorer:
    """Returns the scorer of the area under the ROC curve, by scikit-learn (Hanley and McNeil 1982).

    Raises:
        MissingExtraError: scikit-learn is not installed.
        DataError: all labels are of one class, so that nothing can be told apart.
    """
    roc_auc_score = import_extra("sklearn.metrics", "'auc'").roc_auc_score
    scores, labels = np.array(records, dtype=np.float64).reshape(-1, 2).T
    if not 0 < labels.sum() < labels.size:
        raise DataError("metric 'auc' needs samples of both kinds", hint="`positive` names the class that is ranked")

    def score(weights: Weights) -> float:
        kept = weights > 0
        if not 0 < labels[kept].sum() < np.count_nonzero(kept):
            return 0.5
        return float(roc_auc_score(labels[kept], scores[kept], sample_weight=weights[kept]))

    return score


def find_output(outputs: Tensors, limit: TaskLimit, fits: Callable[[Array], bool]) -> Array:
    """Returns the output that a limit names, else the first that fits.

    Raises:
        DataError: there is no such output.
    """
    if limit.output:
        if limit.output not in outputs:
            raise DataError(f"there is no output '{limit.output}'", hint=suggest_name(limit.output, outputs))
        return outputs[limit.output]
    found = next((value for value in outputs.values() if fits(value)), None)
    if found is None:
        raise DataError(
            f"metric '{limit.name}' can read no output of {', '.join(outputs)}", hint="name it: output = ..."
        )
    return found


METRICS: Mapping[str, TaskMetric] = {
    "top1": TaskMetric(labels="class", read=partial(read_hit, k=1), prepare=prepare_ratio, hits=True),
    "top3": TaskMetric(labels="class", read=partial(read_hit, k=3), prepare=prepare_ratio, hits=True),
    "top5": TaskMetric(labels="class", read=partial(read_hit, k=5), prepare=prepare_ratio, hits=True),
    "exact-match": TaskMetric(labels="text", read=read_exact, prepare=prepare_ratio, hits=True),
    "edit-distance": TaskMetric(labels="text", read=read_edits, prepare=prepare_ratio, higher_is_better=False),
    "wer": TaskMetric(
        labels="text", read=partial(read_word_errors, letters=False), prepare=prepare_ratio, higher_is_better=False
    ),
    "cer": TaskMetric(
        labels="text", read=partial(read_word_errors, letters=True), prepare=prepare_ratio, higher_is_better=False
    ),
    "miou": TaskMetric(labels="array", read=read_masks, prepare=prepare_masks),
    "auc": TaskMetric(labels="class", read=read_score, prepare=prepare_auc, rounds=200),
    "map": TaskMetric(labels="boxes", read=read_detections, prepare=prepare_map, rounds=100),
    "perplexity": TaskMetric(
        labels="array",
        read=partial(read_text, count=read_token_losses),
        prepare=prepare_perplexity,
        unit="value",
        higher_is_better=False,
    ),
    "next-token": TaskMetric(labels="array", read=partial(read_text, count=read_next_tokens), prepare=prepare_ratio),
    "psnr": TaskMetric(labels="array", read=read_psnr, prepare=prepare_ratio, unit="dB"),
}


_GIVES = "it returns a number, or (above, below) whose sums are divided"


def _as_fraction(value: Any) -> tuple[float, float]:
    try:
        above, below = np.broadcast_to(np.asarray(value, dtype=np.float64), (2,)) if np.ndim(value) else (value, 1.0)
        if math.isfinite(above) and math.isfinite(below):
            return float(above), float(below)
    except (TypeError, ValueError) as error:
        raise DataError(f"the metric's own function gave {value!r}", hint=_GIVES) from error
    raise DataError(f"the metric's own function gave {value!r}", hint=_GIVES)
