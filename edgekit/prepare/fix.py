"""The automatic rewrites of the graph, and the fusions of ONNX Runtime's transformer optimizer.

Each keeps every result bit for bit, or says in its docstring how much results may differ. The optimizer fuses
attention, LayerNormalization, GELU and embeddings.
"""

import contextlib
import importlib
import logging
import pkgutil
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import onnx

from edgekit._ort import CpuSession, Level, SessionSettings, tells_refusal
from edgekit.data.padding import Padding, find_padding
from edgekit.errors import ModelError, RuntimeRefusal, UsageError, require_known
from edgekit.graph.constants import ORT_DOMAIN, lift_constants
from edgekit.graph.graph import Graph, view_part
from edgekit.graph.inference import infer_model
from edgekit.graph.rewrite import Rewrite
from edgekit.model import model as models
from edgekit.model.external import point_into
from edgekit.model.state import first_state
from edgekit.model.tensors import TensorSpec
from edgekit.prepare import rewrites
from edgekit.prepare.clean import import_contrib, keeps_weights_on_disk, merge_domains, prepare_model
from edgekit.prepare.external import is_absent, save_graph
from edgekit.prepare.interface import drop_idle_nodes, name_nodes
from edgekit.prepare.opset import lower_ir_version, read_opset
from edgekit.prepare.rewrites import activations, float16, idle, norms, products, signs
from edgekit.serialize import read_own_toml
from edgekit.target import INTEGERS, Target

_FAILURES = (ValueError, TypeError, AssertionError, KeyError, IndexError, AttributeError, RuntimeError)


# Slower on the CPU than their parts, and less exact (docs/reference/experiments.md). Attention is fused by our rewrite.
_SLOW_ON_CPU = ("enable_attention", "enable_skip_layer_norm", "enable_bias_skip_layer_norm", "enable_bias_gelu")


class FuseOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The family of the transformer, its attention heads and its hidden size; 0 means to read them from the graph.

    `for_cpu` does not fuse what the CPU provider computes faster in parts.
    """

    model_type: str = "bert"
    heads: int = 0
    hidden: int = 0
    for_cpu: bool = True


class FusedOps(msgspec.Struct, frozen=True, kw_only=True):
    """The number of new nodes of each fused operator, and of all nodes before and after fusion."""

    model_type: str
    fused: dict[str, int]
    nodes_before: int
    nodes_after: int


class FusedModel(FusedOps, frozen=True, kw_only=True):
    """A model with its transformer patterns fused."""

    model: models.Model


def fuse_transformer(
    model: models.Model, options: FuseOptions, out: Path, prepare: Callable[[models.Model, Path], models.Model]
) -> FusedModel:
    """Writes a model to `out` with transformer patterns fused into operators of `com.microsoft`, and prepared.

    ONNX Runtime's optimizer fuses the patterns of the family in the exported model; attention that it does not find is
    fused after `prepare` by edgekit's rewrite. Only ONNX Runtime's CPU, CUDA and WebGPU providers have these operators:
    do not fuse for a phone's accelerator.

    Raises:
        UsageError: there is no such family.
        ModelError: the optimizer cannot handle the model, or nothing was found to fuse.
    """
    # Imported only here: with sympy it takes half a second.
    optimizer: Any = importlib.import_module("onnxruntime.transformers.optimizer")
    families = tuple(sorted(optimizer.MODEL_TYPES))
    require_known(options.model_type, families, f"there is no --model-type '{options.model_type}'")
    before = models.read_proto(model, weights=False)
    chosen = optimizer.FusionOptions(options.model_type)
    for name in _SLOW_ON_CPU if options.for_cpu else ():
        setattr(chosen, name, False)
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        asked = (options.model_type, options.heads, options.hidden, chosen)
        fused: onnx.ModelProto = optimizer.optimize_model(str(model.path), *asked, opt_level=0).model
    except _FAILURES as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        words = f"ONNX Runtime's transformer optimizer fails on '{model.path.name}': {first[:300]}"
        raise ModelError(words, hint="name another --model-type, or leave --fuse out") from error
    finally:
        logging.disable(disabled)
    lower_ir_version(fused, read_opset(fused))
    written = models.save_proto(fused, out.with_name(f"{out.stem}-exported.onnx"))
    written = msgspec.structs.replace(written, custom_ops=model.custom_ops)
    prepared = prepare(written, out.with_name(f"{out.stem}-prepared.onnx"))
    joined = fix_model(prepared, out, _TABLE.attention).model
    counts = [
        Counter(node.op_type for node in models.iterate_nodes(proto.graph) if node.domain == ORT_DOMAIN)
        for proto in (models.read_proto(joined, weights=False), before)
    ]
    new = counts[0] - counts[1]
    if not new:
        words = f"no pattern of '{options.model_type}' was found in '{model.name}'"
        raise ModelError(words, hint=f"another --model-type ({', '.join(families)}), or leave --fuse out")
    return FusedModel(
        model=joined,
        model_type=options.model_type,
        fused=dict(sorted(new.items())),
        nodes_before=model.node_count,
        nodes_after=joined.node_count,
    )


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `rewrites.toml`, which says what each part is."""

    fusions: frozenset[str]
    need_shapes: frozenset[str]
    attention: tuple[str, ...]
    every: dict[str, str]
    some: dict[str, str]
    required: dict[str, str]
    qnn: dict[str, str]
    last: dict[str, str]


