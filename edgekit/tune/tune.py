"""Searches the best session settings for a goal on a device: one group of settings after another is compared."""

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import msgspec

from edgekit._files import work_folder, write_file
from edgekit._ort import CPU_PROVIDER
from edgekit.bench.bench import ROUNDS, Block, Effort, guess_time, run_block
from edgekit.bench.latency import Ratio
from edgekit.bench.subject import Opening, Subject, open_subject
from edgekit.bundle.checks import check_requests
from edgekit.bundle.folder import MANIFEST, open_bundle
from edgekit.bundle.golden import read_inputs, read_outputs
from edgekit.bundle.manifest import MachineClass, TunedSession, TuningEvidence, encode_json
from edgekit.bundle.multi import INDEX
from edgekit.bundle.sign import SIGNATURE
from edgekit.data.samples import select_samples
from edgekit.devices.bundled import OF_THIS_MACHINE, count_device_cores, find_class, read_class, set_job
from edgekit.devices.device import Device, Job
from edgekit.devices.find import DeviceChoice, address_of, is_remote
from edgekit.devices.observe import count_nodes
from edgekit.errors import BundleError, EdgekitError
from edgekit.evidence import Evidence
from edgekit.machine import count_physical_cores
from edgekit.progress import Progress, say_nothing
from edgekit.serialize import fill
from edgekit.tune import race
from edgekit.tune.race import Decision, Entrant, Measurement
from edgekit.tune.space import BATCHES, Circumstances, Goal, Group, has_branches, list_groups, open_files


class TriedSetting(race.Figures, frozen=True, kw_only=True):
    """A setting with the medians of all its measurements."""

    entrant: Entrant
    measurements: int
    throughput_per_s: float = 0.0


class TuneReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a search on a device.

    `chosen` is the resulting setting; `final` compares it with the defaults in fresh rounds. If the interval of `final`
    is not entirely below 1, nothing is claimed, and `chosen` is the defaults. `seconds`, of `budget_s`, is the time of
    all measurements, including those of an earlier, interrupted search that were read back. `busy` is the load average
    over a minute before and after the search, None if not known. `applied` says what was written where.
    """

    subject: str
    device: str
    evidence: Evidence
    provider: str
    goal: Goal
    machine: MachineClass | None = None
    defaults: Entrant
    chosen: Entrant
    final: Ratio | None = None
    decisions: tuple[Decision, ...] = ()
    tried: tuple[TriedSetting, ...] = ()
    seconds: float = 0.0
    budget_s: float = 0.0
    measurements: int = 0
    busy: tuple[float, float] | None = None
    cores: int = 0
    versions: dict[str, str] = {}
    notes: tuple[str, ...] = ()
    applied: str = ""


DEFAULTS = Entrant(name="defaults")
_MAX_GOLDEN = 16
_TIMES = ("median_ms", "p99_ms", "load_ms", "first_ms")


class Tuning(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a search: its goal, time budget, alternative files, and what to do with the result.

    `min_sqnr_db` is the lowest allowed SQNR of outputs against the reference; None means the bundle's own limits, or
    `GATE`. `state` is a file that keeps the measurements. With `apply`, the result is written into the bundle.
    """

    goal: Goal = "latency"
    budget_s: float = 300.0
    candidates: tuple[Path, ...] = ()
    min_sqnr_db: float | None = None
    state: Path | None = None
    apply: bool = False


