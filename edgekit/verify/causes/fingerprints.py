"""A digest of each layer of a bundle's model as it was built, to tell later which one was changed."""

import hashlib
from collections.abc import Iterator, Sequence

import msgspec
import onnx

from edgekit.bundle.folder import GOLDEN, Bundle
from edgekit.bundle.golden.expected import LAYERS
from edgekit.errors import BundleError, EdgekitError
from edgekit.model.model import Model, iterate_graphs, load_model, read_contents
from edgekit.verify.layers.weights import Initializers, list_constants
from edgekit.verify.matching.match import match_tensors
from edgekit.verify.matching.regions import find_regions


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """A layer, the tensor that it computes, and the sha256 of its nodes, their attributes and all their constants."""

    tensor: str
    layer: str
    op: str
    sha256: str


class Changed(msgspec.Struct, frozen=True, kw_only=True):
    """A layer that is not as it was built, or is gone."""

    layer: str
    op: str
    is_gone: bool

    @property
    def words(self) -> str:
        """What happened, in a line."""
        if self.is_gone:
            return (
                f"the bundle's model has no layer '{self.layer}' ({self.op}) any more: it was changed since the build"
            )
        return (
            f"layer '{self.layer}' ({self.op}) is not as it was built: its weights, scales or attributes were changed"
            " since; build the bundle again"
        )


def fingerprint_model(model: Model) -> bytes:
    """Returns the fingerprints of a model's layers as JSON."""
    return msgspec.json.format(msgspec.json.encode(fingerprint_layers(model)), indent=0) + b"\n"


def fingerprint_layers(model: Model) -> tuple[Fingerprint, ...]:
    """Returns the fingerprint of each layer of a model, in the order of computation; nothing runs."""
    stored = Initializers(model)
    matched = match_tensors(stored.graph, stored.graph)
    regions = find_regions(stored.graph, stored.graph, matched)
    producers = {name: node for node in stored.graph.node for name in node.output if name}
    return tuple(_fingerprint_bodies(stored.graph)) + tuple(
        Fingerprint(
            tensor=item.tensor,
            layer=item.layer,
            op=item.op,
            sha256=_digest([producers[name] for name in sorted(regions[item.tensor].results)], stored),
        )
        for item in matched
    )


def find_changed(bundle: Bundle) -> Changed | None:
    """Returns the first layer of a bundle's ONNX model that is not as it was built; None if all are, or nobody knows.

    Raises:
        BundleError: the fingerprints are malformed.
    """
    name = f"{GOLDEN}/{LAYERS}"
    if "onnx" not in bundle.manifest.forms or name not in bundle.manifest.files:
        return None
    path = bundle.folder / name
    try:
        then = msgspec.json.decode(path.read_bytes(), type=tuple[Fingerprint, ...])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BundleError(f"'{path}' is malformed: {error}", hint="build the bundle again") from error
    try:
        now = fingerprint_layers(load_model(bundle.find_model("onnx")))
    except EdgekitError:
        return None
    return find_changed_layer(then, now)


def find_changed_layer(then: Sequence[Fingerprint], now: Sequence[Fingerprint]) -> Changed | None:
    """Returns the first layer whose fingerprint is another one, or that is gone; None if all are the same."""
    known = {layer.tensor: layer.sha256 for layer in now}
    other = next((layer for layer in then if known.get(layer.tensor) != layer.sha256), None)
    return None if other is None else Changed(layer=other.layer, op=other.op, is_gone=other.tensor not in known)


def _fingerprint_bodies(graph: onnx.GraphProto) -> Iterator[Fingerprint]:
    """Yields the fingerprints of the nodes inside branches and loops, each with the constants of its body."""
    for body in list(iterate_graphs(graph))[1:]:
        constants = list_constants(body)
        for node in body.node:
            if node.op_type != "Constant" and node.output:
                plain = onnx.NodeProto()
                plain.CopyFrom(node)
                del plain.attribute[:]
                plain.attribute.extend(item for item in node.attribute if not item.HasField("g"))
                digest = hashlib.sha256(plain.SerializeToString(deterministic=True))
                for name in node.input:
                    if name in constants:
                        digest.update(read_contents(constants[name]))
                yield Fingerprint(
                    tensor=f"{body.name}/{node.output[0]}",
                    layer=node.name or node.output[0],
                    op=node.op_type,
                    sha256=digest.hexdigest(),
                )


def _digest(nodes: Sequence[onnx.NodeProto], stored: Initializers) -> str:
    digest = hashlib.sha256()
    for node in nodes:
        digest.update(msgspec.json.encode([node.domain, node.op_type, list(node.input), list(node.output)]))
        for attribute in sorted(node.attribute, key=lambda item: item.name):
            digest.update(attribute.SerializeToString(deterministic=True))
        for name in node.input:
            if name in stored.tensors:
                value = stored.read(name)
                digest.update(f"{value.dtype}{value.shape};".encode())
                digest.update(value.tobytes())
    return digest.hexdigest()
