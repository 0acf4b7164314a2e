"""How far apart two devices of one kind lie, which differ in their CPU alone: other cores take other kernels."""

from collections.abc import Iterator, Sequence

import msgspec

from edgekit.data.samples import Samples
from edgekit.model.tensors import Tensors
from edgekit.verify.metrics.compare import compare_outputs
from edgekit.verify.metrics.outputs import OutputReport

_MOST_BYTES = 32 << 20


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """What a device gave, kept in memory: outputs by the index of the golden sample.

    Only those of one `kind` are compared: the device without its variant, and the file that it ran.
    """

    device: str
    kind: str
    rows: dict[int, Tensors]


def hold_outputs(device: str, kind: str, indices: Sequence[int], outputs: Samples) -> Held | None:
    """Returns the outputs of a device for the golden samples of these indices, None where they are large."""
    rows: dict[int, Tensors] = {}
    size_bytes = 0
    for index, row in zip(indices, outputs, strict=False):
        size_bytes += sum(value.nbytes for value in row.values())
        if size_bytes > _MOST_BYTES:
            return None
        rows[index] = row
    return Held(device=device, kind=kind, rows=rows)


def describe_apart(held: Sequence[Held]) -> Iterator[str]:
    """Yields, for each device whose numbers are not those of the first of its kind, how far apart they lie."""
    first: dict[str, Held] = {}
    for other in held:
        one = first.setdefault(other.kind, other)
        shared = sorted(one.rows.keys() & other.rows.keys())
        if one is other or not shared:
            continue
        for output in compare_outputs(_take(one, shared), _take(other, shared)):
            if distance := _describe_distance(output):
                names = f"{other.device} and {one.device}"
                yield f"{names} give different numbers: '{output.name}' differs {distance}; each is judged by itself"


def _take(held: Held, indices: Sequence[int]) -> Samples:
    return Samples(source=held.device, count=len(indices), read=lambda: (held.rows[index] for index in indices))


def _describe_distance(output: OutputReport) -> str:
    """Returns how far apart two outputs lie, empty where they are equal."""
    if output.exact_match is not None and output.exact_match < 1:
        return f"in {1 - output.exact_match:.2%} of its elements"
    if output.max_abs:
        return f"by at most {output.max_abs:.3g}" + ("" if output.sqnr_db is None else f", {output.sqnr_db:.1f} dB")
    return ""
