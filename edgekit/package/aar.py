"""An Android archive in a Maven repository: the bundles as assets, a Java loader, and what it depends on."""

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from edgekit._proc import run_process
from edgekit.app_runtime import AppRuntime
from edgekit.bundle.archive import list_files, write_archive
from edgekit.bundle.folder import Bundle
from edgekit.bundle.manifest.coordinates import Dependency, list_android_dependencies
from edgekit.errors import MissingExtraError, UsageError
from edgekit.package.store import StoreReport
from edgekit.package.tables import render_table
from edgekit.package.variant import Identity, Part, Variant, Workplace, list_entries
from edgekit.target import read_version

_JAVA = Path(__file__).parent / "far" / "java"
_STAND_IN = b"package edgekit.loader;"
# The API level from which Microsoft's onnxruntime-android runs.
_OLDEST_API = 24


def collect_aar(parts: Sequence[Part], identity: Identity, workplace: Workplace) -> Mapping[str, Path | bytes]:
    """Returns the files of a Maven repository with one artifact: the archive, its POM, the loader's source.

    The loader's classes get a Java package of their own, so that an app can hold two such archives. They are compiled
    against the classes of the app's own ONNX Runtime, and against declarations of the five methods of Android that
    they call, which are in no archive that edgekit could fetch.

    Raises:
        MissingExtraError: there is no Java compiler.
        UsageError: the archive of ONNX Runtime has no classes, or the loader cannot be compiled against them.
    """
    work, runtime = workplace.folder, _require_runtime(workplace)
    variants = [part.variant for part in parts]
    package = f"{identity.group}.{re.sub('[^a-z0-9_]', '_', identity.name.lower())}"
    values = {
        "identity": identity,
        "package": package,
        "assets": package,
        "minimum_api": max([_OLDEST_API, *(_api_level(part.bundle) for part in parts)]),
        "dependencies": _merge_dependencies(variants, runtime),
        "store": report_store(variants, runtime),
    }
    sources = _list_sources(variants, package, values)
    write_archive(_compile(sources, runtime, work), work / "classes.jar", "zip")
    write_archive(sources, work / "sources.jar", "zip")
    contents: dict[str, Path | bytes] = {
        "AndroidManifest.xml": render_table("AndroidManifest.xml.j2", variants, **values),
        "META-INF/com/android/build/gradle/aar-metadata.properties": b"aarFormatVersion=1.0\naarMetadataVersion=1.0\n",
        # Part of the archive's format, empty as there are no resources.
        "R.txt": b"",
        "classes.jar": work / "classes.jar",
        # ONNX Runtime's native code looks classes up by name: R8 would rename or drop them.
        "proguard.txt": b"-keep class ai.onnxruntime.** { *; }\n",
    }
    for part in parts:
        contents.update(list_entries(part, f"assets/{package}"))
    write_archive(contents, work / "library.aar", "zip")
    place = f"{identity.group.replace('.', '/')}/{identity.name}/{identity.version}/{identity.name}-{identity.version}"
    return {
        f"{place}.aar": work / "library.aar",
        f"{place}.pom": render_table("pom.xml.j2", variants, **values),
        f"{place}-sources.jar": work / "sources.jar",
        "README.md": render_table("aar.md.j2", variants, **values),
    }


def _list_sources(variants: Sequence[Variant], package: str, values: Mapping[str, object]) -> dict[str, Path | bytes]:
    folder = package.replace(".", "/")
    sources: dict[str, Path | bytes] = {
        f"{folder}/{name}": path.read_bytes().replace(_STAND_IN, f"package {package};".encode(), 1)
        for name, path in list_files(_JAVA / "loader").items()
    }
    sources[f"{folder}/Bundles.java"] = render_table("Bundles.java.j2", variants, **values)
    return sources


def _compile(sources: Mapping[str, Path | bytes], runtime: AppRuntime, work: Path) -> dict[str, Path | bytes]:
    """Compiles for Java 8, which every Android build takes; the same compiler gives the same bytes."""
    for name, source in sources.items():
        place = work / "java" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(source if isinstance(source, bytes) else source.read_bytes())
    (work / "classes").mkdir()
    brief = ("-J-XX:TieredStopAtLevel=1", "-J-XX:+UseSerialGC")  # the optimizing compiler costs more than it saves here
    argv = [_find_javac(), *brief, "--release", "8", "-Xlint:-options", "-encoding", "UTF-8", "-proc:none"]
    argv += ["-implicit:none", "-classpath", str(runtime.classes), "-sourcepath", str(_JAVA / "platform")]
    argv += ["-d", str(work / "classes")]
    done = run_process([*argv, *(str(work / "java" / name) for name in sorted(sources))], timeout_s=300)
    if not done.succeeded:
        raise UsageError(
            f"the loader does not fit the classes of '{runtime.archive}', ONNX Runtime {runtime.version}:"
            f" {_first_error(done.stderr)}",
            hint="edgekit devices install android --library FILE.aar, of another version",
        )
    return dict(list_files(work / "classes"))


def _first_error(said: str) -> str:
    return next((line.partition("error: ")[2] for line in said.splitlines() if "error: " in line), said[-300:])


def _require_runtime(workplace: Workplace) -> AppRuntime:
    runtime = workplace.runtime
    if runtime is None or not runtime.classes.is_file():
        raise UsageError(
            f"'{runtime.archive if runtime else 'no archive'}' holds no classes.jar to compile the loader against",
            hint="edgekit devices install android",
        )
    return runtime


def _find_javac() -> str:
    home = os.environ.get("JAVA_HOME", "")
    found = shutil.which(str(Path(home) / "bin" / "javac")) if home else None
    found = found or shutil.which("javac")
    if found is None:
        raise MissingExtraError(
            "an AAR holds compiled Java, and there is no javac here", hint="apt-get install openjdk-17-jdk-headless"
        )
    return found


def _api_level(bundle: Bundle) -> int:
    level = bundle.manifest.settings.get("api_level", "")
    return int(level) if level.isdigit() else _OLDEST_API


def report_store(variants: Sequence[Variant], runtime: AppRuntime) -> StoreReport:
    """Returns what an app store checks of an app with these bundles and this ONNX Runtime."""
    _, *others = _merge_dependencies(variants, runtime)
    return StoreReport(
        archive=runtime.archive,
        archive_sha256=runtime.sha256,
        version=runtime.version,
        minimum_ort=max((variant.minimum_ort for variant in variants), key=read_version),
        libraries=runtime.libraries,
        unseen=tuple(dependency.notation for dependency in others),
    )


def _merge_dependencies(variants: Sequence[Variant], runtime: AppRuntime) -> list[Dependency]:
    """Returns what the bundles need together: the ONNX Runtime of the archive first, and others as new as one needs."""
    merged: dict[str, Dependency] = {}
    for variant in variants:
        for needed in list_android_dependencies(variant.provider, variant.versions, runtime.version):
            known = merged.get(needed.artifact)
            # The newest, as Gradle itself takes the newest of several.
            if known is None or read_version(needed.version) > read_version(known.version):
                merged[needed.artifact] = needed
    return list(merged.values())
