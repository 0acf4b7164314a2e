"""The manifest of a bundle: what is in it, how an app must open it, and where it came from."""

from typing import Any, Literal, TypeVar

import msgspec

from edgekit.bundle.manifest.buckets import Buckets
from edgekit.bundle.manifest.buckets import find_fault as find_bucket_fault
from edgekit.bundle.manifest.migrate import migrate_manifest
from edgekit.bundle.manifest.open_dims import find_fault as find_open_fault
from edgekit.bundle.manifest.tuned import TunedSession
from edgekit.data.images import Preprocess
from edgekit.errors import BundleError, quote_error
from edgekit.model.listed import ListColumns
from edgekit.model.state import State, find_fault
from edgekit.model.tensors import TensorSpec
from edgekit.recipe import Licence
from edgekit.target import ChainedProvider, Form, Platform, Precision, Thresholds, Verification

UNPADDED = "golden/unpadded.npz"
"""What the float model makes of the golden samples as long as they were, in a bundle with buckets."""

# An upper bound for what is decoded in memory before anything is known of it.
MAX_MANIFEST_BYTES = 16 << 20


_Value = TypeVar("_Value")


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class BundledFile(_Strict, frozen=True, kw_only=True):
    """Digest and size of a file in the bundle."""

    sha256: str
    size_bytes: int


class BundledTensor(TensorSpec, frozen=True, kw_only=True):
    """An input or output with what an app must know to fill or read it.

    `layout` names the axes ("NCHW"), empty where it is not known. `value_range` are the least and the largest number in
    the golden samples, None for text. `preprocessing` makes an input of what the app has, `postprocessing` says what
    an output means; both come from the recipe or from `--preprocess`.
    """

    layout: str
    value_range: tuple[float, float] | None
    preprocessing: Preprocess | str | None
    postprocessing: str | None

    @property
    def spec(self) -> TensorSpec:
        """Its name, type and shape alone."""
        return TensorSpec(name=self.name, dtype=self.dtype, shape=self.shape)


class ChosenSample(_Strict, frozen=True, kw_only=True):
    """A golden sample of the self-test: its row in the golden files, and why it was chosen."""

    row: int
    reason: Literal["typical", "extreme", "worst-error"]


class GoldenFacts(_Strict, frozen=True, kw_only=True):
    """The golden samples, and the self-test that a device runs on a few of them.

    Row i of `golden/expected.npz` is what the model in the bundle should give for sample `chosen[i]`. A device passes
    if no number of output `name` is further from it than `tolerance[name]`; outputs that are no floating point numbers
    have no tolerance and are not judged. `expected_from` says what computed them.
    """

    samples: int
    has_labels: bool
    chosen: tuple[ChosenSample, ...]
    tolerance: dict[str, float]
    expected_from: str


class Ancestry(_Strict, frozen=True, kw_only=True):
    """The sha256 of everything that the bundle was made from; `quantized` is None for a float model.

    `data` is the digest of the calibration samples' content, None where none were used.
    """

    source: str
    prepared: str
    quantized: str | None
    data: str | None


class ProviderShare(_Strict, frozen=True, kw_only=True):
    """How many nodes a provider is expected to run, and their multiply-accumulates."""

    nodes: int
    macs: int


class Placement(_Strict, frozen=True, kw_only=True):
    """How many nodes the provider is expected to take, in how many pieces, and their share of the work: a prediction.

    What a device's provider took stands in `verify.json` (`placed`): the manifest is made before a device runs, and its
    digest must not depend on which devices were at hand.

    `providers` says the same by provider, the CPU included. `node_list` is the sha256 of `check.json`, which lists the
    nodes one by one.
    """

    nodes: int
    taken: int
    partitions: int
    taken_macs: float
    providers: dict[str, ProviderShare]
    node_list: str


class Tested(_Strict, frozen=True, kw_only=True):
    """What the bundle was made with: ONNX Runtime, and Qualcomm's QAIRT and SoCs where a context was compiled."""

    onnxruntime: str
    qairt: str | None
    socs: tuple[str, ...]


class Provenance(_Strict, frozen=True, kw_only=True):
    """How to make it again: the command without paths, and the recipe with every default written out."""

    command: str
    recipe: dict[str, Any]


