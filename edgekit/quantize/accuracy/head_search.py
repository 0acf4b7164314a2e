"""Finds which outputs of a detector hold boxes and scores, by their shapes and values.

A graph that applies non-maximum suppression itself outputs a list of detections instead of a raw head; such lists are
found here too.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from typing import ClassVar

import msgspec
import numpy as np

from edgekit.model.tensors import CODES, Array, Column, ListColumns, Tensors
from edgekit.quantize.accuracy import heads

# A raw head has more rows: a small network for images of 64 pixels has 80.
_LEAST_ROWS = 40
# A head has five levels of four outputs at most. The cache of a language model has two outputs for each layer, whose
# pairs and triples would be tried for minutes.
_MOST_OUTPUTS = 20
# More rows, or smaller cells, are pixels.
_MOST_ROWS, _LEAST_CELL = 1 << 17, 4
_BOX = 4
_BOX_WIDTHS = (_BOX, *(_BOX * bins for bins in heads.BINS))
# If the highest score is lower, nothing is detected; detectors for COCO reach 0.3 and more.
_LEAST_SCORE = 0.1
# At most this share of rows has a high score: most of an image is background.
_MOST_HIGH = 0.3
# If boxes are read correctly, rows with high scores overlap, because several rows show the same object. Their mean IoU
# must exceed that of the same rows with shuffled boxes by _LEAST_AGREEMENT, over at least _LEAST_SEEN rows. Fitted on
# small detectors: correct readings exceed it by 0.20 to 0.49, wrong ones by 0.19 at most. If shuffled boxes overlap
# much already, the IoU cannot rise by that much. Then it must rise by _LEAST_GAIN of the distance to 1, and at least by
# _FAINT: correct readings rise by 0.32 of it or more, wrong ones by 0.22 (measured once, the program is gone).
_LEAST_AGREEMENT, _LEAST_GAIN, _FAINT = 0.2, 0.3, 0.15
_LEAST_SEEN = 8
# With objects in fewer samples, the boxes are too few to judge a detector by: a choice.
_LEAST_SHOWN = 4
# The mean IoU of one shuffle of some dozens of boxes varies by 0.03, so the mean of several is taken: a choice.
_SHUFFLES = 8
# A CenterNet learns boxes only at centres, so the boxes of neighbouring cells overlap less. But correctly read offsets
# leave their cell by at most _BEYOND_CELL. Both are fitted on one small CenterNet, whose IoU exceeded that of
# shuffled boxes by 0.15 (measured once, the program is gone).
_LEAST_CENTRED, _BEYOND_CELL = 0.1, 0.25
# The background of a softmax has the highest score in at least this share of places.
_BACKGROUND = 0.6
# Objectness times the highest class score is at least 0.85 of the objectness. If the column is a class instead, it is
# less than 0.5, even for a detector that hardly distinguishes its classes. The bound lies between.
_CLASS_SHARE = 0.65
_MOST_COMPARED = 60
# Readings as decoded boxes are preferred to those relative to a grid, and corners are preferred to centre and size.
_PREFERRED = {"corners": 2, "middle and size": 1}
# At least this share of offsets lies within its cell, and of keypoints within twice the size of their box.
_MOSTLY = 0.95
# Probabilities in float32 leave the range from 0 to 1 by less.
_TOLERANCE = 1e-3


_Pair = tuple[tuple[heads.Columns, ...], tuple[heads.Columns, ...]]
"""The columns of boxes; and those of the objectness, if there is one, and of the scores."""


class _HighScores(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of a sample with a high score, the highest first, and the class of each."""

    rows: Array
    classes: Array


