"""The differences between two versions of a bundle, or of a model."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import msgspec

from edgekit.bundle.folder import read_check
from edgekit.bundle.manifest import BundledFile
from edgekit.bundle.multi import opened_bundle
from edgekit.check.report import CheckReport
from edgekit.errors import UsageError
from edgekit.inspect.inspect import MODEL_SUFFIXES, find_shown_model, inspect_model, measure_layers
from edgekit.serialize import to_builtins
from edgekit.verify.report import read_known

_K = TypeVar("_K")
_V = TypeVar("_V")
Measure = Literal["sqnr_db", "top1_agreement", "cosine", "accuracy"]
# Keys of the manifest that have a list of differences of their own in `Delta`.
_LISTED_APART = frozenset({"files", "placement", "model_size_bytes"})
_MODEL_FACTS = ("inputs", "outputs", "opsets", "ops", "parameters", "macs", "activation_bytes", "saved_optimizations")


class FileChange(msgspec.Struct, frozen=True, kw_only=True):
    """A file that differs between the two sides; a size is None on the side without the file."""

    name: str
    old_bytes: int | None
    new_bytes: int | None


class FactChange(msgspec.Struct, frozen=True, kw_only=True):
    """A value that differs between the two sides, None on the side without it; `key` is its path: `target.name`."""

    key: str
    old: Any
    new: Any


class NodeChange(msgspec.Struct, frozen=True, kw_only=True):
    """A node that the provider takes on one side only; None on the side without the node."""

    name: str
    op: str
    old: bool | None
    new: bool | None


class AccuracyChange(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of an output on a device, from the `verify.json` of both sides; None on the side without it."""

    device: str
    output: str
    measure: Measure
    old: float | None
    new: float | None


class LayerChange(msgspec.Struct, frozen=True, kw_only=True):
    """A layer whose operator or weights differ; None on the side without the layer."""

    name: str
    old_op: str | None
    new_op: str | None
    old_bytes: int | None
    new_bytes: int | None


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """All differences between two bundles or two models.

    `update_bytes` is the size of the new and changed files, which an app with the old version must fetch. `accuracy` is
    reported, but it is evidence: it does not count as a difference of the bundles.
    """

    old: str
    new: str
    kind: Literal["bundle", "model"]
    old_bytes: int
    new_bytes: int
    update_bytes: int
    files: tuple[FileChange, ...] = ()
    facts: tuple[FactChange, ...] = ()
    placement: tuple[FactChange, ...] = ()
    nodes: tuple[NodeChange, ...] = ()
    layers: tuple[LayerChange, ...] = ()
    accuracy: tuple[AccuracyChange, ...] = ()

    @property
    def is_same(self) -> bool:
        """True if nothing but the accuracy differs."""
        return not (self.files or self.facts or self.placement or self.nodes or self.layers)


