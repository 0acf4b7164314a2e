"""The files of each kind of package: for Android, Swift, boards, React Native, and ONNX Runtime's model package.

The loaders in C++, Java and Swift are compiled together with a table of the bundles, which is generated as source code.
For an Android archive this module also checks what Google Play checks of native libraries.
"""

import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from edgekit._files import digest_bytes
from edgekit._proc import run_process
from edgekit.app_runtime import AppRuntime, NativeLibrary
from edgekit.bundle import edgekit_pipeline, snippets
from edgekit.bundle.archive import list_files, write_archive
from edgekit.bundle.manifest import Manifest, encode_json
from edgekit.errors import MissingExtraError, UsageError
from edgekit.model.external import skim_model
from edgekit.package.variant import Identity, Part, Variant, Workplace, find_minimum_ort, list_entries
from edgekit.serialize import fill
from edgekit.target import read_version

PAGE_BYTES = 16 << 10
"""The page size to which 64-bit libraries must be aligned, which Google Play requires since November 2025."""

_64_BIT_ABI = {"armeabi-v7a": "arm64-v8a", "x86": "x86_64"}
"""The 32-bit ABIs, each with the 64-bit ABI that Google Play requires beside it."""


class StoreReport(msgspec.Struct, frozen=True, kw_only=True):
    """What Google Play checks of the native libraries that a package adds to an app.

    `archive` is the AAR of ONNX Runtime, of version `version`, on which the package depends; the bundles need
    `minimum_ort` or newer. `unseen` are dependencies whose libraries are not on this machine and were not checked.
    """

    archive: str
    archive_sha256: str
    version: str
    minimum_ort: str
    libraries: tuple[NativeLibrary, ...]
    unseen: tuple[str, ...]

    @property
    def abis(self) -> tuple[str, ...]:
        """The ABIs that the archive has libraries for, sorted."""
        return tuple(sorted({library.abi for library in self.libraries}))

    @property
    def complaints(self) -> tuple[str, ...]:
        """What Google Play refuses, one line each (developer.android.com: page sizes, 64-bit architectures)."""
        lines: list[str] = []
        for library in self.libraries:
            if library.abi not in _64_BIT_ABI and library.alignment % PAGE_BYTES:
                place = f"'jni/{library.abi}/{library.name}' of '{self.archive}'"
                lines.append(f"{place} is aligned to {library.alignment} bytes and not to 16 KB")
        pairs = ((abi, _64_BIT_ABI[abi]) for abi in self.abis if abi in _64_BIT_ABI)
        unmatched = [(abi, wide) for abi, wide in pairs if wide not in self.abis]
        lines += [f"'{self.archive}' has libraries for {abi} and none for {wide}" for abi, wide in unmatched]
        return tuple(lines)

    @property
    def remarks(self) -> tuple[str, ...]:
        """Lines about the check for the user."""
        aligned = f"all {len(self.libraries)} libraries are aligned to 16 KB, for {', '.join(self.abis)}"
        return (
            f"ONNX Runtime {self.version} of '{self.archive}'; the bundles need {self.minimum_ort} or newer",
            *(f"Google Play refuses: {complaint}" for complaint in self.complaints),
            *(() if self.complaints else (f"Google Play: {aligned}",)),
            *(f"not checked, because it is not on this machine: {name}" for name in self.unseen),
        )

    @property
    def passed(self) -> bool:
        """True if Google Play refuses nothing."""
        return not self.complaints


_HERE = Path(__file__).parent
_STANDALONE = _HERE / "standalone"


def render_table(template: str, parts: Sequence[Part], **values: object) -> bytes:
    """Returns a template of `templates/`, rendered with the bundles and `values`.

    The filters `cpp`, `java`, `kotlin` and `swift` write a string literal of that language.
    """
    environment = snippets.make_environment(_HERE / "templates")
    environment.filters["java"] = quote_java
    return environment.get_template(template).render(variants=[part.variant for part in parts], **values).encode()


def quote_java(text: str) -> str:
    """Returns a Java string literal. Control characters are octal: javac decodes Unicode escapes before it parses."""
    # Three octal digits reach up to \377.
    octal = {one: f"\\{ord(one):03o}" for one in text if ord(one) < 256} | {'"': '\\"', "\\": "\\\\"}
    return snippets.quote(text, lambda one: octal.get(one) or snippets.spell_utf16(one))


_JAVA = _STANDALONE / "java"
_LOADER_PACKAGE = b"package edgekit.loader;"
# The lowest API level on which Microsoft's onnxruntime-android runs.
_MIN_ANDROID_API = 24