def find_head(outputs: Sequence[Tensors], image: tuple[int, int]) -> heads.Head | None:
    """Returns how to read the raw head of a detector, None where no reading makes sense.

    `outputs` are those of a float model for a few samples, `image` is the height and width of its input.
    """
    best, reached = None, (0, False, 0.0)
    for boxes, scores in _pair_columns(outputs[0]):
        first = boxes[0]
        shapes, rows = [outputs[0][name].shape for name in first.outputs], len(first.view(outputs[0]))
        # Anchors, height and width of each level, if the outputs are maps.
        axes, at = len(shapes[0]), slice(1, 3) if len(shapes[0]) == 4 and first.axis == -1 else slice(2, 4)
        sides = tuple((shape[1] if axes == 5 else first.anchors, *shape[at]) for shape in shapes if axes >= 4)
        if rows > _MOST_ROWS or any(_LEAST_CELL * height > image[0] for _, height, _ in sides):
            continue
        for head in _read_scores(outputs, boxes, scores):
            sure = _find_high_scores(head, outputs)
            for code, grid in heads.lay_grids(tuple(each.count for each in boxes), rows, sides, image) if sure else ():
                if grid is None and len(first.outputs) > 1:
                    continue
                peaks = sides[0][1:] if code in heads.CENTRED else None
                coded = msgspec.structs.replace(head, code=code, grid=grid, peaks=peaks)
                near, mixed = _agreement(coded, outputs, sure, image)
                # A reading with objectness is preferred: the overlap of boxes is about the same without it.
                rank = (_PREFERRED.get(code, 0), head.objectness is not None, round(near, 2))
                if near - mixed >= _least_agreement(coded, mixed) and rank > reached:
                    best, reached = coded, rank
    return best and msgspec.structs.replace(best, extras=tuple(_find_extras(best, outputs, image)))


def _find_extras(head: heads.Head, outputs: Sequence[Tensors], image: tuple[int, int]) -> Iterator[heads.ExtraColumns]:
    """Yields other predictions for the rows of boxes: other outputs, and columns after those that are read."""
    boxes, stops = head.boxes[0], dict[tuple[str, ...], int]()
    for each in (*head.boxes, head.scores, *filter(None, [head.objectness])):
        stops[each.outputs] = max(each.stop * each.anchors, stops.get(each.outputs, 0))
    groups = _join_levels(outputs[0])
    group = next(
        group for group in groups if any(each.outputs == boxes.outputs and each.axis == boxes.axis for each in group)
    )
    for each in group:
        start = stops.get(each.outputs, 0)
        rest = heads.ExtraColumns(outputs=each.outputs, axis=each.axis, start=start, stop=each.stop, image=image)
        prototypes = _find_prototypes(outputs[0], rest.count)
        if prototypes and head.grid is None:
            yield msgspec.structs.replace(rest, kind="masks", prototypes=prototypes)
        elif rest.count:
            numbers = _count_numbers(head, rest, outputs) if head.grid is None else 0
            yield msgspec.structs.replace(rest, kind="points", numbers=numbers) if numbers else rest


def _find_prototypes(outputs: Tensors, count: int) -> str:
    """Returns the output [1, count, height, width] with so many prototype masks, "" if there is none."""
    maps = {name: each for name, each in outputs.items() if each.ndim == 4 and each.dtype.kind == "f"}
    return next((name for name, each in maps.items() if count > 1 and each.shape[:2] == (1, count)), "")


def _count_numbers(head: heads.Head, rest: heads.Columns, outputs: Sequence[Tensors]) -> int:
    """Returns how many numbers each keypoint has, 0 if the columns are no keypoints, which lie near their box."""
    sure = _find_high_scores(head, outputs)
    if not sure:
        return 0
    pairs = list(zip(outputs, sure, strict=True))
    values = np.concatenate([rest.read(row, one.rows) for row, one in pairs])
    boxes = np.concatenate([heads.decode_boxes(head.code, head.read_boxes(row, one.rows), None) for row, one in pairs])
    middle, sides = (boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]
    for numbers in (3, 2):
        if rest.count % numbers:
            continue
        points = values.reshape(len(values), -1, numbers)
        seen = points[..., 2] if numbers > 2 else np.ones(points.shape[:2])
        is_near = (np.abs(points[..., :2] - middle[:, None]) <= sides[:, None]).all(axis=-1)[seen >= 1 / 2]
        if _are_shares(float(seen.min()), float(seen.max())) and is_near.size and is_near.mean() >= _MOSTLY:
            return numbers
    return 0


def may_be_head(outputs: Tensors) -> bool:
    """Returns True where the shapes of outputs allow them to be the raw head of a detector."""
    return next(_pair_columns(outputs), None) is not None