def compare_versions(old: Path, new: Path, *, target: str | None = None) -> Delta:
    """Returns the differences between two bundles (folders or archives) or two models (.onnx or .ort).

    Raises:
        UsageError: one is a model and the other is not, or a bundle of several targets is given without `target`.
        BundleError: a bundle is damaged or not safe to open.
        ModelError: a model cannot be read.
    """
    # A folder may have the name of a model.
    kinds = {path.suffix in MODEL_SUFFIXES and path.is_file() for path in (old, new)}
    if len(kinds) > 1:
        if missing := next((path for path in (old, new) if not path.exists()), None):
            raise UsageError(f"there is nothing at '{missing}'", hint="check the path of the model or bundle")
        words = f"of '{old}' and '{new}', one is a model (.onnx or .ort) and the other is none"
        raise UsageError(words, hint="give two models or two bundles")
    names: dict[str, Any] = {"old": str(old), "new": str(new)}
    if kinds == {True}:
        # The one file of each side, whatever its name is.
        files = [{new.name: BundledFile.describe(path)} for path in (old, new)]
        tables = [to_builtins(inspect_model(path)) for path in (old, new)]
        facts = [{key: table[key] for key in _MODEL_FACTS if key in table} for table in tables]
        return Delta(**names, kind="model", **_compare_contents(files, facts, (old, new)))
    with opened_bundle(old, target=target) as first, opened_bundle(new, target=target) as second:
        bundles, manifests = (first, second), (first.manifest, second.manifest)
        tables = [to_builtins(manifest) for manifest in manifests]
        facts = [{key: table[key] for key in table if key not in _LISTED_APART} for table in tables]
        measures: tuple[Measure, ...] = ("sqnr_db", "cosine", "top1_agreement")
        figures: list[dict[tuple[str, str, Measure], float | None]] = [{}, {}]
        for report, found in zip(map(read_known, bundles), figures, strict=True):
            for run in () if report is None else report.runs:
                for output in run.outputs:
                    found |= {(run.device, output.name, measure): getattr(output, measure) for measure in measures}
                if run.accuracy is not None:
                    found[run.device, run.accuracy.output, "accuracy"] = run.accuracy.got
        return Delta(
            **names,
            kind="bundle",
            **_compare_contents([each.files for each in manifests], facts, tuple(map(find_shown_model, bundles))),
            placement=tuple(_compare_facts(*(to_builtins(each.placement) for each in manifests))),
            nodes=tuple(_compare_nodes(*map(read_check, bundles))),
            accuracy=tuple(
                AccuracyChange(device=device, output=name, measure=measure, old=before, new=after)
                for (device, name, measure), before, after in _list_changes(*figures)
            ),
        )


def _compare_contents(
    files: Sequence[Mapping[str, BundledFile]], facts: Sequence[Any], models: Sequence[Path | None]
) -> dict[str, Any]:
    """Returns the fields of a `Delta` about the files, the facts and the layers of the models on both sides."""
    old, new = ({name: entry.size_bytes for name, entry in side.items()} for side in files)
    changed = sorted(name for name, *_ in _list_changes(*files))
    # Equal files have equal layers.
    layers = [{it.name: it for it in measure_layers(model)} if model and changed else {} for model in models]
    return {
        "old_bytes": sum(old.values()),
        "new_bytes": sum(new.values()),
        "update_bytes": sum(new.get(name, 0) for name in changed),
        "files": tuple(FileChange(name=name, old_bytes=old.get(name), new_bytes=new.get(name)) for name in changed),
        "facts": tuple(_compare_facts(*facts)),
        "layers": tuple(
            LayerChange(
                name=name,
                old_op=None if before is None else before.op,
                new_op=None if after is None else after.op,
                old_bytes=None if before is None else before.weight_bytes,
                new_bytes=None if after is None else after.weight_bytes,
            )
            for name, before, after in _list_changes(*layers)
        ),
    }


def _compare_facts(old: Any, new: Any, key: str = "") -> Iterator[FactChange]:
    if isinstance(old, dict) and isinstance(new, dict):
        first, second = cast("dict[str, Any]", old), cast("dict[str, Any]", new)
        for name in sorted({*first, *second}):
            yield from _compare_facts(first.get(name), second.get(name), f"{key}.{name}" if key else name)
    elif old != new:
        yield FactChange(key=key, old=old, new=new)


def _list_changes(old: Mapping[_K, _V], new: Mapping[_K, _V]) -> Iterator[tuple[_K, _V | None, _V | None]]:
    """Yields what differs between two tables, with None on the side without it."""
    for name in dict.fromkeys((*old, *new)):
        if old.get(name) != new.get(name):
            yield name, old.get(name), new.get(name)


def _compare_nodes(old: CheckReport, new: CheckReport) -> Iterator[NodeChange]:
    ops = {node.name: node.op for node in (*old.node_list, *new.node_list)}
    taken = [{node.name: node.taken for node in check.node_list} for check in (old, new)]
    for name, before, after in _list_changes(*taken):
        yield NodeChange(name=name, op=ops[name], old=before, new=after)