def collect_aar(parts: Sequence[Part], identity: Identity, workplace: Workplace) -> Mapping[str, Path | bytes]:
    """Returns the files of a Maven repository with one artifact: the archive, its POM, the loader's source.

    The loader's classes get a Java package named after the artifact, so that an app can contain two such archives. They
    are compiled against the classes of the app's ONNX Runtime, and against edgekit's own declarations of the five
    methods of Android that they call, because it cannot download the Android SDK.

    Raises:
        MissingExtraError: there is no Java compiler.
        UsageError: the archive of ONNX Runtime has no classes, or the loader cannot be compiled against them.
    """
    work, runtime = workplace.folder, require_runtime(workplace.runtime)
    package = f"{identity.group}.{re.sub('[^a-z0-9_]', '_', identity.name.lower())}"
    levels = [part.bundle.manifest.settings.get("api_level", "") for part in parts]
    values = {
        "identity": identity,
        "package": package,
        "minimum_api": max([_MIN_ANDROID_API, *(int(level) for level in levels if level.isdigit())]),
        "dependencies": _merge_dependencies(parts, runtime),
        "store": report_store(parts, runtime),
    }
    folder = package.replace(".", "/")
    sources = {
        f"{folder}/{name}": path.read_bytes().replace(_LOADER_PACKAGE, f"package {package};".encode(), 1)
        for name, path in list_files(_JAVA / "loader").items()
    }
    sources[f"{folder}/Bundles.java"] = render_table("Bundles.java.j2", parts, **values)
    write_archive(_compile(sources, runtime, work), work / "classes.jar", "zip")
    write_archive(sources, work / "sources.jar", "zip")
    contents = {
        **list_entries(parts, f"assets/{package}"),
        "AndroidManifest.xml": render_table("AndroidManifest.xml.j2", parts, **values),
        "META-INF/com/android/build/gradle/aar-metadata.properties": b"aarFormatVersion=1.0\naarMetadataVersion=1.0\n",
        # Required by the archive's format, but empty because there are no resources.
        "R.txt": b"",
        "classes.jar": work / "classes.jar",
        # ONNX Runtime's native code looks classes up by name, and R8 would rename or remove them.
        "proguard.txt": b"-keep class ai.onnxruntime.** { *; }\n",
    }
    write_archive(contents, work / "library.aar", "zip")
    place = f"{identity.group.replace('.', '/')}/{identity.name}/{identity.version}/{identity.name}-{identity.version}"
    return {
        f"{place}.aar": work / "library.aar",
        f"{place}.pom": render_table("pom.xml.j2", parts, **values),
        f"{place}-sources.jar": work / "sources.jar",
        "README.md": render_table("aar.md.j2", parts, **values),
    }


def _compile(sources: Mapping[str, bytes], runtime: AppRuntime, work: Path) -> Mapping[str, Path]:
    """Compiles for Java 8, which every Android build takes, and returns the class files."""
    home = os.environ.get("JAVA_HOME", "")
    javac = (shutil.which(str(Path(home) / "bin" / "javac")) if home else None) or shutil.which("javac")
    if javac is None:
        words = "an AAR holds compiled Java, and there is no javac here"
        raise MissingExtraError(words, hint="apt-get install openjdk-17-jdk-headless")
    for name, source in sources.items():
        source_file = work / "java" / name
        source_file.parent.mkdir(parents=True, exist_ok=True)
        source_file.write_bytes(source)
    (work / "classes").mkdir()
    # The optimizing compiler costs more than it saves here.
    argv = [javac, "-J-XX:TieredStopAtLevel=1", "-J-XX:+UseSerialGC", "--release", "8", "-Xlint:-options"]
    argv += ["-encoding", "UTF-8", "-proc:none", "-implicit:none"]
    argv += ["-classpath", str(runtime.classes), "-sourcepath", str(_JAVA / "platform")]
    argv += ["-d", str(work / "classes")]
    result = run_process([*argv, *(str(work / "java" / name) for name in sorted(sources))], timeout_s=300)
    if not result.succeeded:
        errors = (line.partition("error: ")[2] for line in result.stderr.splitlines() if "error: " in line)
        words = f"the loader does not fit the classes of '{runtime.archive}', ONNX Runtime {runtime.version}"
        hint = "edgekit devices install android --library FILE.aar, of another version"
        raise UsageError(f"{words}: {next(errors, result.stderr[-300:])}", hint=hint)
    return list_files(work / "classes")