def find_silent(
    outputs: Sequence[Tensors], image: tuple[int, int], *, least_shown: int = _LEAST_SHOWN
) -> frozenset[str]:
    """Returns the boxes and scores of a detector that detects objects in fewer than `least_shown` samples, else none.

    Such a head cannot be judged by its detections. It is recognized by decoded boxes next to probabilities, nearly all
    of which are low.
    """
    for (boxes, *others), scores in _pair_columns(outputs[0]):
        if others or boxes.count != _BOX or len(outputs[0][boxes.outputs[0]].shape) > 3:
            continue
        # One sample after another: all together they are as large as the outputs.
        chances = [(float(view.min()), float(view.max())) for view in map(scores[-1].view, outputs)]
        lowest, highest = min(low for low, _ in chances), max(high for _, high in chances)
        shown = sum(high >= max(highest / 2, _LEAST_SCORE) for _, high in chances)
        is_seen = shown >= least_shown or shown == len(outputs)
        if is_seen or not _are_shares(lowest, highest):
            continue
        corners = np.concatenate([boxes.read(row) for row in outputs])
        if any(heads.are_boxes(decode(corners), image, explicit=True) for decode in heads.EXPLICIT.values()):
            return frozenset((*boxes.outputs, *scores[-1].outputs))
    return frozenset()


def find_image(inputs: Tensors) -> tuple[int, int] | None:
    """Returns height and width of the image among the inputs, None where there is none."""
    for value in inputs.values():
        if value.ndim == 4 and min(value.shape[1], value.shape[3]) in {1, 3, 4}:
            sides = value.shape[2:] if value.shape[1] in {1, 3, 4} else value.shape[1:3]
            return int(sides[0]), int(sides[1])
    return None


