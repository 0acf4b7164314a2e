"""Computes the manifest of a bundle from its contents."""

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx

from edgekit._ort import CPU_PROVIDER
from edgekit.bundle import manifest
from edgekit.bundle.checks import TARGET_FIELDS
from edgekit.bundle.expected import Recorded
from edgekit.bundle.golden import Golden, read_inputs, read_outputs
from edgekit.check.report import CheckReport
from edgekit.convert.ort_format.canonical import CANONICAL_VERSION
from edgekit.data.images import Preprocess
from edgekit.data.samples import Samples
from edgekit.errors import BundleError
from edgekit.model.model import Model, read_proto
from edgekit.model.state import State
from edgekit.model.tensors import ListColumns, Reading, TensorSpec
from edgekit.recipe import Recipe, TensorNotes
from edgekit.serialize import fill, ready_type
from edgekit.target import Form, Precision, Target

# Operators for which ONNX defines the layout of the input: N, C, then the spatial axes.
_CHANNEL_SECOND = frozenset(
    {"Conv", "ConvTranspose", "MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "BatchNormalization"}
)
_LAYOUTS = {3: "NCW", 4: "NCHW", 5: "NCDHW"}


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a bundle.

    `files` are the model files of each form, the one to load first; the bundle keeps their names. `source` is the
    user's model. `versions` are those of the tools. `recipe` and `preprocess` are those of the build; `state` says
    which outputs were fed back in the golden samples. `recorded` is the bundle of an earlier build, whose self-test is
    used if its model files are the same. `buckets` are the files of several sizes of the model, and `unpadded` is the
    file with the float model's outputs for the golden samples at their own sizes. `layers` is the comparison of layers
    as JSON, which `edgekit verify` reads; `listed` says where outputs list detections, and `readings` what each output
    means.
    """

    source: Model
    target: Target
    precision: Precision
    files: Mapping[Form, tuple[Path, ...]]
    golden: Golden
    check: CheckReport
    ancestry: manifest.Ancestry
    versions: Mapping[str, str]
    recipe: Recipe = Recipe()
    state: State = State()
    preprocess: Preprocess | None = None
    buckets: manifest.Buckets | None = None
    unpadded: Path | None = None
    recorded: Recorded | None = None
    layers: bytes | None = None
    listed: ListColumns | None = None
    readings: Mapping[str, Reading] = {}


def describe_contents(contents: Contents, golden: manifest.GoldenFacts, check: str) -> manifest.Manifest:
    """Returns the manifest for these contents, without `files`; `check` is the sha256 of `check.json`.

    Raises:
        BundleError: there is no model file in a form that the target loads.
        DataError: the golden samples cannot be read.
    """
    target = contents.target
    forms: dict[Form, tuple[str, ...]] = {
        form: tuple(path.name for path in paths) for form, paths in contents.files.items() if paths
    }
    # In the order of the target's list: an app should load the first form that exists.
    loadable: list[Form] = [form for form in target.conversion.forms if form in forms]
    if not loadable:
        message = f"there is no model file in a form that target '{target.name}' loads"
        raise BundleError(message, hint="convert it first")
    shares: dict[str, manifest.ProviderShare] = {}
    for provider, taken in ((target.provider, True), (CPU_PROVIDER, False)):
        # For the target `cpu` both entries are the same provider, which runs all nodes.
        nodes = [each for each in contents.check.node_list if each.taken is taken or target.provider == CPU_PROVIDER]
        shares[provider] = manifest.ProviderShare(nodes=len(nodes), macs=sum(node.macs for node in nodes))
    soc = target.socs.get(target.settings.get("soc_model", ""))
    # The inputs whose second axis is the channel, because such an operator reads them.
    graph: onnx.GraphProto = read_proto(contents.source, weights=False).graph
    channel_inputs = frozenset(node.input[0] for node in graph.node if node.op_type in _CHANNEL_SECOND and node.input)
    images = [spec for spec in contents.golden.inputs if contents.preprocess or spec.name in channel_inputs]
    given = contents.preprocess.layout if contents.preprocess else None
    layouts = {spec.name: given or _LAYOUTS.get(len(spec.shape or ()), "") for spec in images}
    return manifest.Manifest(
        **{key: read(target) for key, read in TARGET_FIELDS.items()},
        name=contents.source.name,
        precision=contents.precision,
        runtime=target.runtime,
        form=loadable[0],
        forms=forms,
        files={},
        inputs=_describe_tensors(contents, contents.golden.inputs, read_inputs(contents.golden), layouts),
        outputs=_describe_tensors(contents, contents.golden.outputs, read_outputs(contents.golden)),
        golden=golden,
        placement=fill(manifest.Placement, contents.check, providers=shares, node_list=check),
        ancestry=contents.ancestry,
        versions=dict(contents.versions),
        source_size_bytes=contents.source.size_bytes,
        model_size_bytes=sum(path.stat().st_size for path in contents.files[loadable[0]]),
        tested=manifest.Tested(
            onnxruntime=contents.versions.get("onnxruntime", ""),
            qairt=contents.versions.get("qairt"),
            socs=() if soc is None else (soc,),
        ),
        canonical_form=CANONICAL_VERSION if {"full", "runtime"} & forms.keys() else None,
        provenance=_describe_provenance(contents),
        licence=contents.recipe.licence,
        state=contents.state if contents.state.feeds else msgspec.UNSET,
        buckets=contents.buckets or msgspec.UNSET,
        open_dims=manifest.measure_open(contents.golden.inputs, read_inputs(contents.golden)) or msgspec.UNSET,
        listed=contents.listed or msgspec.UNSET,
        readings=dict(contents.readings) or msgspec.UNSET,
    )


def _describe_tensors(
    contents: Contents, specs: Iterable[TensorSpec], samples: Samples, layouts: Mapping[str, str] | None = None
) -> tuple[manifest.BundledTensor, ...]:
    """Returns the description of outputs, or of inputs with their `layouts`; notes of the recipe have priority."""
    ranges, tensors = dict[str, tuple[float, float]](), contents.recipe.tensors
    for name, value in (pair for sample in samples for pair in sample.items()):
        # JSON has neither infinity nor NaN; text has no range.
        numbers = value[np.isfinite(value)] if value.dtype.kind == "f" else value
        if value.dtype.kind in "fiub" and numbers.size:
            low, high = float(numbers.min()), float(numbers.max())
            known = ranges.get(name, (low, high))
            ranges[name] = (min(low, known[0]), max(high, known[1]))
    noted = [(spec, tensors.get(spec.name, TensorNotes())) for spec in specs]
    return tuple(
        fill(
            manifest.BundledTensor,
            spec,
            layout=(layouts or {}).get(spec.name, "") if notes.layout is None else notes.layout,
            value_range=ranges.get(spec.name),
            preprocessing=None if layouts is None else notes.preprocessing or contents.preprocess,
            postprocessing=notes.postprocessing if layouts is None else None,
        )
        for spec, notes in noted
    )


def _describe_provenance(contents: Contents) -> manifest.Provenance:
    recipe, target = contents.recipe, contents.target
    effective = msgspec.structs.replace(
        recipe,
        targets=(target.name,),
        settings=target.settings,
        # A forecast does not change the bundle.
        forecast=msgspec.UNSET,
        thresholds={name: value for name, value in recipe.thresholds.items() if name == target.name},
    )
    words = ["edgekit", "build", contents.source.path.name, "--data", "DATA", "--target", target.name]

    for option, given in (
        ("--set", target.settings),
        ("--dim", recipe.dims),
        ("--dim", {name: ",".join(map(str, sizes)) for name, sizes in recipe.buckets.items()}),
        ("--freeze", recipe.freeze),
        ("--pad", {name: f"{value:g}" for name, value in recipe.pad.items()}),
    ):
        words += [word for name, value in sorted(given.items()) for word in (option, f"{name}={value}")]
    words += [] if recipe.precision == "auto" else ["--precision", recipe.precision]
    words += [] if recipe.samples is None else ["--samples", str(recipe.samples)]
    words += [] if recipe.max_drop is None else ["--max-drop", str(recipe.max_drop)]
    # Paths would reveal the machine of the build, and change the bytes: placeholders stand for them.
    words += [] if contents.preprocess is None else ["--preprocess", "FILE"]
    words += [] if recipe.fix else ["--no-fix"]
    words += ["--recipe", "FILE"] if recipe.outputs or recipe.state or recipe.forms else []
    written = msgspec.json.decode(msgspec.json.encode(effective), type=ready_type(dict[str, Any]))
    # Defaults of newer keys are not written, so that bundles keep their bytes.
    for key in ("outputs", "buckets", "pad", "state", "fix", "forms"):
        if getattr(recipe, key) == getattr(Recipe(), key):
            del written[key]
    return manifest.Provenance(command=shlex.join([*words, "--out", "OUT"]), recipe=written)