class _Search(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a search works with."""

    setup: race.RaceSetup
    journal: race.Journal
    given: Circumstances
    subject: Subject
    first: Block
    notes: tuple[str, ...]
    progress: Progress


def tune_on(
    path: Path, choice: DeviceChoice, options: Tuning, opening: Opening, *, progress: Progress = say_nothing
) -> TuneReport:
    """Returns the best settings for a goal on a device, with confidence intervals; `apply` writes them into the bundle.

    Raises:
        EdgekitError: the subject, a candidate, the data, the state or the name of a device is wrong, or the device is
            not there.
    """
    if options.apply:
        require_bundle(path)
    busy = _read_load()
    with work_folder() as work:
        search = _prepare(path, choice, options, opening, work, progress)
        chosen, decisions, final = _search(search)
        report = _describe(search, chosen, decisions, final)
    report = msgspec.structs.replace(report, busy=None if busy is None else (busy, _read_load() or 0.0))
    return _apply(report, path, search.setup.device) if options.apply else report


def _prepare(
    path: Path, choice: DeviceChoice, options: Tuning, opening: Opening, work: Path, progress: Progress
) -> _Search:
    untuned = msgspec.structs.replace(opening, tuned=False)
    opened, device, notes = open_files(path, work, untuned, options.candidates, choice)
    jobs = {name: subject.job_for(device) for name, subject in opened.items()}
    # All files get the default file's sample, or a batch of them.
    samples_by_batch = {1: jobs[""].samples}
    # A model without a dynamic batch axis is measured without batches.
    with contextlib.suppress(EdgekitError):
        sizes = BATCHES if options.goal == "throughput" else ()
        openings = {size: msgspec.structs.replace(untuned, batch=size) for size in sizes}
        places = {size: (work / f"batch{size}", opening) for size, opening in openings.items()}
        batched = {size: open_subject(path, *each) for size, each in places.items()}
        samples_by_batch |= {size: subject.job_for(device).samples for size, subject in batched.items()}

    def job_for(entrant: Entrant) -> Job:
        job = msgspec.structs.replace(jobs[entrant.file], samples=samples_by_batch[entrant.batch])
        return set_job(job, entrant.setting)

    job = job_for(DEFAULTS)
    progress(f"measure {opened[''].name} on {device.name} with the defaults")
    guess_ms = guess_time(device, job, Effort())
    first = run_block(device, job, 3, 20.0, guess_ms)
    # The reference is the golden outputs of a bundle (of its float model), or with other data or a bare model the
    # outputs of the default settings.
    bundle = open_bundle(path) if path.is_dir() and opening.data is None else None
    gate = race.GATE if bundle is None else bundle.manifest.thresholds
    if options.min_sqnr_db is not None:
        gate = msgspec.structs.replace(gate, min_sqnr_db=options.min_sqnr_db, min_cosine=-1.0, named=("min_sqnr_db",))
    setup = race.RaceSetup(
        device=device,
        goal=options.goal,
        job_for=job_for,
        reference=next(iter(read_outputs(bundle.golden))) if bundle is not None else first.outputs,
        gate=gate,
        bundle=bundle,
        guess_ms=guess_ms,
    )
    # Options of a provider that takes no node are not tried. If no placement was observed, it may have taken all nodes.
    counts, provider = count_nodes(first.run, job), job.target.provider
    cores = count_device_cores(device, first.run.versions)
    given = Circumstances(
        goal=options.goal,
        provider=provider if not counts or provider in counts else CPU_PROVIDER,
        files=tuple(name for name in opened if name),
        cores=cores,
        physical=cores if is_remote(device) else count_physical_cores(),
        branches=has_branches(job),
        dynamic_batch=len(samples_by_batch) > 1,
        asked=job.target.session,
    )
    key = {"goal": options.goal, "device": address_of(device), "model": job.check.sha256, "files": ", ".join(opened)}

    return _Search(
        setup=setup,
        journal=race.Journal(partial(race.measure, setup), options.budget_s, options.state, key),
        given=given,
        subject=opened[""],
        first=first,
        notes=(*opened[""].notes, *notes),
        progress=progress,
    )


def _search(search: _Search) -> tuple[Entrant, list[Decision], Ratio | str | None]:
    """Races each group, then the resulting setting against the defaults.

    Returns that setting, the decisions, and the final ratio: a message if it could not be measured, None if the
    defaults stay.
    """
    groups = list(list_groups(search.given))
    current, decisions = DEFAULTS, list[Decision]()
    for group in groups:
        current, new_decisions = _race_group(search, current, group)
        decisions += new_decisions
    if current == DEFAULTS:
        # The time reserved for the final comparison is free then: the undecided groups use it, in the same order.
        for group in groups:
            undecided = [one for one in decisions if one.group == group.name and one.reason.startswith(race.TIME_OVER)]
            if undecided and current == DEFAULTS:
                current, new_decisions = _race_group(search, current, group, last=True)
                index = decisions.index(undecided[0])
                decisions[index : index + 1] = new_decisions
    final: Ratio | str | None = None
    if current != DEFAULTS:
        search.progress(f"race '{current.name}' against the defaults")
        final = race.compare_fresh(DEFAULTS, current, search.journal.take, search.given.goal)
        taken = [one for one in decisions if one.taken]
        if final == race.TIME_OVER and len(taken) == 1:
            # A single change was already compared with the defaults in fresh rounds that were not used to select it.
            final = taken[0].ratio
    return current, decisions, final


def _race_group(search: _Search, held: Entrant, group: Group, *, last: bool = False) -> tuple[Entrant, list[Decision]]:
    """Returns the current setting after a group's race, with the changes that it adopted, and the decisions.

    One change is adopted at most, or several if the group is `combinable`. A group may use half of the remaining time,
    and time is reserved for the final comparison, unless `last` is set.
    """
    journal = search.journal
    free_s = max(0.0, journal.budget_s - journal.seconds)
    take = journal.take if last else partial(journal.take, reserve=2 * ROUNDS, until_s=journal.seconds + free_s / 2)
    changes, decisions = list(group.changes), list[Decision]()
    while changes:
        search.progress(f"race {group.name}: {len(changes)} beside '{held.name}'")
        entrants = {
            change.name: Entrant(
                name=change.name if held == DEFAULTS else f"{held.name} + {change.name}",
                setting=change.apply(held.setting),
                file=held.file if change.file is None else change.file,
                batch=change.batch or held.batch,
            )
            for change in changes
        }
        decision = race.race(group.name, held, tuple(entrants.values()), take, search.given.goal)
        decisions.append(decision)
        if not decision.taken:
            break
        winner = next(change for change in changes if entrants[change.name].name == decision.challenger)
        held = entrants[winner.name]
        apart = [it for it in changes if group.combinable and not it.touches & winner.touches]
        screened = {it.name: decision.screened.get(entrants[it.name].name, 1.0) for it in apart}
        changes = [it for it in apart if screened[it.name] < 1 - race.LEAST_GAIN]
    return held, decisions


def _find_refusal(search: _Search, chosen: Entrant, final: Ratio | str | None) -> str:
    """Returns why the defaults stay, "" if the gain of the setting `chosen` is proven and its outputs pass."""
    if final is None or isinstance(final, str):
        return final or ""
    low, high = final.interval
    if high >= 1:
        return f"no difference from the defaults can be told, 95 % between {low:.3f} and {high:.3f}"
    bundle, gate = search.setup.bundle, search.setup.gate
    if bundle is None:
        return ""
    golden = bundle.golden
    job = search.setup.job_for(chosen)
    count = min(golden.samples, _MAX_GOLDEN)
    samples = select_samples(read_inputs(golden), range(count))
    golden_job = msgspec.structs.replace(job, samples=samples, concurrency=1, timeout_s=3600.0)
    with work_folder() as work:
        run = search.setup.device.run_job(golden_job, work)
        if run.failure is not None:
            return run.failure
        reference = select_samples(read_outputs(golden), range(count))
        _, fault = race.judge_outputs(reference, run.outputs, gate, bundle)
    return fault or ""


def _describe(search: _Search, chosen: Entrant, decisions: Sequence[Decision], final: Ratio | str | None) -> TuneReport:
    """Returns the report of a search, with all measurements; `chosen` is chosen if its gain is proven."""
    setup, journal, circumstances = search.setup, search.journal, search.given
    refusal, tried = _find_refusal(search, chosen, final), summarize_rounds(journal.rounds)
    not_raced = "" if circumstances.branches else "parallel execution is not raced: no two nodes could run side by side"
    not_chosen = f"'{chosen.name}' is not chosen: {refusal}" if refusal else ""
    return fill(
        TuneReport,
        circumstances,
        journal,
        subject=search.subject.name,
        device=setup.device.name,
        evidence=setup.device.evidence,
        machine=find_class(setup.device) or read_class(search.first.run.versions),
        defaults=DEFAULTS,
        chosen=DEFAULTS if refusal else chosen,
        final=None if isinstance(final, str) else final,
        decisions=tuple(decisions),
        tried=tuple(tried.values()),
        versions=dict(sorted(search.first.run.versions.items())),
        notes=(*search.notes, *filter(None, (not_raced, not_chosen))),
    )


def _read_load() -> float | None:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def _apply(found: TuneReport, path: Path, device: Device) -> TuneReport:
    if found.chosen == found.defaults or found.final is None:
        applied = "nothing: the defaults stay"
    # Times in an emulator are times of the machine on which it runs.
    elif found.device not in OF_THIS_MACHINE and found.evidence is not Evidence.DEVICE:
        applied = f"nothing: '{found.device}' is no device: its times say nothing of one ({found.evidence.value})"
    elif found.machine is None:
        applied = f"nothing: '{found.device}' does not say what kind of machine it is"
    else:
        changes, setting = tuple(found.chosen.name.split(" + ")), found.chosen.setting
        facts = {"device": address_of(device), "ratio": found.final.value, "changes": changes}
        tuned = TunedSession(
            machine=found.machine,
            setting=msgspec.structs.replace(setting, form=found.chosen.file),
            evidence=fill(TuningEvidence, found, found.final, **facts),
        )
        applied = apply_setting(path, tuned)
    return msgspec.structs.replace(found, applied=applied)


def require_bundle(path: Path) -> None:
    """Checks, before anything is measured, that a setting can be written into `path`.

    Raises:
        BundleError: it is no folder with a manifest, or a part of a folder of several targets.
    """
    if not path.is_dir():
        raise BundleError(f"--apply writes into a bundle, and '{path}' is none", hint="build one, or leave --apply out")
    # The index holds the digest of each manifest: changing one would break the whole folder.
    index = next((parent / INDEX for parent in path.resolve().parents[:2] if (parent / INDEX).is_file()), None)
    if index is not None:
        words = f"'{path}' belongs to '{index}'"
        raise BundleError(words, hint="tune the bundle before you join it: edgekit join comes after")


def apply_setting(path: Path, tuned: TunedSession) -> str:
    """Writes a setting into a bundle's manifest, in place of one for the same kind of machine; says what was written.

    Raises:
        BundleError: the bundle is incomplete, or has a setting that a bundle may not request.
        OutputError: the folder cannot be written.
    """
    bundle = open_bundle(path)
    others = [one for one in bundle.manifest.tuned or () if one.machine != tuned.machine]
    # More specific classes first, because the first one that matches is used.
    ordered = sorted((*others, tuned), key=lambda one: (one.machine.system, one.machine.machine, -one.machine.cores))
    manifest, source = msgspec.structs.replace(bundle.manifest, tuned=tuple(ordered)), path / MANIFEST
    check_requests(manifest, str(source))
    signed = (path / SIGNATURE).exists()
    # The signature is removed first: if edgekit is interrupted here, the bundle is unsigned but intact, and never
    # carries a signature of other content.
    (path / SIGNATURE).unlink(missing_ok=True)
    write_file(source, encode_json(manifest))
    unsigned = "; its signature was of the bundle before and is gone: edgekit sign signs it again"
    return f"'{source}'" + (unsigned if signed else "")


def summarize_rounds(rounds: Iterable[race.Round]) -> Mapping[str, TriedSetting]:
    """Returns each setting with its medians, by name, in the order of the first measurements."""
    found: dict[str, tuple[Entrant, list[Measurement]]] = {}
    for one in rounds:
        for entrant, measured in zip(one.entrants, one.measured, strict=True):
            found.setdefault(entrant.name, (entrant, []))[1].append(measured)
    tried = dict[str, TriedSetting]()
    for name, (entrant, every) in found.items():
        fault = next((one.fault for one in every if one.fault is not None), None)
        tried[name] = TriedSetting(entrant=entrant, measurements=len(every), fault=fault)
        if sound := [one for one in every if one.fault is None]:
            tried[name] = msgspec.structs.replace(
                tried[name],
                **{time: median(getattr(one, time) for one in sound) for time in _TIMES},
                throughput_per_s=1e3 / max(1e-9, median(one.pace_ms for one in sound)),
                peak_rss_bytes=int(median(one.peak_rss_bytes for one in sound)),
                sqnr_db=min((one.sqnr_db for one in sound if one.sqnr_db is not None), default=None),
            )
    return tried