def _pair_columns(outputs: Tensors) -> Iterator[_Pair]:
    """Yields the columns that may hold boxes, with those that may hold their objectness and scores."""
    if sum(value.dtype.kind == "f" and value.ndim > 1 for value in outputs.values()) > _MOST_OUTPUTS:
        return
    for group in _join_levels(outputs):
        rank, is_one_level = outputs[group[0].outputs[0]].ndim, len(group[0].outputs) == 1
        # Boxes and scores may be columns of one output: of a table with all levels, or of one map for each level if
        # there are no other maps. Scores alone would look like boxes: neighbouring rows show the same object.
        for table in group if (is_one_level if rank < 4 else len(group) == 1) else ():
            for anchors in (1, 3) if rank == 4 else (1,):
                columns = msgspec.structs.replace(table, stop=table.count // anchors, anchors=anchors)
                for part, rest in _split_table(columns, outputs) if table.count % anchors == 0 else ():
                    yield (part,), rest
        for boxes, others in _pick_boxes(group, is_map=rank == 4 and is_one_level):
            for scores in others:
                yield boxes, (scores,)
                yield from ((boxes, (there, scores)) for there in others if there.count == 1 and there is not scores)


def _join_levels(outputs: Tensors) -> Iterator[list[heads.Columns]]:
    """Yields groups of columns for the same rows, such as boxes and scores.

    Columns are one output, or one for each level. Example: cls_8, cls_16, cls_32 and box_8, box_16, box_32 make a group
    of two. Outputs with equal numbers of columns and different numbers of rows are levels, if there are equally many
    outputs for each number of rows.
    """
    for rank, axis in ((3, -1), (3, -2), (4, -3), (4, -1), (5, -1), (2, -1)):
        counts: dict[int, dict[tuple[int, ...], list[str]]] = {}
        for name, value in outputs.items():
            if value.dtype.kind == "f" and value.ndim == rank and (rank == 2 or value.shape[0] == 1):
                places = tuple(np.delete(value.shape, axis).tolist())
                counts.setdefault(value.shape[axis], {}).setdefault(places, []).append(name)
        groups: dict[tuple[tuple[int, ...], ...], list[heads.Columns]] = {}
        for count, names in counts.items():
            largest_first = sorted(names, key=math.prod, reverse=True)
            are_levels = len({len(each) for each in names.values()}) == 1
            for levels in [tuple(largest_first)] if are_levels else [(each,) for each in largest_first]:
                for level_names in zip(*(names[each] for each in levels), strict=True):
                    groups.setdefault(levels, []).append(
                        heads.Columns(outputs=level_names, axis=axis, start=0, stop=count)
                    )
        yield from (group for levels, group in groups.items() if sum(map(math.prod, levels)) >= _LEAST_ROWS)


def _pick_boxes(
    group: Sequence[heads.Columns], *, is_map: bool
) -> Iterator[tuple[tuple[heads.Columns, ...], Sequence[heads.Columns]]]:
    """Yields the columns of a group that may be boxes, and those that may be scores for them.

    Boxes are all columns of an output, or the first four before other numbers, such as keypoints of a face; then there
    is a single score. With `is_map` they may also be two outputs of two columns, centre offsets and sizes.
    """
    for each in group:
        others = [other for other in group if other is not each]
        if each.count in _BOX_WIDTHS:
            yield (each,), others
        if each.count > _BOX:
            start = msgspec.structs.replace(each, stop=_BOX)
            yield (start,), [other for other in others if other.count == 1]
    for pair in permutations([each for each in group if is_map and each.count == _BOX // 2], 2):
        yield pair, [other for other in group if other not in pair]


def _split_table(table: heads.Columns, outputs: Tensors) -> Iterator[tuple[heads.Columns, tuple[heads.Columns, ...]]]:
    """Yields (boxes, scores) and (boxes, objectness and scores) for the usual orders of columns in one table."""
    count = table.count

    def part(start: int, stop: int) -> heads.Columns:
        return msgspec.structs.replace(table, start=start, stop=stop)

    for width in _BOX_WIDTHS:
        if width + 1 > count:
            continue
        # If the first column after boxes is a probability, scores end before the first column that is none. Else the
        # last ones may be mask coefficients, as many as another output has prototype masks.
        values = part(width, count).view(outputs)
        shares = (values.min(axis=0) >= -_TOLERANCE) & (values.max(axis=0) <= 1 + _TOLERANCE)
        if shares[0] and not shares.all():
            end = width + int(shares.argmin())
        else:
            end = count - next(
                (masks for masks in range(count - width - 1, 1, -1) if _find_prototypes(outputs, masks)), 0
            )
        yield part(0, width), (part(width, end),)
        yield part(count - width, count), (part(0, count - width),)
        if width + 2 <= end:
            yield part(0, width), (part(width, width + 1), part(width + 1, end))
            yield part(1, width + 1), (part(0, 1), part(width + 1, end))


def _read_scores(
    outputs: Sequence[Tensors], boxes: tuple[heads.Columns, ...], parts: tuple[heads.Columns, ...]
) -> Iterator[heads.Head]:
    """Yields how scores may be read: as probabilities, or as logits with or without a background."""
    scores = [parts[-1].view(row) for row in outputs]
    low, high = min(float(each.min()) for each in scores), max(float(each.max()) for each in scores)
    # The minimum and maximum of values with NaN are NaN.
    if not (np.isfinite(low) and np.isfinite(high)):
        return
    are_shares = _are_shares(low, high)
    squash = "" if are_shares else "sigmoid"
    if len(parts) == 2:
        there = np.stack([parts[0].read(row) for row in outputs])
        whether = "" if _are_shares(float(there.min()), float(there.max())) else "sigmoid"
        there = heads.squash_scores(there, whether)
        # A sigmoid is monotonic, so it may follow the maximum.
        best = np.stack([each.max(axis=-1, keepdims=True) for each in scores], dtype=np.float64)
        both = there * heads.squash_scores(best, squash)
        # Where the objectness is high, one class scores high too; if the column is a class itself, no other does.
        is_told = both.max(axis=1).mean() >= _CLASS_SHARE * max(float(there.max(axis=1).mean()), 1e-12)
        # Objectness and scores are both probabilities, or both logits.
        if is_told and squash == whether:
            yield heads.Head(
                boxes=boxes, scores=parts[1], objectness=parts[0], squash=squash, squash_objectness=whether, code=""
            )
        return
    if parts[0].count > 1:
        ends, tops = (0, parts[0].count - 1), np.stack([each.argmax(axis=-1) for each in scores])
        shares = [float((tops == end).mean()) for end in ends]
        sums_to_one = are_shares and all(np.abs(each.sum(axis=-1) - 1).max() < 1e-2 for each in scores)
        if max(shares) >= _BACKGROUND and (sums_to_one or not are_shares):
            over = "" if sums_to_one else "softmax"
            yield heads.Head(
                boxes=boxes, scores=parts[0], squash=over, background=ends[int(np.argmax(shares))], code=""
            )
    yield heads.Head(boxes=boxes, scores=parts[0], squash=squash, code="")


def _are_shares(low: float, high: float) -> bool:
    return low >= -_TOLERANCE and high <= 1 + _TOLERANCE


def _find_high_scores(head: heads.Head, outputs: Sequence[Tensors]) -> tuple[_HighScores, ...]:
    """Returns the rows of each sample with a high score, () if there are too many or too few of them."""
    best = np.stack([head.read_surest(row) for row in outputs])
    least = float(best.max()) / 2
    if 2 * least < _LEAST_SCORE or np.mean(best >= least) > _MOST_HIGH or np.sum(best >= least) < _LEAST_SEEN:
        return ()
    found: list[_HighScores] = []
    for row, tops in zip(outputs, best, strict=True):
        rows = np.argsort(-tops, kind="stable")[: min(_MOST_COMPARED, int((tops >= least).sum()))]
        found.append(_HighScores(rows=rows, classes=head.read_scores(row, rows).argmax(axis=1)))
    return tuple(found)


def _agreement(
    head: heads.Head, outputs: Sequence[Tensors], sure: Sequence[_HighScores], image: tuple[int, int]
) -> tuple[float, float]:
    """Returns the mean IoU of boxes with high scores, and the same with shuffled numbers; (0, 0) if they are no boxes.

    Boxes of neighbouring cells overlap anyway, so for comparison each row gets the numbers of another one. If the first
    shuffle does not show that the reading is wrong, _SHUFFLES are made.
    """

    def decode(values: Sequence[Array]) -> list[Array]:
        return [heads.decode_boxes(head.code, own, head.grid, one.rows) for own, one in zip(values, sure, strict=True)]

    def overlap(boxes: Sequence[Array]) -> list[float]:
        """Returns, for each box of all samples, its highest IoU with another box of its class."""
        found = list[float]()
        for own, one in zip(boxes, sure, strict=True):
            overlaps = heads.overlap_boxes(own, own) * (one.classes[:, None] == one.classes)
            np.fill_diagonal(overlaps, 0)
            found += overlaps.max(axis=1).tolist() if len(own) > 1 else []
        return found

    values = [head.read_boxes(row, one.rows) for row, one in zip(outputs, sure, strict=True)]
    every, boxes = np.concatenate(values), decode(values)
    beyond = np.abs(every[:, :2] - 0.5).max(axis=1) - 0.5
    in_cells = head.peaks is None or float((beyond <= _BEYOND_CELL).mean()) >= _MOSTLY
    if not in_cells or not heads.are_boxes(np.concatenate(boxes), image, explicit=head.grid is None):
        return 0.0, 0.0
    near = overlap(boxes)
    if len(near) < _LEAST_SEEN:
        return 0.0, 0.0
    rng, others, own = np.random.default_rng(0), list[float](), float(np.mean(near))
    ends = np.cumsum([len(one.rows) for one in sure])[:-1]
    while len(others) < _SHUFFLES and (not others or own - others[0] >= _least_agreement(head, others[0]) / 2):
        others.append(float(np.mean(overlap(decode(np.split(rng.permutation(every), ends))))))
    return own, float(np.mean(others))


def _least_agreement(head: heads.Head, mixed: float) -> float:
    """Returns by how much the mean IoU must exceed that of shuffled boxes, `mixed`."""
    if head.peaks is not None:
        return _LEAST_CENTRED
    return min(_LEAST_AGREEMENT, max(_FAINT, _LEAST_GAIN * (1 - mixed)))


# Detectors list 10 to 1,000 boxes; the order of fewer rows tells nothing.
_FEWEST_LISTED, _MOST_LISTED = 8, 1000
# The first as for raw heads; no data set of detection has more classes than the second.
_LEAST_LISTED_SCORE, _MOST_CLASSES = 0.1, 2000


class DetectionList(msgspec.Struct, frozen=True, kw_only=True):
    """Decodes outputs that list detections."""

    columns: ListColumns

    keeps_places: ClassVar[bool] = False
    extras: ClassVar[tuple[heads.ExtraColumns, ...]] = ()
    centred: ClassVar[bool] = False

    @property
    def outputs(self) -> frozenset[str]:
        """The outputs that are read."""
        return self.columns.outputs

    def read_scores(self, outputs: Tensors) -> Array:
        """Returns the score of each row as the list has it, float64 [rows]."""
        return _read_column(_read_tables(outputs), self.columns.score)

    def decode(self, outputs: Tensors) -> tuple[Array, Array]:
        """Returns corners of boxes, float64 [rows, 4], and the probability of each class, float64 [rows, classes]."""
        tables, columns = _read_tables(outputs), self.columns
        boxes = heads.EXPLICIT[columns.code](_read_boxes(tables, columns.boxes))
        scores = self.read_scores(outputs)
        kinds = np.zeros(len(scores), np.int64)
        if columns.kind is not None:
            named = _read_column(tables, columns.kind)
            kinds = np.clip(np.rint(named), 0, _MOST_CLASSES).astype(np.int64)
        chances = np.zeros((len(scores), int(kinds.max(initial=0)) + 1))
        chances[np.arange(len(scores)), kinds] = np.clip(scores, 0, 1)
        return boxes, chances

    def read_others(self, outputs: Tensors) -> Array:
        """Returns the columns that hold no box, score or class, such as the index of the image in its batch."""
        columns = self.columns
        used = {(each.output, each.index) for each in (columns.score, columns.kind) if each is not None}
        used |= {(columns.boxes.output, columns.boxes.index + side) for side in range(_BOX)}
        tables = {name: each for name, each in _read_tables(outputs).items() if name in self.outputs}
        kept = {name: [at for at in range(each.shape[1]) if (name, at) not in used] for name, each in tables.items()}
        return np.concatenate([tables[name][:, kept[name]] for name in sorted(tables)], axis=1)


Detector = heads.Head | DetectionList
"""How the outputs of a detector are read.

`keeps_places` is True if row N stands for the same place of the image in both models, as in a raw head, and False for a
list that is sorted by score, to which the graph applied non-maximum suppression.
"""


def find_list(outputs: Sequence[Tensors], image: tuple[int, int]) -> DetectionList | None:
    """Returns where outputs list detections, None where they do not.

    `outputs` are those of a float model for a few samples, `image` is the height and width of its input.
    """
    samples = [_read_tables(each) for each in outputs]
    names = {name: table.shape for name, table in samples[0].items()}
    if any({name: table.shape for name, table in sample.items()} != names for sample in samples):
        return None
    columns = [Column(output=name, index=index) for name, shape in names.items() for index in range(shape[1])]

    def read(column: Column) -> Array:
        return np.stack([_read_column(sample, column) for sample in samples])

    score = next((column for column in columns if _are_ranked(read(column))), None)
    if score is None:
        return None
    names = {name: shape for name, shape in names.items() if shape[0] == names[score.output][0]}
    columns = [column for column in columns if column.output in names and column != score]
    whole = [column for column in columns if (read(column) == np.rint(read(column))).all()]
    kinds = [column for column in whole if np.abs(read(column)).max() <= _MOST_CLASSES]
    kind = max(kinds, key=lambda column: len(np.unique(read(column))), default=None)
    sure, free = read(score) >= read(score).max() / 2, {*columns} - {kind}
    # Boxes are four columns side by side, none of which holds the scores or classes.
    for boxes in columns:
        if not free.issuperset(Column(output=boxes.output, index=boxes.index + side) for side in range(_BOX)):
            continue
        numbers = np.concatenate([_read_boxes(sample, boxes)[kept] for sample, kept in zip(samples, sure, strict=True)])
        for code in CODES:
            if heads.are_boxes(heads.EXPLICIT[code](numbers), image, explicit=True):
                return DetectionList(columns=ListColumns(boxes=boxes, score=score, kind=kind, code=code))
    return None


def _read_tables(outputs: Tensors) -> dict[str, Array]:
    """Returns the outputs that may be rows of a list, [rows, columns]: views, since an output may be large."""
    found: dict[str, Array] = {}
    for name, value in outputs.items():
        sides = [size for size in value.shape if size != 1]
        is_long = len(sides) in {1, 2} and _FEWEST_LISTED <= sides[0] <= _MOST_LISTED
        # A row has a box, a score and a class, and at most a score for each class.
        if is_long and value.size // sides[0] <= _MOST_CLASSES and value.dtype.kind in "fiu":
            found[name] = value.reshape(sides[0], -1)
    return found


def _read_column(tables: Mapping[str, Array], column: Column) -> Array:
    """Returns a column of a table, float64 [rows]."""
    return tables[column.output][:, column.index].astype(np.float64)


def _read_boxes(tables: Mapping[str, Array], first: Column) -> Array:
    """Returns four columns of a table side by side, float64 [rows, 4]."""
    return tables[first.output][:, first.index : first.index + _BOX].astype(np.float64)


def _are_ranked(values: Array) -> bool:
    """Returns True for probabilities [samples, rows] that never rise from row to row."""
    if not np.isfinite(values).all() or values.min() < 0 or not _LEAST_LISTED_SCORE <= values.max() <= 1:
        return False
    return bool((np.diff(values, axis=1) <= 0).all() and (np.ptp(values, axis=1) > 0).mean() > 1 / 2)
