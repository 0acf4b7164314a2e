"""Mean average precision of detections, as COCO counts it."""

import contextlib
import io
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from edgekit.data.labels import Boxes
from edgekit.errors import DataError
from edgekit.model.tensors import Array, Tensors
from edgekit.target import TaskLimit
from edgekit.verify.tasks.extras import import_extra

Weights = npt.NDArray[np.int64]


class Detections(msgspec.Struct, frozen=True, kw_only=True):
    """What is in one image, and what was found there: boxes as [left, top, right, bottom], scores and classes."""

    label: Boxes
    boxes: Array
    scores: Array
    classes: Array


def read_detections(outputs: Tensors, label: Boxes, limit: TaskLimit) -> Detections:
    """Returns the detections of one sample: the outputs named `boxes,scores,classes`, or as the limit names them.

    Raises:
        DataError: there are no such outputs, or their sizes do not fit.
    """
    names = (limit.output or "boxes,scores,classes").split(",")
    if len(names) != 3 or any(name not in outputs for name in names):
        raise DataError(
            f"map needs three outputs, {limit.output or 'boxes,scores,classes'}; there are {', '.join(outputs)}",
            hint='name them: output = "BOXES,SCORES,CLASSES", or write a module:function',
        )
    boxes, scores, classes = (np.asarray(outputs[name], dtype=np.float64) for name in names)
    count = scores.size
    if boxes.size != 4 * count or classes.size != count:
        raise DataError(f"{boxes.size} coordinates, {count} scores and {classes.size} classes do not fit", hint="")
    return Detections(label=label, boxes=boxes.reshape(-1, 4), scores=scores.reshape(-1), classes=classes.reshape(-1))


def prepare_map(records: Sequence[Detections]) -> Callable[[Weights], float]:
    """Returns a function of how often each image counts that gives the mean AP over IoU 0.50 to 0.95.

    Computed by pycocotools (Lin et al. 2014, "Microsoft COCO"): over the classes that occur in the labels, 0 to 1.

    Raises:
        MissingExtraError: pycocotools is not installed.
    """
    coco = import_extra("pycocotools.coco", "'map'").COCO
    evaluate = import_extra("pycocotools.cocoeval", "'map'").COCOeval
    with contextlib.redirect_stdout(io.StringIO()):
        truth = coco()
        truth.dataset = _describe_truth(records)
        truth.createIndex()
        if not any(record.scores.size for record in records):
            return lambda _weights: 0.0
        evaluation = evaluate(truth, truth.loadRes(_describe_found(records)), "bbox")
        evaluation.evaluate()
    every, images = list(evaluation.evalImgs), len(records)

    def score(weights: Weights) -> float:
        drawn = np.repeat(np.arange(images), weights)
        evaluation.evalImgs = [every[start + image] for start in range(0, len(every), images) for image in drawn]
        with contextlib.redirect_stdout(io.StringIO()):
            evaluation.accumulate()
        precision = evaluation.eval["precision"][:, :, :, 0, -1]
        known = precision[precision > -1]
        return float(known.mean()) if known.size else 0.0

    return score


def _describe_truth(records: Sequence[Detections]) -> dict[str, Any]:
    objects = [
        (image, box, name)
        for image, record in enumerate(records)
        for box, name in zip(record.label.boxes, record.label.classes, strict=True)
    ]
    return {
        "images": [{"id": image} for image in range(len(records))],
        "categories": [{"id": name} for name in sorted({name for _, _, name in objects})],
        "annotations": [
            {
                "id": number,
                "image_id": image,
                "category_id": name,
                "bbox": _as_size(box),
                "area": (box[2] - box[0]) * (box[3] - box[1]),
                "iscrowd": 0,
            }
            for number, (image, box, name) in enumerate(objects, start=1)
        ],
    }


def _describe_found(records: Sequence[Detections]) -> list[dict[str, Any]]:
    return [
        {"image_id": image, "category_id": int(name), "bbox": _as_size(box), "score": float(score)}
        for image, record in enumerate(records)
        for box, score, name in zip(record.boxes, record.scores, record.classes, strict=True)
    ]


def _as_size(box: Sequence[float] | Array) -> list[float]:
    left, top, right, bottom = (float(edge) for edge in box)
    return [left, top, right - left, bottom - top]
