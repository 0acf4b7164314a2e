"""Dimensions of inputs that a bundle leaves open: an app chooses their sizes, and the golden samples have some."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from edgekit.model.tensors import Tensors, TensorSpec

_MOST_DIMS = 64


def open_specs(known: Sequence[TensorSpec], stated: Sequence[TensorSpec], names: Iterable[str]) -> list[TensorSpec]:
    """Returns the tensors of golden samples with every dimension open that a model leaves open, whatever they had.

    `stated` are the model's own inputs or outputs. Of the names of its dimensions those of `names` are kept.
    """
    shapes, kept = {spec.name: spec.shape for spec in stated}, frozenset(names)

    def join(sizes: Sequence[int | str | None], dims: Sequence[int | str | None]) -> Iterator[int | str | None]:
        for size, dim in zip(sizes, dims, strict=True):
            yield size if isinstance(dim, int) else dim if dim in kept else None

    def free(spec: TensorSpec) -> TensorSpec:
        sizes, dims = spec.shape, shapes.get(spec.name)
        if sizes is None or dims is None or len(sizes) != len(dims):
            return spec
        return TensorSpec(name=spec.name, dtype=spec.dtype, shape=tuple(join(sizes, dims)))

    return [free(spec) for spec in known]


def list_open(inputs: Iterable[TensorSpec]) -> Iterator[tuple[str, str, int]]:
    """Yields each dimension of inputs without a number, by what `--dim` calls it, and its input and axis."""
    for spec in inputs:
        for axis, dim in enumerate(spec.shape or ()):
            if not isinstance(dim, int):
                yield dim or f"{spec.name}:{axis}", spec.name, axis


def measure_open(inputs: Sequence[TensorSpec], samples: Iterable[Tensors]) -> dict[str, tuple[int, ...]]:
    """Returns the sizes that samples have of each open dimension, the least first."""
    places = tuple(list_open(inputs))
    found: dict[str, set[int]] = {name: set() for name, _, _ in places}
    for sample in samples if places else ():
        for name, tensor, axis in places:
            found[name].add(sample[tensor].shape[axis])
    return {name: tuple(sorted(sizes)) for name, sizes in found.items()}


def find_fault(sizes: Mapping[str, Sequence[int]], inputs: Sequence[TensorSpec], samples: int) -> str | None:
    """Returns what is wrong with the open dimensions that a manifest states, None where nothing is."""
    if not 0 < len(sizes) <= _MOST_DIMS or set(sizes) != {name for name, _, _ in list_open(inputs)}:
        return "are not those that its inputs leave without a number"
    # A dimension of one name may have other sizes in another input, which ONNX Runtime only warns of.
    most = samples * max(1, len(inputs))
    for each in sizes.values():
        if not 0 < len(each) <= most or list(each) != sorted(set(each)) or each[0] < 0:
            return "have sizes that are not in order"
    return None
