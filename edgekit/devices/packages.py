"""Writes the Core ML models that ONNX Runtime's provider makes: packages for Xcode, and a cache for apps to ship."""

from collections import Counter
from pathlib import Path

import msgspec

from edgekit._files import digest_file, list_below, read_chunks, work_folder, write_new
from edgekit.devices.device import Job
from edgekit.devices.ios.compute import read_package
from edgekit.devices.ios.ios import IosSimulator
from edgekit.devices.observe import describe_job
from edgekit.errors import DeviceError
from edgekit.model.model import Model
from edgekit.target import Target

CACHE = "coreml_cache"
"""The folder of the cache."""

# The iOS releases whose Core ML version makes a difference to the provider; it treats later ones like the last (ORT's
# coreml/model/host_utils.h).
_RELEASES = (15, 16, 17, 18)


class CoreMlPackage(msgspec.Struct, frozen=True, kw_only=True):
    """The Core ML model of one partition: `name` is its folder (`.mlpackage`), or its file in the NeuralNetwork format.

    `operations` counts the operations of an ML Program by their names in MIL, without constants.
    """

    name: str
    operations: dict[str, int]
    size_bytes: int


class CoreMlCache(msgspec.Struct, frozen=True, kw_only=True):
    """A folder that an app passes to the provider as `ModelCacheDirectory`.

    `key` is the model's `COREML_CACHE_KEY`, by which the provider finds it. `releases` are the iOS releases that were
    checked to make the same partitions.
    """

    folder: str
    key: str
    releases: tuple[int, ...]
    size_bytes: int


class CoreMlFiles(msgspec.Struct, frozen=True, kw_only=True):
    """The written files: `packages` in the order of the partitions, and the cache, None if it was not requested."""

    packages: tuple[CoreMlPackage, ...]
    cache: CoreMlCache | None


def write_coreml(model: Model, target: Target, out: Path, *, packages: bool, cache: bool) -> CoreMlFiles:
    """Writes the models that the Core ML provider, run in `ios-sim`, makes of a model into the folder `out`.

    A cache must fit every iOS release from the target's on, because the provider loads whatever it finds under a
    partition's number, without a check of its content.

    Raises:
        DeviceError: `ios-sim` is not installed, the provider refuses the model or takes none of its nodes, or a cache
            is wanted and iOS releases make different partitions.
        OutputError: the folder cannot be written.
    """
    oldest = int(target.settings["ios"])
    with work_folder() as work:
        first = _ask_provider(describe_job(model, target, samples=0), work / str(oldest))
        cache_facts = None
        if cache:
            releases = (oldest, *(release for release in _RELEASES if release > oldest))
            before, outlines = oldest, [_outline(partition) for partition in first]
            for release in releases[1:]:
                other = msgspec.structs.replace(target, settings={**target.settings, "ios": str(release)})
                partitions = _ask_provider(describe_job(model, other, samples=0), work / str(release))
                if [_outline(partition) for partition in partitions] != outlines:
                    apart = f"other partitions of '{model.name}' on iOS {release} than on {before}"
                    words = f"the Core ML provider makes {apart}: the same cache would be wrong there"
                    raise DeviceError(words, hint=f"--set ios={release}, or leave --cache out")
                before = release
            key = first[0].parent.parent.name
            sizes = [_copy(path, out / CACHE / key / path.parent.name / path.name) for path in first]
            cache_facts = CoreMlCache(folder=CACHE, key=key, releases=releases, size_bytes=sum(sizes))
        written: list[CoreMlPackage] = []
        for index, partition in enumerate(first if packages else ()):
            number = f".{index}" if len(first) > 1 else ""
            name = f"{model.path.stem}{number}.{'mlpackage' if partition.is_dir() else 'mlmodel'}"
            operations = read_package(partition).operations if partition.is_dir() else ()
            kinds = Counter(operation.kind for operation in operations if operation.kind != "const")
            size = _copy(partition, out / name)
            written.append(CoreMlPackage(name=name, operations=dict(kinds.most_common()), size_bytes=size))
    return CoreMlFiles(packages=tuple(written), cache=cache_facts)


def _ask_provider(job: Job, folder: Path) -> tuple[Path, ...]:
    """Returns the models that the provider writes into a folder, in the order of the partitions."""
    folder.mkdir()
    with work_folder() as work:
        run = IosSimulator(cache=folder).run_job(job, work)
    # Without a load time, no session was made.
    if run.load_ms <= 0:
        words = f"the Core ML provider refuses '{job.model.stem}': {run.failure}"
        raise DeviceError(words, hint="edgekit check --observe")
    found = sorted(folder.glob("*/[0-9]*_*/model"), key=lambda path: int(path.parent.name.partition("_")[0]))
    if not found:
        words = f"the Core ML provider takes nothing of '{job.model.stem}'"
        raise DeviceError(words, hint="edgekit check --target coreml says why")
    return tuple(found)


def _outline(partition: Path) -> object:
    """Returns the facts that are equal for interchangeable partitions: inputs and outputs, or a file's digest."""
    if partition.is_file():
        return digest_file(partition)
    program = read_package(partition)
    return program.inputs, program.outputs


def _copy(partition: Path, target: Path) -> int:
    """Copies a package without the provider's temporary files (`tmp`), or a file, and returns its size in bytes."""
    total = 0
    for path in list_below(partition):
        inside = path.relative_to(partition)
        if inside.parts[:1] != ("tmp",):
            with path.open("rb") as file:
                write_new(target / inside, read_chunks(file))
            total += path.stat().st_size
    return total