class Manifest(_Strict, frozen=True, kw_only=True):
    """Everything an app or a device needs to know, without times, paths or host names.

    `forms` names the files of each form of the model, the one to load first; `form` is the one an app should load.
    `inputs` and `outputs` have the shapes of one sample; dimensions of inputs that an app may choose have a name or
    null there, and `open_dims` the sizes that golden samples have of them. `files` covers every file of the bundle but
    the manifest itself, its signature, and the `evidence` (accuracy and latency as they were measured, with device and
    environment), which differs from run to run. `platforms` says per operating system what an app needs and passes.
    `fallback` are the targets, or "cpu", to try next where this one cannot run. `canonical_form` is the version of
    edgekit's layout of ORT-format files, None without such a file. `state` says which outputs an app passes as inputs
    of the next step, and how many golden samples make a sequence; a model without state has none. `buckets`
    are sizes of one dimension, with a model for each: the files of all of them stand under the form. `tuned` are
    settings that were found to be better on some machines: the first whose class is that of the machine counts.
    `listed` says where outputs list detections, whose rows have no place of their own, and `numbers` names vectors that
    hold numbers, such as an embedding, so that their largest entry is no class. `chain` holds the providers that
    a session is given between `provider` and the CPU, in this order, each with its options.
    """

    # A version to come is refused, not guessed at: what it adds may change what the rest means.
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
    # Not written where there is none: bundles keep the bytes that they had before.
    state: State | msgspec.UnsetType = msgspec.UNSET
    buckets: Buckets | msgspec.UnsetType = msgspec.UNSET
    tuned: tuple[TunedSession, ...] | msgspec.UnsetType = msgspec.UNSET
    open_dims: dict[str, tuple[int, ...]] | msgspec.UnsetType = msgspec.UNSET
    listed: ListColumns | msgspec.UnsetType = msgspec.UNSET
    chain: tuple[ChainedProvider, ...] | msgspec.UnsetType = msgspec.UNSET
    numbers: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET

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
    # Indented, so that a diff of two bundles is read line by line; numbers are the shortest that read back the same.
    return msgspec.json.format(msgspec.json.encode(value, order="sorted"), indent=2) + b"\n"


def decode_manifest(data: bytes, source: str) -> Manifest:
    """Returns a manifest, read strictly: an unknown, missing or ill-typed key is an error that names it.

    A manifest of an older schema version becomes one of today. The bytes must be those that edgekit writes: another
    order, a key that comes twice or other white space is an alteration, because readers would not agree on it.

    Raises:
        BundleError: the manifest is malformed, not canonical, of an unknown schema version, or contradicts itself.
    """
    raw = decode_plain(data, source)
    manifest = convert_strictly(migrate_manifest(raw), Manifest, source)
    # Readers disagree on keys that come twice (RFC 8259, 4): the signature would cover two meanings.
    check_canonical(raw, data, source)
    for form in (manifest.form, *manifest.forms):
        if not manifest.forms.get(form):
            raise BundleError(f"'{source}' names no file for form '{form}'", hint="build the bundle again")
    for name in (name for names in manifest.forms.values() for name in names):
        if name not in manifest.files:
            raise BundleError(f"'{source}' does not list the model file {name[:200]!r}", hint="build the bundle again")
    _check_state(manifest, source)
    _check_buckets(manifest, source)
    _check_open_dims(manifest, source)
    return manifest


def _check_state(manifest: Manifest, source: str) -> None:
    if not manifest.state:
        return
    fault = find_fault(manifest.state, manifest.inputs, manifest.outputs)
    if fault is None and manifest.golden.samples % manifest.steps:
        fault = f"has {manifest.steps} steps, and {manifest.golden.samples} golden samples make no whole sequences", ""
    if fault is not None:
        raise BundleError(f"the state in '{source}' {fault[0]}", hint="build the bundle again")


def _check_buckets(manifest: Manifest, source: str) -> None:
    if not manifest.buckets:
        return
    files, samples = manifest.forms[manifest.form], manifest.golden.samples
    fault = find_bucket_fault(manifest.buckets, files, manifest.inputs, manifest.outputs, samples)
    if fault is None and manifest.steps > 1:
        fault = "are of a model with state, whose steps they cannot run"
    if fault is None and UNPADDED not in manifest.files:
        fault = f"lack '{UNPADDED}'"
    if fault is not None:
        raise BundleError(f"the buckets in '{source}' {fault}", hint="build the bundle again")


def _check_open_dims(manifest: Manifest, source: str) -> None:
    if manifest.open_dims is msgspec.UNSET:
        return
    fault = find_open_fault(manifest.open_dims, manifest.inputs, manifest.golden.samples)
    if fault is None and manifest.buckets:
        fault = "stand beside buckets"
    if fault is not None:
        raise BundleError(f"the open dimensions in '{source}' {fault}", hint="build the bundle again")


def decode_plain(data: bytes, source: str) -> Any:
    """Returns JSON of at most 16 MiB as plain data.

    Raises:
        BundleError: it is too large, too deep, or no JSON.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise BundleError(f"'{source}' is larger than {MAX_MANIFEST_BYTES} bytes", hint="edgekit did not write it")
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise BundleError(f"'{source}' is malformed: {quote_error(error)}", hint="build the bundle again") from error


def check_canonical(raw: Any, data: bytes, source: str) -> None:
    """Refuses JSON that is not to the byte what `encode_json` makes of its content.

    Raises:
        BundleError: it is another spelling of the same content.
    """
    if encode_json(raw) != data:
        raise BundleError(
            f"'{source}' was altered: it is not spelt as edgekit writes it", hint="build the bundle again"
        )


def convert_strictly(raw: Any, kind: type[_Value], source: str) -> _Value:
    """Returns plain data as a value of a kind.

    Raises:
        BundleError: a key is unknown, missing or ill-typed.
    """
    try:
        return msgspec.convert(raw, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise BundleError(f"'{source}' is malformed: {quote_error(error)}", hint="build the bundle again") from error