def require_runtime(runtime: AppRuntime | None) -> AppRuntime:
    """Returns `runtime`, against whose classes a loader in Java can be compiled.

    Raises:
        UsageError: it is None, or has no `classes.jar`.
    """
    problem = "a package of kind aar is compiled against ONNX Runtime's own classes, which are not here"
    if runtime is not None and runtime.classes.is_file():
        return runtime
    if runtime is not None:
        problem = f"'{runtime.archive}' holds no classes.jar to compile the loader against"
    raise UsageError(problem, hint="edgekit devices install android")


def report_store(parts: Sequence[Part], runtime: AppRuntime) -> StoreReport:
    """Returns what Google Play checks of an app with these bundles and this ONNX Runtime."""
    # ONNX Runtime itself comes first.
    unseen = tuple(dependency.notation for dependency in _merge_dependencies(parts, runtime)[1:])
    facts = {"archive_sha256": runtime.sha256, "minimum_ort": find_minimum_ort(parts), "unseen": unseen}
    return fill(StoreReport, runtime, **facts)


def _merge_dependencies(parts: Sequence[Part], runtime: AppRuntime) -> list[snippets.Dependency]:
    """Returns all dependencies: the archive's ONNX Runtime, and others in the newest version that a bundle needs."""
    merged: dict[str, snippets.Dependency] = {}
    for one in (part.variant for part in parts):
        for needed in snippets.list_android_dependencies(one.provider, one.versions, runtime.version):
            # Gradle also takes the newest of several versions.
            newest = merged.get(needed.artifact, needed)
            merged[needed.artifact] = max(newest, needed, key=lambda each: read_version(each.version))
    return list(merged.values())


# iOS 15 has Core ML 5; a target's settings can require a newer version.
_MIN_IOS = "15"


def collect_swiftpm(parts: Sequence[Part], identity: Identity, _work: Workplace) -> Mapping[str, Path | bytes]:
    """Returns the files of a Swift package: `Package.swift`, sources, and the bundles under `Resources/`."""
    module = "".join(word[:1].upper() + word[1:] for word in re.split(r"[^A-Za-z0-9]+", identity.name))
    versions = [part.bundle.manifest.settings.get("ios", _MIN_IOS) for part in parts]
    values = {
        "identity": identity,
        "module": module,
        # A package has one deployment target: the highest that any of its bundles needs.
        "minimum_ios": max(versions, key=lambda text: int(text) if text.isdigit() else 0) + ".0",
        "minimum_ort": find_minimum_ort(parts),
        "swift_package": snippets.SWIFT_PACKAGE,
    }
    sources = f"Sources/{module}"
    return {
        **list_entries(parts, f"{sources}/Resources"),
        **{f"{sources}/{name}": path for name, path in list_files(_STANDALONE / "swift").items()},
        f"{sources}/Bundles.swift": render_table("Bundles.swift.j2", parts, **values),
        "Package.swift": render_table("Package.swift.j2", parts, **values),
        "README.md": render_table("swift.md.j2", parts, **values),
    }


BUNDLES = "bundles"
GROUP_PROGRAMS = (
    _STANDALONE / "group" / "edgekit_group.py",
    _STANDALONE / "python" / "edgekit_loader.py",
    Path(edgekit_pipeline.__file__),
)
"""The Python files that run a group of models: a program, and the loader and the pipeline that it imports."""


def collect_board(parts: Sequence[Part], identity: Identity, _work: Workplace) -> Mapping[str, Path | bytes]:
    """Returns the files of a package for a Linux board: `bundles/`, `cpp/`, `python/` and a README."""
    found = {folder: list_files(_STANDALONE / folder) for folder in ("cpp", "python")}
    named = ((f"{folder}/{name}", path) for folder, files in found.items() for name, path in files.items())
    programs = {name: path for name, path in named if "__pycache__" not in name}
    return {
        **list_entries(parts, BUNDLES),
        **programs,
        "cpp/edgekit_bundles.h": render_table("edgekit_bundles.h.j2", parts),
        "python/edgekit_bundles.json": encode_json([msgspec.to_builtins(part.variant) for part in parts]),
        "README.md": render_table("board.md.j2", parts, identity=identity),
    }


_COMPATIBILITY = "ep_compatibility_info."


