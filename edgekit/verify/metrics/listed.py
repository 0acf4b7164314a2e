"""Whether two lists name the same detections: rows of what a graph ranked have no place of their own."""

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from edgekit.bundle.folder import Bundle
from edgekit.bundle.golden import Golden, read_inputs, read_outputs
from edgekit.data.samples import Samples, select_samples, spread_indices
from edgekit.model.tensors import Tensors
from edgekit.quantize.accuracy.head_search import DetectionList, find_image, find_list
from edgekit.quantize.accuracy.heads import overlap_boxes
from edgekit.verify.metrics.agreement import Agreement
from edgekit.verify.metrics.compare import compare_outputs
from edgekit.verify.metrics.intervals import bootstrap_share
from edgekit.verify.metrics.outputs import OutputReport

# As planning: so many samples tell how a list is read.
_READ_FROM = 16
# From here on two boxes are one: the stricter of the two overlaps that COCO reports, as both are of the same network.
_SAME_BOX = 0.75
_ROUNDED = 1e-3


def read_list(golden: Golden) -> DetectionList | None:
    """Returns how the float model's outputs list detections, None where they do not, or hold more beside these."""
    rows = spread_indices(golden.samples, min(_READ_FROM, golden.samples))
    # As planning: what sizes are depends on the image, which one sample has of open ones.
    is_open = any(not isinstance(dim, int) for spec in golden.inputs for dim in spec.shape or ())
    image = None if is_open else find_image(next(iter(read_inputs(golden))))
    outputs = list(select_samples(read_outputs(golden), rows))
    listed = None if image is None else find_list(outputs, image)
    if listed is None or any(np.ptp(listed.read_others(each), axis=0).any() for each in outputs):
        return None
    return listed


def find_listed(bundle: Bundle) -> DetectionList | None:
    """Returns the list that a bundle states, None where it states none or its golden samples do not show that one."""
    found = read_list(bundle.golden) if bundle.manifest.listed else None
    return found if found is not None and found.columns == bundle.manifest.listed else None


def describe_unlisted(bundle: Bundle) -> Iterator[str]:
    """Yields what fails a bundle that states a list which its own golden samples do not show: no gate is lost by it."""
    if bundle.manifest.listed and find_listed(bundle) is None:
        names = ", ".join(sorted(bundle.manifest.listed.outputs))
        yield f"the manifest says that {names} list detections, which the float model's outputs do not: build it again"


def describe_lists(outputs: Sequence[OutputReport]) -> Iterator[str]:
    """Yields what is judged of outputs that list detections, and what is not."""
    for output in outputs:
        for shared in (each for each in output.agreements if each.of == "detections"):
            ends = shared.interval
            doubt = "" if ends is None else f" ({ends[0]:.1%} to {ends[1]:.1%} at 95 %)"
            yield (
                f"output '{output.name}' lists detections, of which {shared.share:.1%} agree{doubt}: its other figures"
                " compare row by row, and are not judged"
            )


def compare_bundled(bundle: Bundle, reference: Samples, got: Samples) -> tuple[OutputReport, ...]:
    """Returns how far outputs lie from the float model's, each read as the bundle says, lists by their detections."""
    outputs, listed = compare_outputs(reference, got, bundle.manifest.readings or {}), find_listed(bundle)
    # What is missing or has another shape has failed already.
    if listed is None or [each.samples for each in outputs if each.name in listed.outputs] != [reference.count] * len(
        listed.outputs
    ):
        return outputs
    shares = np.array([weigh_detections(listed, *pair) for pair in zip(reference, got, strict=False)])
    share, interval = bootstrap_share(shares)
    shared = Agreement(of="detections", share=share, interval=interval, samples=len(shares))
    return tuple(
        msgspec.structs.replace(output, agreements=(shared,)) if output.name in listed.outputs else output
        for output in outputs
    )


def weigh_detections(listed: DetectionList, wanted: Tensors, found: Tensors) -> tuple[float, float]:
    """Returns the weight of what two lists both name, and the mean of what each names.

    A row weighs its score squared, as precision does by its ranks: the tail of a list is noise. Rows pair within a
    class, the surest first, with the box that overlaps most, and share the smaller weight of the two.
    """
    if not all(np.isfinite(side[name]).all() for side in (wanted, found) for name in listed.outputs):
        return 0.0, 1.0
    (boxes, chances), (others, theirs) = listed.decode(wanted), listed.decode(found)
    mine, got = chances.max(axis=1) ** 2, theirs.max(axis=1) ** 2
    is_same = np.array_equal(listed.read_others(wanted), listed.read_others(found))
    # Apps take the first rows for the best: scores that rise or are no shares are no list. What is rounded is granted.
    steps = np.diff(listed.read_scores(found), prepend=1.0, append=0.0)
    if not is_same or steps.max() > _ROUNDED:
        return 0.0, float(mine.sum())
    fits = chances.argmax(axis=1)[None] == theirs.argmax(axis=1)[:, None]
    overlaps = np.where(fits, overlap_boxes(others, boxes), 0.0)
    both = 0.0
    for row in np.argsort(-got, kind="stable"):
        best = int(overlaps[row].argmax())
        if overlaps[row, best] >= _SAME_BOX:
            both += min(mine[best], got[row])
            overlaps[:, best] = 0.0
    return both, float(mine.sum() + got.sum()) / 2
