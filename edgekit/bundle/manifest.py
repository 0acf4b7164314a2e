"""The manifest of a bundle: its contents, how an app must open it, and its origin.

This module also has the parts of a manifest: buckets (models for several sizes of one dimension), open dimensions
(whose size an app chooses) and tuned settings (found by a search). Last comes the JSON Schema that is published.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from edgekit._files import digest_file
from edgekit._ort import Level
from edgekit.check.report import PlacedNodes
from edgekit.data.images import Preprocess
from edgekit.data.padding import Padding
from edgekit.errors import BundleError, reraised
from edgekit.evidence import Evidence
from edgekit.model.state import State, find_fault
from edgekit.model.tensors import ListColumns, Reading, Tensors, TensorSpec
from edgekit.recipe import Licence
from edgekit.serialize import clean_schema, fill, ready_type
from edgekit.target import ChainedProvider, Form, Platform, Precision, Thresholds, Verification

_MAX_BUCKETS = 64


class Bucket(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A size, and the file of the model that has it."""

    size: int
    file: str


class Buckets(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The models of a bundle by the size of one dimension, the smallest first; the last is the bundle's own.

    `padding` says which axes have that size, and the values that pad inputs. `lengths` are those of the golden samples
    before padding; `golden/unpadded.npz` holds the float model's outputs for the unpadded samples.
    """

    padding: Padding
    sizes: tuple[Bucket, ...]
    lengths: tuple[int, ...]

    def choose(self, length: int) -> Bucket | None:
        """Returns the smallest bucket into which a sample of some length fits, None if there is none."""
        return next((bucket for bucket in self.sizes if bucket.size >= length), None)


def _find_sizes(axes: Mapping[str, Sequence[int]], tensors: Sequence[TensorSpec]) -> Iterator[int | None]:
    """Yields the size of each axis; None for an axis that does not exist or has no fixed size."""
    shapes = {spec.name: spec.shape or () for spec in tensors}
    for name, places in axes.items():
        shape = shapes.get(name, ())
        for axis in places or (-1,):
            size = shape[axis] if 0 <= axis < len(shape) else None
            yield size if isinstance(size, int) else None


_MAX_DIMS = 64


def open_specs(known: Sequence[TensorSpec], stated: Sequence[TensorSpec], names: Iterable[str]) -> list[TensorSpec]:
    """Returns the specs of golden samples, in which the open dimensions of the model are open too.

    `stated` are the model's inputs or outputs. An open dimension keeps its name if that is in `names`, else it is None.
    """
    shapes, kept = {spec.name: spec.shape for spec in stated}, frozenset(names)

    def free(spec: TensorSpec) -> TensorSpec:
        sizes, dims = spec.shape, shapes.get(spec.name)
        if sizes is None or dims is None or len(sizes) != len(dims):
            return spec
        pairs = zip(sizes, dims, strict=True)
        shape = tuple(size if isinstance(dim, int) else dim if dim in kept else None for size, dim in pairs)
        return TensorSpec(name=spec.name, dtype=spec.dtype, shape=shape)

    return [free(spec) for spec in known]


def list_open(inputs: Iterable[TensorSpec]) -> Iterator[tuple[str, str, int]]:
    """Yields each open dimension of inputs: its name as in `--dim`, its input and its axis."""
    for spec in inputs:
        yield from ((name, spec.name, axis) for axis, name in spec.name_axes().items())


def measure_open(inputs: Sequence[TensorSpec], samples: Iterable[Tensors]) -> dict[str, tuple[int, ...]]:
    """Returns the sizes of each open dimension in the samples, the smallest first."""
    places = tuple(list_open(inputs))
    found: dict[str, set[int]] = {name: set() for name, _, _ in places}
    for sample in samples if places else ():
        for name, tensor, axis in places:
            found[name].add(sample[tensor].shape[axis])
    return {name: tuple(sorted(sizes)) for name, sizes in found.items()}


_Threads = Annotated[int, msgspec.Meta(ge=0, le=1024)]
_AtLeastOne = Annotated[int, msgspec.Meta(ge=1, le=1024)]
_Word = Annotated[str, msgspec.Meta(max_length=200)]
_Positive = Annotated[float, msgspec.Meta(gt=0)]


class CallSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a session is made and called; each default is ONNX Runtime's own.

    `level` is the graph optimisation level. `threads` is the number of intra-op threads, 0 if ONNX Runtime chooses;
    `inter_threads` that of inter-op threads, which run nodes concurrently in a session that is `parallel`
    (`ORT_PARALLEL`). Without `arena`, each allocation goes to the system; without `memory_pattern`, no single block is
    planned for the tensors of a run. With `io_binding`, outputs are written into the buffers of the preceding run;
    `concurrency` runs are made at once in one session.
    """

    level: Level = Level.ALL
    threads: _Threads = 0
    inter_threads: _Threads = 0
    parallel: bool = False
    arena: bool = True
    memory_pattern: bool = True
    io_binding: bool = False
    concurrency: _AtLeastOne = 1


class SessionSetting(CallSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a session that a bundle was tuned with.

    `form` is the form of the bundle to load, "" for that of the manifest. `config` and `provider_options` are merged
    into those of the target.
    """

    form: _Word = ""
    config: dict[str, str] = {}
    provider_options: dict[str, str] = {}


class MachineClass(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The machines for which a setting was tuned, by facts that a loader can read on its own machine.

    `system` and `machine` are those of `uname`, in lower case; `cores` are those that the process may use, 0 for any.
    """

    system: _Word
    machine: _Word
    cores: _Threads = 0

    def holds(self, other: "MachineClass") -> bool:
        """Returns True if the machine `other` belongs to this class."""
        same = (self.system, self.machine) == (other.system, other.machine)
        return same and self.cores in {0, other.cores}


class TuningEvidence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why a setting was chosen: the ratio of its cost to that of the defaults, with the 95 % interval."""

    goal: _Word
    device: _Word
    evidence: Evidence
    ratio: _Positive
    interval: tuple[_Positive, _Positive]
    rounds: int
    changes: tuple[_Word, ...]
    versions: dict[str, str]


class TunedSession(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A setting, the machines for which it was tuned, and the measurements that prove it."""

    machine: MachineClass
    setting: SessionSetting
    evidence: TuningEvidence


UNPADDED = "golden/unpadded.npz"
"""The float model's outputs for the unpadded golden samples, in a bundle with buckets."""

# The largest manifest that is decoded.
MAX_MANIFEST_BYTES = 16 << 20


_Value = TypeVar("_Value")


class Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base of structs read from JSON in which an unknown key is an error."""


class BundledFile(Strict, frozen=True, kw_only=True):
    """Digest and size of a file in the bundle."""

    sha256: str
    size_bytes: int

    @classmethod
    def describe(cls, path: Path) -> "BundledFile":
        """Returns digest and size of a file."""
        return cls(sha256=digest_file(path), size_bytes=path.stat().st_size)


class BundledTensor(TensorSpec, frozen=True, kw_only=True):
    """An input or output with the facts that an app needs to fill or read it.

    `layout` names the axes ("NCHW"), "" if it is not known. `value_range` are the smallest and the largest finite value
    in the golden samples, None if there is none. `preprocessing` says how to make an input from the app's data,
    `postprocessing` what an output means; both come from the recipe or from `--preprocess`.
    """

    layout: str
    value_range: tuple[float, float] | None
    preprocessing: Preprocess | str | None
    postprocessing: str | None

    @property
    def spec(self) -> TensorSpec:
        """Only its name, type and shape."""
        return fill(TensorSpec, self)


class ChosenSample(Strict, frozen=True, kw_only=True):
    """A golden sample of the self-test: its row in the golden files, and why it was chosen."""

    row: int
    reason: Literal["typical", "extreme", "worst-error"]


class GoldenFacts(Strict, frozen=True, kw_only=True):
    """The golden samples, and the self-test that a device runs on a few of them.

    Row i of `golden/expected.npz` has the expected outputs of the bundle's model for sample `chosen[i]`. A device
    passes if no value of output `name` differs by more than `tolerance[name]`; outputs that are no floats have no
    tolerance and are not judged. `expected_from` says what computed them, or why there are none.
    """

    samples: int
    has_labels: bool
    chosen: tuple[ChosenSample, ...]
    tolerance: dict[str, float]
    expected_from: str


class Ancestry(Strict, frozen=True, kw_only=True):
    """The sha256 of everything from which the bundle was made; `quantized` is None for a float model.

    `data` is the digest of the calibration samples' content, None if none were used.
    """

    source: str
    prepared: str
    quantized: str | None
    data: str | None


class ProviderShare(Strict, frozen=True, kw_only=True):
    """How many nodes a provider is expected to run, and their multiply-accumulates."""

    nodes: int
    macs: int


class Placement(PlacedNodes, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The predicted placement: how many nodes the provider takes, in how many partitions, and their share of the work.

    The observed placement is in `verify.json` (`placed`): the manifest must not depend on which devices ran.
    `providers` has the nodes and the work by provider, the CPU included. `node_list` is the sha256 of `check.json`,
    which lists the nodes one by one.
    """

    taken_macs: float
    providers: dict[str, ProviderShare]
    node_list: str


class Tested(Strict, frozen=True, kw_only=True):
    """The versions the bundle was made with: ONNX Runtime's, and for QNN that of QAIRT and the SoC."""

    onnxruntime: str
    qairt: str | None
    socs: tuple[str, ...]


class Provenance(Strict, frozen=True, kw_only=True):
    """How to make the bundle again: the command without paths, and the recipe with its defaults."""

    command: str
    recipe: dict[str, Any]


class Manifest(Strict, frozen=True, kw_only=True):
    """Everything an app or a device needs to know, without times, paths or host names.

    `forms` names the files of each form of the model, the one to load first; `form` is the one an app should load.
    `inputs` and `outputs` have the shapes of one sample; a dimension whose size an app may choose has a name or null
    there, and `open_dims` lists its sizes in the golden samples. `files` lists every file of the bundle except the
    manifest itself, its signature, and the `evidence` (measured accuracy and latency, with device and environment),
    which differs from run to run. `platforms` has requirements and provider options by operating system. `fallback` are
    the targets, or "cpu", to try next if this one cannot run. `canonical_form` is the version of edgekit's layout of
    ORT-format files, None without such a file. `state` says which outputs an app passes as inputs of the next step, and
    how many golden samples make a sequence. `buckets` are sizes of one dimension, with a model for each; `forms` has
    the files of all of them. `tuned` are settings for classes of machines: the first entry whose class fits is used.
    `listed` says where outputs list detections, in any order; `readings` says what each output means, which decides how
    it is compared with that of the float model. `chain` has the providers of a session between `provider` and the CPU,
    in this order, each with its options.
    """

    # A newer version is refused, because it may change the meaning of other keys.
    schema_version: Literal[2] = 2
    name: str
    target: str
    settings: dict[str, str]
    precision: Precision
    provider: str
    provider_options: dict[str, str]
    session_config: dict[str, str]
    minimum_ort: str
    runtime: str
    form: Form
    forms: dict[Form, tuple[str, ...]]
    files: dict[str, BundledFile]
    inputs: tuple[BundledTensor, ...]
    outputs: tuple[BundledTensor, ...]
    golden: GoldenFacts
    placement: Placement
    thresholds: Thresholds
    verification: tuple[Verification, ...]
    ancestry: Ancestry
    versions: dict[str, str]
    source_size_bytes: int
    model_size_bytes: int
    platforms: dict[str, Platform]
    tested: Tested
    canonical_form: int | None
    provenance: Provenance
    licence: Licence
    fallback: tuple[str, ...]
    evidence: Literal["verify.json"] = "verify.json"
    # Newer keys are written only if they are set, so that other bundles keep their bytes.
    state: State | msgspec.UnsetType = msgspec.UNSET
    buckets: Buckets | msgspec.UnsetType = msgspec.UNSET
    tuned: tuple[TunedSession, ...] | msgspec.UnsetType = msgspec.UNSET
    open_dims: dict[str, tuple[int, ...]] | msgspec.UnsetType = msgspec.UNSET
    listed: ListColumns | msgspec.UnsetType = msgspec.UNSET
    chain: tuple[ChainedProvider, ...] | msgspec.UnsetType = msgspec.UNSET
    readings: dict[str, Reading] | msgspec.UnsetType = msgspec.UNSET

    @property
    def steps(self) -> int:
        """How many golden samples, one after another, make a sequence."""
        return self.state.steps if self.state else 1

    @property
    def model_file(self) -> str:
        """The file that an app should load."""
        return self.forms[self.form][0]


def encode_json(value: object) -> bytes:
    """Returns canonical JSON: sorted keys, two spaces, a newline at the end; the same value gives the same bytes."""
    # Indented, so that two bundles can be compared line by line.
    return msgspec.json.format(msgspec.json.encode(value, order="sorted"), indent=2) + b"\n"


def decode_manifest(data: bytes, source: str) -> Manifest:
    """Returns a manifest, read strictly: an unknown, missing or ill-typed key is an error that names it.

    The bytes must be those that edgekit writes: another order, a repeated key or other white space is an alteration.

    Raises:
        BundleError: the manifest is malformed, not canonical, of an unknown schema version, or contradicts itself.
    """
    manifest = decode_strictly(data, Manifest, source)
    for form in (manifest.form, *manifest.forms):
        if not manifest.forms.get(form):
            raise BundleError(f"'{source}' names no file for form '{form}'", hint="build the bundle again")
    for name in (name for names in manifest.forms.values() for name in names):
        if name not in manifest.files:
            raise BundleError(f"'{source}' does not list the model file {name[:200]!r}", hint="build the bundle again")
    for fault in _list_faults(manifest):
        raise BundleError(f"the {fault[0]} in '{source}' {fault[1]}", hint="build the bundle again")
    return manifest


def _list_faults(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yields what contradicts the rest of a manifest, and in which way."""
    state, buckets, sizes, samples = manifest.state, manifest.buckets, manifest.open_dims, manifest.golden.samples
    if state:
        if (fault := find_fault(state, manifest.inputs, manifest.outputs)) is not None:
            yield "state", fault[0]
        elif samples % manifest.steps:
            yield "state", f"has {manifest.steps} steps, and {samples} golden samples make no whole sequences"
    if buckets:
        if manifest.steps > 1:
            yield "buckets", "are of a model with state, whose steps they cannot run"
        if UNPADDED not in manifest.files:
            yield "buckets", f"lack '{UNPADDED}'"
        # The file of the largest bucket comes first.
        files, padding, names = manifest.forms[manifest.form], buckets.padding, [each.file for each in buckets.sizes]
        all_sizes = [each.size for each in buckets.sizes]
        if not 0 < len(all_sizes) <= _MAX_BUCKETS or all_sizes != sorted(set(all_sizes)) or all_sizes[0] < 1:
            yield "buckets", "are not in order"
        if names[-1] != files[0] or len(set(names)) < len(names) or not set(names) <= set(files):
            yield "buckets", "name files that are not those of the model"
        if not padding.inputs or padding.values.keys() != padding.inputs.keys():
            yield "buckets", "do not say which inputs are filled, and with what"
        # Text cannot be padded.
        numbers = [spec for spec in manifest.inputs if spec.is_tensor and spec.dtype != "string"]
        filled, cut = _find_sizes(padding.inputs, numbers), _find_sizes(padding.outputs, manifest.outputs)
        largest = all_sizes[-1]
        if any(size != largest for size in filled) or any(size is None for size in cut):
            yield "buckets", f"fill axes that do not have the size {largest}, or cut axes that are not there"
        if len(buckets.lengths) != samples or not all(1 <= length <= largest for length in buckets.lengths):
            yield "buckets", "do not hold the lengths of the golden samples"
    if sizes is not msgspec.UNSET:
        # Two inputs may have different sizes for one named dimension: ONNX Runtime only warns of that.
        most = samples * max(1, len(manifest.inputs))
        if buckets:
            yield "open dimensions", "stand beside buckets"
        if not 0 < len(sizes) <= _MAX_DIMS or set(sizes) != {name for name, _, _ in list_open(manifest.inputs)}:
            yield "open dimensions", "are not those that its inputs leave without a number"
        for each in sizes.values():
            if not 0 < len(each) <= most or list(each) != sorted(set(each)) or each[0] < 0:
                yield "open dimensions", "have sizes that are not in order"


def decode_json(data: bytes, source: str) -> Any:
    """Returns JSON of at most 16 MiB as plain data.

    Raises:
        BundleError: it is too large, too deep, or no JSON.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise BundleError(f"'{source}' is larger than {MAX_MANIFEST_BYTES} bytes", hint="edgekit did not write it")
    malformed = BundleError(f"'{source}' is malformed", hint="build the bundle again")
    with reraised((msgspec.MsgspecError, UnicodeError, RecursionError), malformed, quote=True):
        return msgspec.json.decode(data)


def decode_strictly(data: bytes, kind: type[_Value], source: str) -> _Value:
    """Returns JSON as a value of the type `kind`, if its bytes are those of `encode_json`.

    Readers disagree on repeated keys (RFC 8259, 4), so that a signature could cover two meanings.

    Raises:
        BundleError: it is no JSON, is not canonical, or a key is unknown, missing or ill-typed.
    """
    raw = decode_json(data, source)
    malformed = BundleError(f"'{source}' is malformed", hint="build the bundle again")
    with reraised((msgspec.ValidationError, RecursionError), malformed, quote=True):
        value = msgspec.convert(raw, ready_type(kind))
    if encode_json(raw) != data:
        words = f"'{source}' was altered: it is not formatted as edgekit writes it"
        raise BundleError(words, hint="build the bundle again")
    return value


SCHEMA_FILE = Path(__file__).parent / "manifest.schema.json"
"""The published JSON Schema of a manifest."""


def render_schema() -> bytes:
    """Returns the text of the JSON Schema of a manifest."""
    title = "edgekit bundle manifest, schema version 2"
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return encode_json({"$schema": dialect, "title": title, **clean_schema(msgspec.json.schema(Manifest))})
