"""The part of a bundle that goes into a package (`Part`): its files, and the facts that loaders need (`Variant`)."""

import posixpath
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import numpy as np

from edgekit._files import digest_bytes, digest_file
from edgekit._ort import Level
from edgekit.app_runtime import AppRuntime
from edgekit.bundle.checks import read_bounded
from edgekit.bundle.expected import EXPECTED
from edgekit.bundle.folder import GOLDEN, MANIFEST, Bundle
from edgekit.bundle.golden import INPUTS, OUTPUTS, read_inputs, write_rows
from edgekit.bundle.manifest import Bucket, Buckets, BundledFile, MachineClass, Manifest, list_open
from edgekit.bundle.multi import PREFERENCE
from edgekit.bundle.sign import SIGNATURE
from edgekit.data.npz import read_rows
from edgekit.data.samples import select_samples
from edgekit.errors import BundleError, UsageError, require_known
from edgekit.model.model import load_model
from edgekit.model.tensors import TensorSpec, shape_matches
from edgekit.serialize import fill, ready_type
from edgekit.target import ChainedProvider, Form, read_version

Extra = Literal["all", "forms", "golden", "onnx"]
EXTRAS: tuple[Extra, ...] = get_args(Extra)
"""What a package can contain in addition: all files, every form of the model, all golden samples, the ONNX form."""


def parse_extras(given: Iterable[str]) -> tuple[Extra, ...]:
    """Returns the extras named in comma-separated lists, each once, sorted.

    Raises:
        UsageError: an extra does not exist.
    """
    words = sorted({word.strip() for text in given for word in text.split(",")})
    for word in words:
        require_known(word, EXTRAS, f"--with '{word}': a package cannot carry that")
    return tuple(extra for extra in EXTRAS if extra in words)


# GraphOptimizationLevel of onnxruntime_c_api.h.
_LEVELS = {Level.DISABLED: 0, Level.BASIC: 1, Level.EXTENDED: 2, Level.LAYOUT: 3, Level.ALL: 99}


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of the self-test."""

    min_cosine: float
    min_sqnr_db: float
    min_top1_agreement: float
    granted_samples: int


class Filled(msgspec.Struct, frozen=True, kw_only=True):
    """Axes of a tensor that have the size of a bucket, and the value that pads an input there.

    `element` holds the bytes (-128 to 127) of one padding value, little-endian; it is empty for an output.
    """

    name: str
    axes: tuple[int, ...]
    element: tuple[int, ...] = ()


class VariantBuckets(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a dimension, smallest first, each with its model file; and the axes that have this size."""

    dim: str
    sizes: tuple[Bucket, ...]
    inputs: tuple[Filled, ...]
    outputs: tuple[Filled, ...]