_TABLE = read_own_toml(Path(__file__).parent / "rewrites.toml", _Table)
_MODULES = [importlib.import_module(f"{rewrites.__name__}.{it.name}") for it in pkgutil.iter_modules(rewrites.__path__)]
_KNOWN = {each.id: each for module in _MODULES for each in vars(module).values() if isinstance(each, Rewrite)}


def _list_rewrites(*ids: str) -> dict[str, Rewrite]:
    return {id_: _KNOWN[id_] for id_ in ids}


FIXES = _list_rewrites(*_TABLE.every)
"""Rewrites that help or do no harm on every provider."""
FUSIONS = _TABLE.fusions
"""Those of FIXES that one of TARGET_REWRITES undoes, for a target that lacks the operator or computes it wrongly."""
_WITHOUT_SHAPES = FIXES.keys() - _TABLE.need_shapes

TARGET_REWRITES = _list_rewrites(*_TABLE.some)
"""Rewrites that help some providers only; a target gets those by which the check finds that its provider takes more."""

QNN_REWRITES = tuple(_list_rewrites(*_TABLE.qnn).values())
"""They avoid kernels of QNN's HTP that are wrong or inaccurate, in a quantized model; the order is that of REWRITES."""
QNN_NOTES: Mapping[str, str] = _TABLE.qnn
"""What each of QNN_REWRITES avoids, by id, for a bundle; "" where there is no more to say."""

REQUIRED_REWRITES = _list_rewrites(*_TABLE.required, *_TABLE.qnn, *_TABLE.last)
"""Rewrites that a target may need although its provider takes no more nodes by them: in a float model
(`list_required`), or in a quantized one (`fix_quantized`)."""

# First those to float32, so that the others see it: ONNX Runtime writes a Gelu of float16 as its parts.
REWRITES: Mapping[str, Rewrite] = {
    **_list_rewrites(*float16.TO_FLOAT), **FIXES, **TARGET_REWRITES, **REQUIRED_REWRITES
}  # fmt: skip
"""Each changes a graph in place and returns the names of the nodes it changed; they run in this order."""

ADVICE = {id_: text for id_, text in (_TABLE.every | _TABLE.some | _TABLE.required | _TABLE.last).items() if text}
"""What the check says of nodes that a rewrite would change, by its id, in that order; nothing of those not named."""


def list_required(target: Target, *, stays_float: bool = False) -> tuple[str, ...]:
    """Returns the ids of the rewrites that a target needs, whatever the check finds of the float model.

    Every model gets the target's `rewrites`. For a target with weights in blocks, Gemm becomes MatMul. A model to be
    quantized must compute in float32, because tensors of other float types get no ranges. A model that `stays_float`
    gets the target's `float_rewrites`, which fuse patterns that the quantizer needs in parts. In a model that is to be
    quantized for QNN, HardSwish becomes one node, which is rounded once, and BatchNormalization and Pad with the value
    zero are replaced.
    """
    # Only a MatMul with an input of three dimensions has its weights in blocks.
    blocks = any(types.weight_block for types in target.quantization.precisions.values())
    takes_integers = any(precision in INTEGERS for precision in target.precisions)
    own = target.float_rewrites if stays_float else tuple(float16.TO_FLOAT) if takes_integers else ()
    if target.quantization.scheme == "qnn" and not stays_float:
        own = (*own, activations.join_hard_swish.id, norms.batch_norm_to_conv.id, idle.drop_pad_values.id)
    return (*((products.gemm_to_matmul.id,) if blocks else ()), *own, *target.rewrites)


