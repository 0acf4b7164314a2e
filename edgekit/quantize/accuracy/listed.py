"""Lists of detections, as graphs make them that suppress and rank boxes themselves: their rows have no place."""

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import msgspec
import numpy as np

from edgekit.model.listed import CODES, Column, ListColumns
from edgekit.model.tensors import Array, Tensors
from edgekit.quantize.accuracy.box_codes import EXPLICIT
from edgekit.quantize.accuracy.heads import are_boxes

_BOX = 4
# Detectors list 10 to 1,000 boxes; of fewer rows nothing is told by their order.
_LEAST_ROWS, _MOST_ROWS = 8, 1000
# As for raw heads: what is less sure tells nothing. No data set of detection has more classes.
_LEAST_SCORE, _MOST_CLASSES = 0.1, 2000


class DetectionList(msgspec.Struct, frozen=True, kw_only=True):
    """How outputs that list detections are read."""

    columns: ListColumns

    keeps_places: ClassVar[bool] = False
    centred: ClassVar[bool] = False

    @property
    def suppresses(self) -> bool:
        """False: the graph has done that."""
        return False

    @property
    def outputs(self) -> frozenset[str]:
        """The outputs that are read."""
        return self.columns.outputs

    def read_scores(self, outputs: Tensors) -> Array:
        """Returns the score of each row as it stands there, float64 [rows]."""
        return _read_tables(outputs)[self.columns.score.output][:, self.columns.score.index]

    def decode(self, outputs: Tensors) -> tuple[Array, Array]:
        """Returns corners of boxes, float64 [rows, 4], and the probability of each class, float64 [rows, classes]."""
        tables, columns = _read_tables(outputs), self.columns
        start = columns.boxes.index
        boxes = EXPLICIT[columns.code](tables[columns.boxes.output][:, start : start + _BOX])
        scores = self.read_scores(outputs)
        kinds = np.zeros(len(scores), np.int64)
        if columns.kind is not None:
            named = tables[columns.kind.output][:, columns.kind.index]
            kinds = np.clip(np.rint(named), 0, _MOST_CLASSES).astype(np.int64)
        chances = np.zeros((len(scores), int(kinds.max(initial=0)) + 1))
        chances[np.arange(len(scores)), kinds] = np.clip(scores, 0, 1)
        return boxes, chances

    def read_others(self, outputs: Tensors) -> Array:
        """Returns the columns that are of no box, score or class, such as the number of the image in its batch."""
        columns = self.columns
        used = {(each.output, each.index) for each in (columns.score, columns.kind) if each is not None}
        used |= {(columns.boxes.output, columns.boxes.index + side) for side in range(_BOX)}
        tables = {name: each for name, each in _read_tables(outputs).items() if name in self.outputs}
        kept = {name: [at for at in range(each.shape[1]) if (name, at) not in used] for name, each in tables.items()}
        return np.concatenate([tables[name][:, kept[name]] for name in sorted(tables)], axis=1)


def find_list(outputs: Sequence[Tensors], image: tuple[int, int]) -> DetectionList | None:
    """Returns where outputs list detections, None where they do not.

    `outputs` are what a float model gave for a few samples, `image` height and width of what it saw.
    """
    samples = [_read_tables(each) for each in outputs]
    names = {name: table.shape for name, table in samples[0].items()}
    if any({name: table.shape for name, table in sample.items()} != names for sample in samples):
        return None
    columns = [Column(output=name, index=index) for name, shape in names.items() for index in range(shape[1])]
    values = {column: np.stack([sample[column.output][:, column.index] for sample in samples]) for column in columns}
    score = next((column for column in columns if _are_ranked(values[column])), None)
    if score is None:
        return None
    names = {name: shape for name, shape in names.items() if shape[0] == names[score.output][0]}
    kinds = [column for column in columns if column.output in names and column != score and _are_kinds(values[column])]
    kind = max(kinds, key=lambda column: len(np.unique(values[column])), default=None)
    sure = values[score] >= values[score].max() / 2
    for boxes in _place_boxes(names, [each for each in (score, kind) if each is not None]):
        numbers = np.concatenate(
            [
                sample[boxes.output][kept, boxes.index : boxes.index + _BOX]
                for sample, kept in zip(samples, sure, strict=True)
            ]
        )
        for code in CODES:
            if are_boxes(EXPLICIT[code](numbers), image, explicit=True):
                return DetectionList(columns=ListColumns(boxes=boxes, score=score, kind=kind, code=code))
    return None


def _read_tables(outputs: Tensors) -> dict[str, Array]:
    """Returns the outputs that may be rows of a list, float64 [rows, columns]."""
    found: dict[str, Array] = {}
    for name, value in outputs.items():
        sides = [size for size in value.shape if size != 1]
        if len(sides) in {1, 2} and _LEAST_ROWS <= sides[0] <= _MOST_ROWS and value.dtype.kind in "fiu":
            found[name] = value.astype(np.float64).reshape(sides[0], -1)
    return found


def _are_ranked(values: Array) -> bool:
    """Returns True for probabilities [samples, rows] that fall from row to row."""
    if not np.isfinite(values).all() or values.min() < 0 or not _LEAST_SCORE <= values.max() <= 1:
        return False
    return bool((np.diff(values, axis=1) <= 0).all() and (np.ptp(values, axis=1) > 0).mean() > 1 / 2)


def _are_kinds(values: Array) -> bool:
    return bool(np.isfinite(values).all() and (values == np.rint(values)).all() and values.max() <= _MOST_CLASSES)


def _place_boxes(names: Mapping[str, tuple[int, ...]], taken: Sequence[Column]) -> Iterator[Column]:
    """Yields where four columns side by side are neither scores nor classes."""
    for name, shape in names.items():
        for start in range(shape[1] - _BOX + 1):
            if not any(each.output == name and start <= each.index < start + _BOX for each in taken):
                yield Column(output=name, index=start)