class Tuned(MachineClass, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Session options for one class of machines, found by `edgekit tune`: a `SessionSetting` as loaders read it.

    `level` is the value of `GraphOptimizationLevel`. `provider_options` and `session_config` are complete: those of the
    bundle, changed by the setting.
    """

    level: int
    threads: int
    inter_threads: int
    parallel: bool
    arena: bool
    memory_pattern: bool
    provider_options: dict[str, str]
    session_config: dict[str, str]


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """A bundle as the loaders see it; `files` are those that the package contains, the manifest too, sorted by name.

    `name` is that of its folder in the package: ASCII letters, digits, `.`, `_` and `-`. Paths in `files` are relative
    to it, and may lead to a folder beside it (`../`). `golden` is the folder of `inputs.npz`. `reference` names the
    outputs that the thresholds compare with: "outputs", those of the float model for every row, or "expected", those
    of this bundle for the rows `chosen`, in `golden/expected.npz`. In either case the outputs of these rows must equal
    `golden/expected.npz` within `tolerance`. `feeds` names, for each input that holds state, the output of the previous
    step that it comes from. `buckets` are the models of several sizes, of which `model` is the largest; None if there
    is one size. Of `tuned` the first entry that fits the machine is used.
    """

    name: str
    target: str
    precision: str
    provider: str
    provider_options: dict[str, str]
    chain: tuple[ChainedProvider, ...]
    session_config: dict[str, str]
    minimum_ort: str
    model: str
    files: dict[str, BundledFile]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    golden: str
    reference: str
    samples: int
    thresholds: Limits
    chosen: tuple[int, ...]
    tolerance: dict[str, float]
    versions: dict[str, str]
    feeds: dict[str, str] = {}
    buckets: VariantBuckets | None = None
    tuned: tuple[Tuned, ...] = ()


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A bundle of a package: the files that are packed, by their names in the package, and the facts for loaders."""

    bundle: Bundle
    files: dict[str, Path]
    variant: Variant


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The names of a package: `group` and `name` are those of a Maven artifact, `version` its version.

    A name of "" is chosen by edgekit (`identify`).
    """

    group: str = ""
    name: str = ""
    version: str = ""


UNNAMED = Identity()
"""A package whose names edgekit chooses."""


class Workplace(msgspec.Struct, frozen=True, kw_only=True):
    """A folder for intermediate files, and the app's ONNX Runtime if the package is compiled against it."""

    folder: Path
    runtime: AppRuntime | None = None


def identify(bundles: Sequence[Bundle], names: Identity, extras: Collection[str] = ()) -> Identity:
    """Returns the names of a package of these bundles; a missing version is derived from their content.

    Raises:
        UsageError: a name has characters that Maven, Gradle or SwiftPM do not take.
    """
    # Different content, different version: Gradle and SwiftPM cache by version, and would keep serving the old one.
    content_digest = digest_bytes("".join((*(bundle.sha256 for bundle in bundles), *sorted(extras))).encode())[:12]
    identity = Identity(
        group=names.group or "edgekit.models",
        name=names.name or name_package(bundles[0].manifest.name),
        version=names.version or f"1.0.0-{content_digest}",
    )
    for option, value, pattern, example in (
        ("--group", identity.group, r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*", "com.example.models"),
        ("--name", identity.name, r"[A-Za-z][A-Za-z0-9._-]{0,99}", "digits"),
        ("--package-version", identity.version, r"[0-9][A-Za-z0-9.+-]{0,99}", "1.2.0"),
    ):
        if not re.fullmatch(pattern, value):
            raise UsageError(f"{option} '{value}' cannot name a package", hint=f"for example {option} {example}")
    return identity


def make_parts(
    bundles: Sequence[Bundle], extras: Collection[Extra], work: Path, *, platform: str = "", share: bool = True
) -> list[Part]:
    """Returns the part of each bundle that a package contains, in the bundles' order.

    Of the golden samples only those of the self-test are packed. Bundles with the same samples get one common file,
    written below the folder `work`; with `share` the package contains it once. A bundle without a self-test of its own
    keeps all samples. `platform` names the operating system whose provider options are used, "" for the options of
    every system.

    Raises:
        UsageError: there is no bundle, one is given twice, or one cannot be packaged with these extras.
        BundleError: a manifest is not in canonical form, or a golden sample does not have the shape that it states.
    """
    if not bundles:
        raise UsageError("there is no bundle to package", hint="give the folders that hold manifest.json")
    digests = [bundle.sha256 for bundle in bundles]
    names = [clean_name(f"{bundle.manifest.name}-{bundle.manifest.target}") for bundle in bundles]
    rows: dict[str, set[int]] = {}
    for bundle in bundles:
        if digests.count(bundle.sha256) > 1:
            raise UsageError(f"bundle '{bundle.folder}' is given twice", hint="give each bundle once")
        rows.setdefault(_inputs_digest(bundle), set()).update(sample.row for sample in bundle.manifest.golden.chosen)
    parts: list[Part] = []
    for bundle, name in zip(bundles, names, strict=True):
        files, self_test = _select_files(bundle, extras, sorted(rows[_inputs_digest(bundle)]), work, share=share)
        package_name = name if names.count(name) == 1 else f"{name}-{bundle.sha256[:8]}"
        variant = _describe(bundle, files, self_test, package_name, platform)
        parts.append(Part(bundle=bundle, files=files, variant=variant))
    return parts


def _inputs_digest(bundle: Bundle) -> str:
    return bundle.manifest.files[f"{GOLDEN}/{INPUTS}"].sha256


def _select_files(
    bundle: Bundle, extras: Collection[Extra], rows: Sequence[int], work: Path, *, share: bool
) -> tuple[dict[str, Path], dict[str, Any]]:
    """Returns the files of a bundle to pack, by name, and the fields of `Variant` about its self-test."""
    manifest = bundle.manifest
    forms: set[Form] = {manifest.form, *(manifest.forms if "forms" in extras else ())}
    if "onnx" in extras and "onnx" in manifest.forms:
        forms.add("onnx")
    names = {MANIFEST, *(name for form in forms for name in manifest.forms[form])}
    if chosen := [sample.row for sample in manifest.golden.chosen]:
        names.add(f"{GOLDEN}/{EXPECTED}")
    if "all" in extras:
        names |= manifest.files.keys()
    if not chosen or {"all", "golden"} & {*extras}:
        if manifest.open_dims:
            words = f"golden samples of '{bundle.folder}' have several sizes"
            hint = "leave out --with: those of the self-test go along"
            raise UsageError(f"{words}, and a loader's self-test reads rows of one", hint=hint)
        golden = {name: bundle.folder / GOLDEN / name for name in (INPUTS, OUTPUTS)}
        self_test: dict[str, Any] = {"samples": manifest.golden.samples, "reference": "outputs"}
    else:
        # One file for all bundles with the same samples: `chosen` are the rows of this bundle's samples in it.
        golden = {INPUTS: work / f"{_inputs_digest(bundle)}.npz"}
        if not golden[INPUTS].exists():
            write_rows(golden[INPUTS], select_samples(read_inputs(bundle.golden), rows))
        chosen = [rows.index(row) for row in chosen]
        self_test = {"samples": len(rows), "reference": "expected"}
    # The folder is named by content, so that equal files of several bundles are one file of the package.
    is_shared = share and "all" not in extras
    folder = f"../{GOLDEN}-{digest_file(golden[INPUTS])[:12]}" if is_shared else GOLDEN
    files = {name: bundle.folder / name for name in names} | {f"{folder}/{name}": golden[name] for name in golden}
    return dict(sorted(files.items())), {**self_test, "golden": folder, "chosen": tuple(chosen)}


def list_entries(parts: Iterable[Part], prefix: str) -> dict[str, Path | bytes]:
    """Returns the files of bundles and their signatures, by their paths in a package, below `prefix`.

    Raises:
        BundleError: a signature is a link or no regular file.
    """
    entries: dict[str, Path | bytes] = {}
    for part in parts:
        folder = f"{prefix}/{part.variant.name}"
        entries |= {posixpath.normpath(f"{folder}/{name}"): path for name, path in part.files.items()}
        if (part.bundle.folder / SIGNATURE).exists():
            entries[f"{folder}/{SIGNATURE}"] = read_bounded(part.bundle.folder, SIGNATURE)
    return entries


def find_minimum_ort(parts: Iterable[Part]) -> str:
    """Returns the oldest ONNX Runtime that opens each of these bundles."""
    return max((part.variant.minimum_ort for part in parts), key=read_version)


def sort_bundles(bundles: Sequence[Bundle]) -> tuple[Bundle, ...]:
    """Returns bundles in the order in which an app should try them: the NPU first, the CPU last."""
    ranks = {provider: rank for rank, provider in enumerate(PREFERENCE)}
    return tuple(sorted(bundles, key=lambda bundle: (ranks.get(bundle.manifest.provider, -1), bundle.manifest.target)))


def clean_name(text: str) -> str:
    """Returns a name of ASCII letters, digits, `.`, `_` and `-` that begins with a letter or digit."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._") or "model"


def name_package(model: str) -> str:
    """Returns the package name of a model: Maven and Swift require a letter first, so `320n` becomes `model-320n`."""
    name = clean_name(model).lower()[:90]
    return name if name[0].isalpha() else f"model-{name}"


def _fix_shapes(bundle: Bundle) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Returns the inputs and outputs with the shapes that all samples of the loaders' self-test have.

    Outputs whose shape depends on the data are left out, since the self-test compares rows of one shape, and so are the
    parts of maps and sequences, which a session gives under another name.

    Raises:
        UsageError: an input has no fixed shape and there is no self-test, state may grow, or no output can be compared.
        BundleError: a golden sample has another shape than the manifest says.
    """
    manifest, chosen, problem = bundle.manifest, bundle.manifest.golden.chosen, ""
    shapes = {each.name: each.shape for each in (*manifest.inputs, *manifest.outputs) if each.is_static}
    if manifest.open_dims:
        feeds = manifest.state.feeds if manifest.state else {}
        if growing := sorted(name for _, name, _ in list_open(manifest.inputs) if name in feeds):
            problem = f" with open dimensions: its state '{growing[0]}' may grow, and no loader feeds it back"
        elif not chosen:
            problem = " with open dimensions: it has no self-test"
        else:
            inputs = next(iter(select_samples(read_inputs(bundle.golden), [chosen[0].row])))
            sample = {**inputs, **next(read_rows(bundle.folder / GOLDEN / EXPECTED))}
            shapes = {name: value.shape for name, value in sample.items()}
    elif open_one := next((each.name for each in manifest.inputs if each.name not in shapes), ""):
        problem = f": its input '{open_one}' has no fixed shape"
    if problem:
        hint = "build it with the size of every dimension: --dim NAME=INT"
        raise UsageError(f"'{bundle.folder}' cannot be packaged{problem}", hint=hint)
    if "onnx" in manifest.forms:
        tensors = {each.name for each in (*manifest.inputs, *load_model(bundle.find_model("onnx")).outputs)}
        shapes = {name: shape for name, shape in shapes.items() if name in tensors}
    if not (outputs := [each for each in manifest.outputs if each.name in shapes]):
        why = "each of its outputs is a map, or its shape depends on the data, so that a loader could prove nothing"
        hint = "let the model give one output of fixed shape too, such as the number of detections"
        raise UsageError(f"'{bundle.folder}' cannot be packaged: {why}", hint=hint)

    def fix(spec: TensorSpec) -> TensorSpec:
        shape = shapes[spec.name] or ()
        if not shape_matches([dim for dim in shape if isinstance(dim, int)], spec):
            message = f"the self-test of '{bundle.folder}' has another '{spec.name}'"
            raise BundleError(message, hint="build the bundle again")
        return TensorSpec(name=spec.name, dtype=spec.dtype, shape=shape)

    return tuple(map(fix, manifest.inputs)), tuple(map(fix, outputs))


def _describe(bundle: Bundle, paths: Mapping[str, Path], test: Mapping[str, Any], name: str, platform: str) -> Variant:
    manifest, files = bundle.manifest, {name: BundledFile.describe(path) for name, path in paths.items()}
    # Loaders compare the file in the package with the digest compiled into them.
    if files[MANIFEST].sha256 != bundle.sha256:
        raise BundleError(f"'{bundle.folder / MANIFEST}' is not in edgekit's canonical form", hint="build it again")
    has_numbers = any(each.kind in {"values", "embedding"} for each in (manifest.readings or {}).values())
    platform_options = manifest.platforms.get(platform)
    options = platform_options.provider_options if platform_options is not None else manifest.provider_options
    inputs, outputs = _fix_shapes(bundle)
    return fill(
        Variant,
        manifest,
        **test,
        name=name,
        provider_options=dict(sorted(options.items())),
        chain=manifest.chain or (),
        session_config=dict(sorted(manifest.session_config.items())),
        model=manifest.model_file,
        files=files,
        inputs=inputs,
        outputs=outputs,
        thresholds=Limits(
            min_cosine=manifest.thresholds.min_cosine,
            min_sqnr_db=manifest.thresholds.min_sqnr_db,
            # A loader has one limit for all outputs: top-1 agreement is required only if all of them hold classes.
            min_top1_agreement=0.0 if has_numbers else manifest.thresholds.min_top1_agreement,
            # In the few samples of a self-test, two classes with close scores may swap ranks within the tolerance.
            granted_samples=test["samples"] if test["reference"] == "expected" else manifest.thresholds.granted_samples,
        ),
        tolerance=dict(sorted(manifest.golden.tolerance.items())),
        versions=dict(sorted(manifest.versions.items())),
        feeds=dict(sorted(manifest.state.feeds.items())) if manifest.state else {},
        buckets=_describe_buckets(manifest.buckets, manifest.inputs) if manifest.buckets else None,
        tuned=tuple(_list_tuned(manifest, options)),
    )


def _describe_buckets(buckets: Buckets, inputs: Sequence[TensorSpec]) -> VariantBuckets:
    padding, types = buckets.padding, {spec.name: np.dtype(spec.dtype).newbyteorder("<") for spec in inputs}
    elements = {name: np.array([padding.values[name]]).astype(types[name]).view(np.int8) for name in padding.inputs}
    return VariantBuckets(
        dim=padding.dim,
        sizes=buckets.sizes,
        inputs=tuple(
            Filled(name=name, axes=axes, element=tuple(elements[name].tolist()))
            for name, axes in sorted(padding.inputs.items())
        ),
        outputs=tuple(Filled(name=name, axes=axes) for name, axes in sorted(padding.outputs.items())),
    )


def _list_tuned(manifest: Manifest, options: Mapping[str, str]) -> Iterator[Tuned]:
    for one in manifest.tuned or ():
        setting = one.setting
        # A setting found with another model file does not apply to the file in the package.
        if setting.form in {"", manifest.form}:
            facts: dict[str, Any] = {
                **msgspec.structs.asdict(one.machine),
                **msgspec.structs.asdict(setting),
                "level": _LEVELS[setting.level],
                "provider_options": dict(sorted({**options, **setting.provider_options}.items())),
                "session_config": dict(sorted({**manifest.session_config, **setting.config}.items())),
            }
            yield msgspec.convert(facts, ready_type(Tuned))
