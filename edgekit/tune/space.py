"""The search space: the model files, and the groups of settings that are compared with each other (`space.toml`).

Defaults are ONNX Runtime's. Keys are those of onnxruntime_session_options_config_keys.h; provider options are described
on the provider's page at https://onnxruntime.ai/docs/execution-providers/ and in the NOTES.md of its target.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from edgekit._ort import CPU_PROVIDER, Level
from edgekit.bench.subject import Opening, Subject, open_subject
from edgekit.bundle.folder import open_bundle
from edgekit.bundle.manifest import CallSettings, SessionSetting
from edgekit.convert.convert import Source, convert_forms
from edgekit.convert.ort_form import OrtOptions
from edgekit.devices.device import Device, Job, require_device
from edgekit.devices.find import DeviceChoice, choose_devices
from edgekit.errors import EdgekitError, UsageError
from edgekit.machine import host_cpu
from edgekit.model.model import load_model, read_proto
from edgekit.serialize import read_own_toml
from edgekit.target import Session

Goal = Literal["latency", "p99", "throughput", "memory", "load"]


_SPIN, _POOL_SIZE = "session.intra_op.allow_spinning", "intra_op_num_threads"
# Assumed if the number of cores is not known: current phones have eight.
_DEFAULT_CORES = 8
BATCHES = (2, 4, 8)
"""The batch sizes that are tried for throughput."""
PROVIDER_OPTIONS = "provider options"
"""The name of the group with a provider's own options."""
_FIELDS = CallSettings.__struct_fields__


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A change of a setting: its name, the changed fields, and possibly another file or batch size.

    `config` and `provider_options` are merged into those of the setting. `only_runs` says that it affects the time of
    runs, but neither the time to load nor memory.
    """

    name: str
    level: Level | None = None
    threads: int | None = None
    inter_threads: int | None = None
    parallel: bool | None = None
    arena: bool | None = None
    memory_pattern: bool | None = None
    io_binding: bool | None = None
    concurrency: int | None = None
    config: Mapping[str, str] = {}
    provider_options: Mapping[str, str] = {}
    file: str | None = None
    batch: int | None = None
    only_runs: bool = False

    @property
    def touches(self) -> frozenset[str]:
        """The fields and keys that it changes; of two changes of the same field, only one can be adopted."""
        fields = (name for name in (*_FIELDS, "file", "batch") if getattr(self, name) is not None)
        return frozenset((*fields, *self.config, *self.provider_options))

    def apply(self, setting: SessionSetting) -> SessionSetting:
        """Returns a setting with this change."""
        return msgspec.structs.replace(
            setting,
            config={**setting.config, **self.config},
            provider_options={**setting.provider_options, **self.provider_options},
            **{name: it for name in _FIELDS if (it := getattr(self, name)) is not None},
        )


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Changes that are compared with each other; if they are `combinable`, several of them may be adopted."""

    name: str
    changes: tuple[Change, ...]
    combinable: bool = False


class Circumstances(msgspec.Struct, frozen=True, kw_only=True):
    """What the search space depends on.

    `files` are alternative files of the model. `cores` and `physical` are the device's logical and physical cores, 0 if
    not known. `branches` says that the graph has nodes that could run concurrently, `dynamic_batch` that the model has
    a dynamic batch axis. `asked` is the session that the target's manifest sets anyway.
    """

    goal: Goal
    provider: str
    files: tuple[str, ...] = ()
    cores: int = 0
    physical: int = 0
    branches: bool = True
    dynamic_batch: bool = False
    asked: Session = Session()


