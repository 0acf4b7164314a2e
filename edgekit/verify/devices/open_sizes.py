"""A bundle with open dimensions, judged by size too: what is wrong at few sizes would drown among the others."""

from collections.abc import Iterator, Sequence

from edgekit.bundle.manifest.manifest import Manifest
from edgekit.bundle.manifest.open_dims import list_open
from edgekit.data.samples import Samples, select_samples
from edgekit.verify.facts import BucketReport, SizesReport
from edgekit.verify.metrics.compare import compare_outputs

_MOST_GROUPS = 3
# Of fewer samples one that quantization happens to hurt decides: a choice.
_LEAST_SAMPLES = 4


def compare_sizes(manifest: Manifest, inputs: Samples, reference: Samples, got: Samples) -> SizesReport | None:
    """Returns how far samples of small, middle and large sizes of an open dimension lie from the float model.

    It is the dimension of which the samples have most sizes; None where there is none, or too few samples to compare
    groups of them.
    """
    found = _measure_most(manifest, inputs)
    if found is None:
        return None
    dim, sizes = found
    groups = list(_group(sizes))
    if len(groups) < 2:
        return None
    reports = tuple(
        BucketReport(
            size=max(sizes[row] for row in rows),
            file=manifest.model_file,
            lengths=tuple(sizes[row] for row in rows),
            outputs=compare_outputs(select_samples(reference, rows), select_samples(got, rows)),
        )
        for rows in groups
    )
    return SizesReport(dim=dim, filled=(), sizes=reports)


def _measure_most(manifest: Manifest, inputs: Samples) -> tuple[str, list[int]] | None:
    """Returns the open dimension of which samples have most sizes, and that of each."""
    places = {name: (tensor, axis) for name, tensor, axis in list_open(manifest.inputs)}
    if not places:
        return None
    shapes = [{name: value.shape for name, value in sample.items()} for sample in inputs]
    sizes = {name: [shape[tensor][axis] for shape in shapes] for name, (tensor, axis) in places.items()}
    name = max(sizes, key=lambda each: len(set(sizes[each])))
    return name, sizes[name]


def _group(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yields the positions of samples, those of like sizes together: one size is never in two groups."""
    wanted = max(_LEAST_SAMPLES, -(-len(sizes) // _MOST_GROUPS))
    group: list[int] = []
    left = len(sizes)
    for size in sorted(set(sizes)):
        group += [row for row, its in enumerate(sizes) if its == size]
        rest = left - len(group)
        if len(group) >= wanted and (rest >= _LEAST_SAMPLES or rest == 0):
            yield sorted(group)
            left, group = rest, []
    if group:
        yield sorted(group)