def collect_ort_package(parts: Sequence[Part], identity: Identity, _work: Workplace) -> Mapping[str, Path | bytes]:
    """Returns the files of a model package: `manifest.json`, `<name>/component.json`, and a folder for each variant.

    A file that several bundles contain, such as the golden inputs, is stored once in `shared_assets/sha256-<hex>/`. The
    name, the sha256 and the place of each file of a bundle are in the variant's `additional_metadata`.
    """
    # By name and digest, because a shared file keeps the name that loaders look for. Shared are golden files, and
    # models of a single file: one with external weights refers to them by path, and cannot move alone.
    counts = Counter[tuple[str, str]]()
    for part in parts:
        movable = {names[0] for names in part.bundle.manifest.forms.values() if len(names) == 1}
        files = ((name, file.sha256) for name, file in part.variant.files.items())
        counts.update(key for key in files if key[0] in movable or key[0].startswith("golden/"))
    entries, described = list_entries(parts, identity.name), dict[str, object]()
    for part in parts:
        variant, places = part.variant, {name: name for name in part.files}
        for name, file in variant.files.items():
            if counts[name, file.sha256] > 1:
                # The digest of a folder with one file, as ONNX Runtime computes it.
                asset, file_name = digest_bytes(f"{file.sha256}  {Path(name).name}\n".encode()), Path(name).name
                places[name] = f"sha256:{asset}/{file_name}"
                source = entries.pop(f"{identity.name}/{variant.name}/{name}")
                entries[f"shared_assets/sha256-{asset}/{file_name}"] = source
        described[variant.name] = _describe(part, places)
    entries[f"{identity.name}/component.json"] = encode_json({"component_name": identity.name, "variants": described})
    entries["manifest.json"] = encode_json(
        {
            "schema_version": "1.0",
            "package_name": identity.name,
            "package_version": identity.version,
            # All files are in the folder, with relative paths.
            "layout": "portable",
            "components": {identity.name: identity.name},
            "additional_metadata": {"producer": "edgekit"},
        }
    )
    return entries


def _describe(part: Part, places: Mapping[str, str]) -> dict[str, object]:
    variant = part.variant
    info: dict[str, object] = {"model_file": places[variant.model], "session_options": variant.session_config}
    if variant.provider_options:
        info["provider_options"] = variant.provider_options
    described: dict[str, object] = {
        "variant_directory": variant.name,
        "ep": variant.provider,
        "executor_info": {"ort": info},
        "additional_metadata": {
            "minimum_ort": variant.minimum_ort,
            "precision": variant.precision,
            "target": variant.target,
            "files": {
                name: {"path": places[name], "sha256": file.sha256, "size_bytes": file.size_bytes}
                for name, file in variant.files.items()
            },
        },
    }
    # A compiled model states in its metadata for which devices it was compiled.
    model = part.bundle.folder / variant.model
    properties = skim_model(model).metadata_props if model.suffix == ".onnx" else ()
    compatibility = next((each.value for each in properties if each.key == f"{_COMPATIBILITY}{variant.provider}"), "")
    return {**described, "compatibility_string": compatibility} if compatibility else described


# React Native's plug-in supports less than ONNX Runtime's other bindings: no session config, and only a few flags of
# providers. A bundle that needs more is refused when it is packed, not only later on a phone.

PLUGIN = "1.24.3"
"""The newest `onnxruntime-react-native`; its `cpp/SessionUtils.cpp` shows which options it takes."""

_PLUGIN_NAMES = {
    "CPUExecutionProvider": "cpu", "CoreMLExecutionProvider": "coreml", "NnapiExecutionProvider": "nnapi",
    "XnnpackExecutionProvider": "xnnpack",
}  # fmt: skip
_SYSTEMS = {"CoreMLExecutionProvider": ("ios",), "NnapiExecutionProvider": ("android",)}
_NNAPI_KEYS = {
    "NNAPI_FLAG_CPU_DISABLED": "cpuDisabled", "NNAPI_FLAG_CPU_ONLY": "cpuOnly", "NNAPI_FLAG_USE_FP16": "useFP16",
    "NNAPI_FLAG_USE_NCHW": "useNCHW",
}  # fmt: skip
# COREMLFlags of coreml_provider_factory.h: the plug-in takes their sum, and none of the newer options by name.
_COREML_FLAGS = {
    "EnableOnSubgraphs=0": 0, "EnableOnSubgraphs=1": 2, "MLComputeUnits=ALL": 0, "MLComputeUnits=CPUAndGPU": 32,
    "MLComputeUnits=CPUAndNeuralEngine": 4, "MLComputeUnits=CPUOnly": 1, "ModelFormat=MLProgram": 16,
    "ModelFormat=NeuralNetwork": 0, "RequireStaticInputShapes=0": 0, "RequireStaticInputShapes=1": 8,
}  # fmt: skip
_THREADS = "intra_op_num_threads"
_HARMLESS = {
    "session.intra_op.allow_spinning=0": "waiting threads spin, which costs time and changes no result",
    "session.qdqisint8allowed=1": "it is the default on Arm; only an x86-64 emulator computes otherwise",
}
"""Entries of a session's config that may be omitted: they are the default on a phone, or change no result."""

