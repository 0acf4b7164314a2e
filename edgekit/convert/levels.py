"""The graph that ONNX Runtime makes at each optimization level, as an ONNX file that any session loads."""

from collections import Counter
from pathlib import Path

import msgspec
import onnx

from edgekit._files import digest_file
from edgekit._ort import Level, optimize_graph
from edgekit.convert.equality import Equality, compare_with_source
from edgekit.convert.fusions import FusedKind, as_nodes, trace_fusions
from edgekit.convert.ort_form import Cpu, OrtOptions, session_settings
from edgekit.data.samples import Samples
from edgekit.errors import ModelError
from edgekit.graph.constants import MAIN_DOMAINS, ML_DOMAIN
from edgekit.model.external import skim_model
from edgekit.model.model import MOST_INLINE_BYTES, Model, keep_used_opsets, order_nodes, refill

_LAYOUT_LEVELS = frozenset({Level.LAYOUT, Level.ALL})
OF_THIS_MACHINE = "layouts of this machine's CPU are in it: load it on the same kind of CPU only"


class LevelModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model as ONNX Runtime optimizes it at a level.

    `nodes` counts the nodes of the main graph. `kinds` are the fusions that made them, most frequent first.
    `casts_gone` is how many Cast nodes fewer it has than the given model (negative: more). `inserted` counts the nodes
    of ONNX Runtime's own operators by operator. `warning` says why the file is not for every machine, "" if it is.
    `load_ms` is the time to make a session, `median_ms` that of a run on this machine with one thread, `ratio` that
    time divided by the one without optimization, with its `interval`; all are None if nothing was timed.
    """

    level: Level
    file: str
    nodes: int
    kinds: tuple[FusedKind, ...]
    casts_gone: int
    inserted: dict[str, int]
    size_bytes: int
    sha256: str
    warning: str = ""
    equality: Equality | None = None
    load_ms: float | None = None
    median_ms: float | None = None
    ratio: float | None = None
    interval: tuple[float, float] | None = None


def write_level(
    model: Model, level: Level, cpu: Cpu, folder: Path, samples: Samples | None = None, *, checked: bool = True
) -> LevelModel:
    """Writes a model as optimized at a level into a folder, as `model.LEVEL.onnx`; its bytes are reproducible.

    Args:
        model: the model to optimize.
        level: the optimization level.
        cpu: the CPU that will run it: "arm" gets no blocked layouts, which only x64 has.
        folder: the folder of the file.
        samples: the inputs on which both are compared; drawn at random if there are none.
        checked: whether they are compared.

    Raises:
        ModelError: the model is too large, or the file's results differ from the model's.
        RuntimeRefusal: ONNX Runtime refuses the model.
    """
    # ONNX Runtime writes the optimized model into one file.
    if model.size_bytes > MOST_INLINE_BYTES:
        raise ModelError(
            f"'{model.path}' has {model.size_bytes / 1e9:.1f} GB, and an optimized ONNX file ends at 2 GB",
            hint="leave --level out: --onnx then writes the model with its external data",
        )
    options = OrtOptions(style="full", cpu=cpu, level=level)
    settings = session_settings(options, level, model)
    path = folder / f"model.{level.value}.onnx"
    optimize_graph(model.path, path, msgspec.structs.replace(settings, libraries=model.custom_ops))
    proto = onnx.load(str(path))
    # ONNX Runtime adds ReorderOutput nodes in the order of a hash table that is seeded anew in each process: they are
    # named after their outputs, and the nodes sorted by their outputs.
    reorders = [node for node in proto.graph.node if node.op_type == "ReorderOutput"]
    for node in reorders:
        node.name = f"ReorderOutput_{node.output[0]}"
    if reorders:
        nodes = sorted(proto.graph.node, key=lambda node: next(filter(None, node.output), ""))
        refill(proto.graph.node, order_nodes(onnx.GraphProto(node=nodes)))
    keep_used_opsets(proto)
    path.write_bytes(proto.SerializeToString(deterministic=True))
    equality = compare_with_source(model, path, options, samples) if checked else None
    if equality is not None and not equality.passed:
        raise ModelError(
            f"'{path.name}' gives other results than its source: error {equality.error:.2g}, at most"
            f" {equality.tolerance:g} is allowed",
            hint="choose a lower --level, and report the model to ONNX Runtime",
        )
    return describe_level(model, path, level, equality)


def describe_level(model: Model, path: Path, level: Level, equality: Equality | None = None) -> LevelModel:
    """Returns the facts of an optimized file, compared with its source model."""
    before, after = skim_model(model.path).graph, skim_model(path).graph
    casts = Counter(node.op_type for node in before.node)["Cast"] - Counter(node.op_type for node in after.node)["Cast"]
    own = Counter(node.op_type for node in after.node if node.domain not in {*MAIN_DOMAINS, ML_DOMAIN})
    blocked = any(node.domain.endswith("nchwc") or node.op_type.startswith("Nhwc") for node in after.node)
    return LevelModel(
        level=level,
        file=path.name,
        nodes=len(after.node),
        kinds=trace_fusions(before, as_nodes(after)).kinds,
        casts_gone=casts,
        inserted=dict(sorted(own.items())),
        size_bytes=path.stat().st_size,
        sha256=digest_file(path),
        warning=OF_THIS_MACHINE if blocked and level in _LAYOUT_LEVELS else "",
        equality=equality,
    )