class Fix(msgspec.Struct, frozen=True, kw_only=True):
    """The id of a rewrite that was applied, and the names of the nodes it changed."""

    id: str
    nodes: tuple[str, ...]


class FixedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model after the automatic rewrites, and the rewrites that changed something."""

    model: models.Model
    fixes: tuple[Fix, ...]


def ready_model(
    source: models.Model, folder: Path, dims: Mapping[str, int], *, may_stay_open: bool = False
) -> FixedModel:
    """Writes the model that every build starts from into `folder`: prepared, with the rewrites `FIXES`.

    With `may_stay_open`, dimensions without a number stay dynamic.

    Raises:
        UsageError: a dimension that does not exist, or a dynamic dimension that got no number.
        ModelError: the opset cannot be changed.
        RuntimeRefusal: ONNX Runtime cannot load the model.
        OutputError: `folder` cannot be written.
    """
    prepared = prepare_model(source, folder / "prepared" / f"{source.name}.onnx", dims, may_stay_open=may_stay_open)
    return fix_model(prepared, folder / "fixed" / f"{source.name}.onnx")


@tells_refusal
def fix_model(model: models.Model, out: Path, ids: Collection[str] = tuple(FIXES)) -> FixedModel:
    """Writes a model to `out` with the rewrites of these ids applied, by default `FIXES`.

    Raises:
        RuntimeRefusal: the model contradicts itself, and ONNX Runtime refuses it.
        OutputError: `out` cannot be written.
    """
    # Four rewrites need the values of weights: these two, and those to float32, for which they are read below.
    reads_weights = not {signs.UNSIGNED_WEIGHTS, signs.INT8_ACTIVATIONS}.isdisjoint(ids)
    on_disk = keeps_weights_on_disk(model) and not model.external_files and not reads_weights
    proto = point_into(model.path) if on_disk else models.read_proto(model, weights=False)
    kinds = {kind for id_, kind in float16.TO_FLOAT.items() if id_ in ids}
    if any(tensor.data_type in kinds and is_absent(tensor) for tensor in models.iterate_tensors(proto.graph)):
        # In place of float16 the weights take twice the bytes, inside the model file.
        if 2 * model.size_bytes > models.MOST_INLINE_BYTES:
            ids = set(ids) - float16.TO_FLOAT.keys()
        else:
            proto = models.read_proto(model)
    merge_domains(proto)
    name_nodes(proto.graph)
    fixes = apply_rewrites(proto, ids)
    name_nodes(proto.graph)
    return FixedModel(model=save_graph(proto, model, out), fixes=fixes)


def fix_quantized(model: models.Model, target: Target, out: Path) -> FixedModel:
    """Writes a quantized model to `out` with the workarounds that a target needs, or returns it if there are none.

    Raises:
        OutputError: `out` cannot be written.
    """
    if target.quantization.scheme != "qnn":
        return FixedModel(model=model, fixes=())
    return fix_model(model, out, [each.id for each in QNN_REWRITES])


def apply_rewrites(proto: onnx.ModelProto, ids: Collection[str]) -> tuple[Fix, ...]:
    """Applies the rewrites of these ids in place, and returns those that changed something."""
    known = {value.name for value in proto.graph.value_info}
    parts = tuple(models.iterate_graphs(proto.graph))
    for part in parts:
        # A graph that was not optimized has Constant nodes, which are no nodes of the view that rewrites read.
        lift_constants(part)
    opset, is_inferred = read_opset(proto), False
    views: list[Graph] = []
    fixes: list[Fix] = []
    for name, rewrite in REWRITES.items():
        if name not in ids:
            continue
        if name not in _WITHOUT_SHAPES and not is_inferred:
            # The previous rewrites may have changed shapes.
            inferred = infer_model(proto).graph.value_info
            models.refill(proto.graph.value_info, [value for value in inferred if value.type.HasField("tensor_type")])
            is_inferred, views = True, []
        # Most rewrites find nothing in a graph, of which one view does for all until one of them changes it.
        views = views or [view_part(graph, opset) for graph in models.iterate_graphs(proto.graph)]
        if not any(rewrite.finds(view, opset) for view in views):
            continue
        # Without a body there is one graph; a rewrite may replace a body.
        graphs = models.iterate_graphs(proto.graph) if len(parts) > 1 else parts
        nodes = tuple(node for graph in graphs for node in rewrite(graph, opset))
        if nodes:
            fixes.append(Fix(id=name, nodes=nodes))
            is_inferred, views = False, []
            # Where one node replaces several, nothing reads the others now. ONNX Runtime would keep them.
            drop_idle_nodes(proto.graph)
    if fixes:
        import_contrib(proto)
    kept = known & {output for node in proto.graph.node for output in node.output}
    models.refill(proto.graph.value_info, [value for value in proto.graph.value_info if value.name in kept])
    return tuple(fixes)


# Buckets: one model prepared for several sizes of one dimension, such as 64, 128 and 256 tokens.


class BucketModels(msgspec.Struct, frozen=True, kw_only=True):
    """The prepared model of each size except the `largest`, and how samples are padded to a size."""

    padding: Padding
    smaller: dict[int, models.Model]
    largest: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """All sizes, the smallest first."""
        return (*self.smaller, self.largest)


def choose_dims(
    dims: Mapping[str, int], buckets: Mapping[str, Sequence[int]], values: Mapping[str, float]
) -> dict[str, int]:
    """Returns the size of each dimension in `dims`, and the largest size of the one in `buckets`.

    Raises:
        UsageError: more than one dimension has several sizes, they are not positive and rising, or there are fill
            `values` without `buckets`.
    """
    if not buckets:
        if values:
            words = f"input '{next(iter(values))}' is to be filled, and no dimension has several sizes"
            raise UsageError(words, hint="give buckets: --dim NAME=64,128,256")
        return dict(dims)
    if len(buckets) > 1:
        names = "' and '".join(buckets)
        raise UsageError(f"'{names}' have several sizes", hint="one dimension can: give the others one size each")
    ((name, sizes),) = buckets.items()
    given = ",".join(map(str, sizes))
    rising = sorted({size for size in sizes if size > 0})
    if list(sizes) != rising or len(sizes) < 2:
        example = ",".join(map(str, rising if len(rising) > 1 else (64, 128, 256)))
        words = f"the buckets '{name}={given}' do not rise from 1 or more"
        raise UsageError(words, hint=f"each size once, the smallest first: --dim {name}={example}")
    if name in dims:
        raise UsageError(f"'{name}' is given both {dims[name]} and {given}", hint="leave one of them out")
    return {**dims, name: sizes[-1]}


def prepare_buckets(
    source: models.Model,
    prepared: models.Model,
    dims: Mapping[str, int],
    buckets: Mapping[str, Sequence[int]],
    values: Mapping[str, float],
    work: Path,
) -> BucketModels | None:
    """Prepares a model for each bucket except the largest, which `prepared` is; returns None without buckets.

    Raises:
        UsageError: a size contradicts the model, or the dimension cannot be padded; see `find_padding`.
        ModelError: the models of two sizes differ in more than this size.
    """
    if not buckets:
        return None
    ((name, sizes),) = buckets.items()
    smaller = {size: ready_model(source, work / f"size-{size}", {**dims, name: size}).model for size in sizes[:-1]}
    at = {**smaller, sizes[-1]: prepared}
    inputs = {size: model.inputs for size, model in at.items()}
    outputs = dict[int, Sequence[TensorSpec]]()
    for size, model in at.items():
        shapes = dict[str, tuple[int, ...]]()
        # A shape that is not inferred, as behind a Loop, is that of zeros. It stays unknown if zeros are no input of
        # the model: text, or numbers that ONNX Runtime refuses.
        if any(spec.shape is None for spec in model.outputs) and all(spec.dtype != "string" for spec in model.inputs):
            settings = SessionSettings(level=Level.DISABLED, libraries=model.custom_ops)
            with contextlib.suppress(RuntimeRefusal):
                made = CpuSession(model.path, settings).run({spec.name: first_state(spec) for spec in model.inputs})
                shapes = {output: value.shape for output, value in made.items()}
        outputs[size] = [
            msgspec.structs.replace(spec, shape=shapes.get(spec.name)) if spec.shape is None else spec
            for spec in model.outputs
        ]
    padding = find_padding(name, inputs, outputs, values)
    return BucketModels(padding=padding, smaller=smaller, largest=sizes[-1])