_DTYPES = frozenset({"bool", "float32", "float64", "int16", "int32", "int64", "int8", "uint16", "uint8"})


def find_unsupported(manifest: Manifest) -> str | None:
    """Returns why the plug-in cannot run a bundle as its manifest says, or None if it can."""
    known = {
        "CoreMLExecutionProvider": _COREML_FLAGS.keys(),
        "NnapiExecutionProvider": {f"{name}=1" for name in _NNAPI_KEYS},
        "XnnpackExecutionProvider": {pair for pair in _pairs(manifest.provider_options) if pair.startswith(_THREADS)},
    }
    unsupported = sorted(
        ({*_pairs(manifest.session_config)} - _HARMLESS.keys())
        | ({*_pairs(manifest.provider_options)} - {*known.get(manifest.provider, ())})
    )
    unusual_types = sorted({spec.dtype for spec in (*manifest.inputs, *manifest.outputs)} - _DTYPES)
    if unsupported:
        return f"onnxruntime-react-native {PLUGIN} has no option '{unsupported[0]}'"
    if unusual_types:
        return f"onnxruntime-react-native's tensors of {unusual_types[0]} are not those of every JavaScript engine"
    if manifest.buckets:
        return "the loader for React Native cannot choose among several sizes"
    return None


def list_remarks(parts: Sequence[Part]) -> Iterator[str]:
    """Yields where the plug-in differs from the manifests, and which ONNX Runtime the app must link."""
    for entry in sorted({entry for part in parts for entry in _pairs(part.variant.session_config)}):
        yield f"onnxruntime-react-native {PLUGIN} has no option '{entry}': {_HARMLESS[entry]}"
    minimum_ort = find_minimum_ort(parts)
    if read_version(minimum_ort) > read_version(PLUGIN):
        pin = f"the README pins {snippets.choose_android_release(minimum_ort)} for Gradle and CocoaPods"
        yield f"the bundles need ONNX Runtime {minimum_ort}, and the plug-in's newest release is {PLUGIN}: {pin}"


def _pairs(entries: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(f"{key}={value}" for key, value in entries.items())


def collect_npm(parts: Sequence[Part], identity: Identity, _work: Workplace) -> Mapping[str, Path | bytes]:
    """Returns the files of an npm package: TypeScript under `src/`, the bundles under `assets/NAME/`, a podspec."""
    minimum_ort = find_minimum_ort(parts)
    identity = msgspec.structs.replace(identity, name=identity.name.lower())  # npm takes no capitals
    values = {
        "identity": identity,
        "plugin": PLUGIN,
        "minimum_ort": minimum_ort,
        "release": snippets.choose_android_release(minimum_ort),
        "remarks": list(list_remarks(parts)),
    }
    # JSON is valid TypeScript; `variant.ts` has the types.
    table = encode_json([_describe_for_plugin(part.variant) for part in parts]).decode().strip()
    return {
        **list_entries(parts, f"assets/{identity.name}"),
        **list_files(_STANDALONE / "react_native"),
        "src/bundles.ts": render_table("bundles.ts.j2", parts, table=table, **values),
        "package.json": render_table("package.json.j2", parts, **values),
        f"{identity.name}.podspec": render_table("podspec.j2", parts, **values),
        "README.md": render_table("react_native.md.j2", parts, **values),
    }


_UNUSED = ("buckets", "chain", "provider_options", "session_config", "tuned", "versions")


def _describe_for_plugin(variant: Variant) -> dict[str, object]:
    """Returns what the loader reads of a bundle, with the session options in the plug-in's form."""
    options = variant.provider_options
    provider: dict[str, object] = {"name": _PLUGIN_NAMES[variant.provider]}
    if variant.provider == "NnapiExecutionProvider":
        provider |= {_NNAPI_KEYS[key]: True for key in options}
    if variant.provider == "CoreMLExecutionProvider":
        provider["coreMlFlags"] = sum(_COREML_FLAGS[pair] for pair in _pairs(options))
    # One provider is enough: the plug-in skips a provider that the system lacks, and the CPU takes remaining nodes.
    session: dict[str, object] = {"executionProviders": [provider]}
    if _THREADS in options:
        session["intraOpNumThreads"] = int(options[_THREADS])
    described: dict[str, object] = msgspec.to_builtins(variant)
    kept = {key: value for key, value in described.items() if key not in _UNUSED}
    return {**kept, "systems": _SYSTEMS.get(variant.provider, ()), "session": session}
