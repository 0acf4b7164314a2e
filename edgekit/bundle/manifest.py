"""The manifest of a bundle: what is in it, how an app must open it, and where it came from."""

from typing import Literal

import msgspec

from edgekit.errors import BundleError
from edgekit.target import Form, Precision, Thresholds, Verification
from edgekit.tensors import TensorSpec

MAX_MANIFEST_BYTES = 16 << 20


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class BundledFile(_Strict, frozen=True, kw_only=True):
    """Digest and size of a file in the bundle."""

    sha256: str
    size_bytes: int


class GoldenFacts(_Strict, frozen=True, kw_only=True):
    """How many golden samples there are, and whether each has a label."""

    samples: int
    has_labels: bool


class Ancestry(_Strict, frozen=True, kw_only=True):
    """The sha256 of everything that the bundle was made from; `quantized` is None for a float model.

    `data` is the digest of the calibration samples' content, None where none were used.
    """

    source: str
    prepared: str
    quantized: str | None
    data: str | None


class Placement(_Strict, frozen=True, kw_only=True):
    """How many nodes the provider is expected to take, in how many pieces, and their share of the work."""

    nodes: int
    taken: int
    partitions: int
    taken_macs: float


class Manifest(_Strict, frozen=True, kw_only=True):
    """Everything an app or a device needs to know, without times, paths or host names.

    `forms` names the files of each form of the model, the one to load first; `form` is the one an app should load.
    `inputs` and `outputs` have the shapes of one sample. `files` covers every file of the bundle but the manifest
    itself and `verify.json`.
    """

    schema_version: Literal[1] = 1
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
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    golden: GoldenFacts
    placement: Placement
    thresholds: Thresholds
    verification: tuple[Verification, ...]
    ancestry: Ancestry
    versions: dict[str, str]
    source_size_bytes: int
    model_size_bytes: int

    @property
    def model_file(self) -> str:
        """The file that an app should load."""
        return self.forms[self.form][0]


def encode_json(value: object) -> bytes:
    """Returns canonical JSON: sorted keys, two spaces, a newline at the end; the same value gives the same bytes."""
    return msgspec.json.format(msgspec.json.encode(value, order="sorted"), indent=2) + b"\n"


def decode_manifest(data: bytes, source: str) -> Manifest:
    """Returns a manifest, read strictly: an unknown, missing or ill-typed key is an error that names it.

    Raises:
        BundleError: the manifest is malformed, of another schema version, or contradicts itself.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise BundleError(f"'{source}' is larger than {MAX_MANIFEST_BYTES} bytes", hint="this is no edgekit manifest")
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BundleError(f"'{source}' is malformed: {error}", hint="build the bundle again") from error
    for form in (manifest.form, *manifest.forms):
        if not manifest.forms.get(form):
            raise BundleError(f"'{source}' names no file for form '{form}'", hint="build the bundle again")
    for name in (name for names in manifest.forms.values() for name in names):
        if name not in manifest.files:
            raise BundleError(f"'{source}' does not list the model file {name[:200]!r}", hint="build the bundle again")
    return manifest