class _Space(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `space.toml`: the optimization levels, the switches, and the options of each provider."""

    levels: tuple[Change, ...]
    switches: tuple[Change, ...]
    providers: dict[str, tuple[Change, ...]]


_SPACE = read_own_toml(Path(__file__).parent / "space.toml", _Space)

LEVELS = Group(name="optimization level", changes=_SPACE.levels)
"""The optimization levels below ONNX Runtime's default, `all`."""
SWITCHES = Group(name="switches", changes=_SPACE.switches, combinable=True)
PROVIDER_CHANGES: Mapping[str, tuple[Change, ...]] = _SPACE.providers
# For these goals, what only affects the time of runs is left out.
_WITHOUT_RUNS: frozenset[Goal] = frozenset({"load", "memory"})


def list_groups(given: Circumstances) -> Iterator[Group]:
    """Yields the groups in the order in which they are tried, which follows ONNX Runtime's tuning guide.

    Changes that the target already makes are left out.
    """
    have = {**given.asked.config, **given.asked.provider_options}
    for group in _list_candidates(given):
        kept: list[Change] = []
        for change in group.changes:
            want = {**change.config, **change.provider_options}
            # The target may already set everything that the change would set.
            if change.touches != want.keys() or not want.items() <= have.items():
                kept.append(change)
        if kept:
            yield msgspec.structs.replace(group, changes=tuple(kept))


def _list_candidates(given: Circumstances) -> Iterator[Group]:
    cores = given.cores or _DEFAULT_CORES
    physical = given.physical or cores
    fractions = [physical >> shift for shift in range(1, physical.bit_length())]
    # Thread counts: all logical cores, and 1/2, 1/4, ... of the physical cores, whose number is the default.
    threads = [Change(name="no spinning", config={_SPIN: "0"})]
    for count in ([cores] if cores > physical else []) + fractions:
        threads.append(Change(name=f"{count} thread{'s' if count > 1 else ''}", threads=count))
        if count > 1:
            threads.append(Change(name=f"{count} threads, no spinning", threads=count, config={_SPIN: "0"}))
    yield Group(name="threads", changes=tuple(threads))
    if given.branches and given.goal not in _WITHOUT_RUNS:
        # Parallel execution with default threads, and with the physical cores divided among concurrent nodes.
        parallel = [Change(name="parallel", parallel=True)]
        for nodes in (1 << shift for shift in range(1, physical.bit_length())):
            name, each = f"parallel, {nodes} by {physical // nodes} threads", physical // nodes
            parallel.append(Change(name=name, parallel=True, inter_threads=nodes, threads=each))
        yield Group(name="execution", changes=tuple(parallel))
    if given.files:
        yield Group(name="file", changes=tuple(Change(name=f"file {name}", file=name) for name in given.files))
    yield LEVELS
    # A pool of more threads than the device has cores is left out.
    known = PROVIDER_CHANGES.get(given.provider, ())
    options = (change for change in known if int(change.provider_options.get(_POOL_SIZE, "0")) <= cores)
    yield Group(name=PROVIDER_OPTIONS, changes=tuple(options), combinable=True)
    leaves_out = given.goal in _WITHOUT_RUNS
    switches = tuple(change for change in SWITCHES.changes if not (leaves_out and change.only_runs))
    yield msgspec.structs.replace(SWITCHES, changes=switches)
    if given.goal == "throughput":
        changes: list[Change] = []
        for count in (2, 4):
            changes.append(Change(name=f"{count} runs at once", concurrency=count))
            changes.append(Change(name=f"{count} runs at once, 1 thread each", concurrency=count, threads=1))
        batches = (Change(name=f"batch {count}", batch=count) for count in BATCHES if given.dynamic_batch)
        yield Group(name="calls", changes=(*changes, *batches))


# Models below this size are converted to ORT format in a few seconds; larger ones take long, and hardly load faster.
_MAX_CONVERTED_BYTES = 200_000_000
ORT_FORM = "ORT format"

Opened = Mapping[str, Subject]
"""The opened model files by name; the default one has the name ""."""


def open_files(
    path: Path, work: Path, opening: Opening, candidates: Sequence[Path], choice: DeviceChoice
) -> tuple[Opened, Device, tuple[str, ...]]:
    """Returns all files to compare, the device to run them on, and notes on files that could not be included.

    These are `path` itself, each further form of a bundle, the ORT format of a small model on this CPU, and the
    candidates.

    Raises:
        EdgekitError: the subject, a candidate, the data or the device is wrong.
    """
    first = open_subject(path, work / "default", opening)
    devices = choose_devices(choice, first.target_for, default=(first.default_device,))
    if len(devices) != 1:
        raise UsageError("tune races on one device at a time", hint="give one --on; each device has its own best")
    device = devices[0]
    require_device(device.name, device.find_missing())
    found: dict[str, Subject] = {"": first}
    notes: list[str] = []
    is_host_cpu = first.job_for(device).target.provider == CPU_PROVIDER and device.name.startswith("host")
    if path.is_dir():
        manifest = open_bundle(path).manifest
        for form in manifest.forms:
            # The default is the form of the job: verification may use another form than an app loads.
            if manifest.forms[form][0] != first.job_for(device).model.name:
                found[form] = open_subject(path, work / form, msgspec.structs.replace(opening, form=form))
    elif path.suffix == ".onnx" and is_host_cpu and path.stat().st_size < _MAX_CONVERTED_BYTES:
        try:
            folder = work / "ort"
            # The file is used on this machine only, so it may have the memory layouts of its CPU.
            options = OrtOptions(style="full", cpu=host_cpu())
            model = load_model(path)
            source = Source(model=model, origin=model, checked=False)
            converted = convert_forms(model, source, ("full",), {"full": options}, folder)
            found[ORT_FORM] = open_subject(folder / converted.files["full"][0], work / "ort", opening)
        except EdgekitError as error:
            notes.append(f"no {ORT_FORM} in the race: {error.message}")
    for candidate in candidates:
        if candidate.name in found:
            raise UsageError(f"'{candidate.name}' is given twice", hint="name each candidate once")
        found[candidate.name] = open_subject(candidate, work / f"candidate{len(found)}", opening)
    return found, device, tuple(notes)


def has_branches(job: Job) -> bool:
    """Returns True if two nodes of a model could run concurrently, or if that is not known (ORT format)."""
    if job.model.suffix != ".onnx":
        return True
    graph = read_proto(load_model(job.model), weights=False).graph
    depths = {value.name: 0 for value in graph.input}
    constants = {tensor.name for tensor in graph.initializer}
    seen: set[int] = set()
    for node in graph.node:
        reads = [depths[name] for name in node.input if name in depths and name not in constants]
        # Nodes that read only constants are folded when the session is made.
        if not reads:
            continue
        if (depth := max(reads) + 1) in seen:
            return True
        seen.add(depth)
        depths |= dict.fromkeys(node.output, depth)
    return False
