"""From the models of a group to a verified folder for each target."""

import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import msgspec

from edgekit._files import staged_entries, work_folder, write_file
from edgekit.bundle.folder import Bundle, open_bundle
from edgekit.bundle.group.group import GroupContents, write_group
from edgekit.bundle.group.settle import settle_wiring
from edgekit.bundle.group.weights import find_equal_weights, share_weights
from edgekit.bundle.group.wiring import Interface, describe_interface, find_fault, list_data, split_source
from edgekit.data.split import SampleSets, read_sample_sets
from edgekit.devices.register import DeviceChoice
from edgekit.errors import EdgekitError, UsageError
from edgekit.jobs.build import build
from edgekit.jobs.group_file import DEFAULT_METRIC, GroupFile, MemberFile, read_group_file
from edgekit.jobs.group_samples import FloatGroup, GroupSamples, run_float
from edgekit.model.model import Model, load_model
from edgekit.package.board import GROUP_PROGRAMS
from edgekit.plain import to_json
from edgekit.prepare import ready_model
from edgekit.prepare.shapes.unset import find_unset
from edgekit.progress import Progress, say_nothing
from edgekit.recipe import Data, Recipe, load_targets, takes_any_size
from edgekit.report.grouped import GroupBuild, GroupTarget
from edgekit.report.summary import BuildReport
from edgekit.target import Form, Target
from edgekit.verify.groups import choosing, verify_group
from edgekit.verify.tasks.tasks import find_metric

# A file in ORT format has its weights inside, where no other can use them.
_SHARING: tuple[Form, ...] = ("context", "onnx")


class _Job(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be made of which models, and where; `work` is gone afterwards, `staging` becomes `out`."""

    file: GroupFile
    group: FloatGroup
    samples: GroupSamples
    recipe: Recipe
    work: Path
    staging: Path
    out: Path
    verify: bool
    progress: Progress
    notes: tuple[str, ...] = ()


def build_group(
    path: Path,
    data: Data,
    out: Path,
    recipe: Recipe | None = None,
    *,
    verify: bool = True,
    progress: Progress | None = None,
) -> GroupBuild:
    """Makes the folder of a group for each target, verifies it end to end, and writes both and a report into `out`.

    `path` is a `group.toml`. `data` holds the group's own inputs: what each member is calibrated with comes of running
    the float models. A target that cannot be built or does not pass is a finding.

    Raises:
        EdgekitError: the file, a model, the data or the recipe is wrong; then `out` is as it was.
    """
    start, say, recipe = time.monotonic(), progress or say_nothing, recipe or Recipe()
    file, targets = read_group_file(path), load_targets(recipe)
    with work_folder() as work, staged_entries(out) as staging:
        group = _open_members(path, file, work, is_free=takes_any_size(targets))
        say(f"run the float models of {file.name}")
        sets = _read_samples(group, file, data, recipe)
        samples = run_float(group, sets, file.metric, work / "samples")
        job = _Job(
            file=file,
            group=group,
            samples=samples,
            recipe=recipe,
            work=work,
            staging=staging,
            out=out,
            verify=verify,
            progress=say,
            notes=tuple(_tell_cut(group, sets)),
        )
        built = _build_members(job)
        report = GroupBuild(
            group=file.name,
            members={name: model.sha256 for name, model in group.models.items()},
            calibration_samples=sets.calibration.count,
            golden_samples=samples.golden.samples,
            targets=tuple(_finish(target, built, job) for target in targets),
            seconds=round(time.monotonic() - start, 2),
        )
        write_file(staging / "report.json", to_json(report).encode())
    return report


def _open_members(path: Path, file: GroupFile, work: Path, *, is_free: bool) -> FloatGroup:
    """Returns the models of a group, and its wiring written out; dimensions without a size stay open where they may.

    Raises:
        UsageError: the wiring does not fit the models.
        ModelError: a model cannot be read.
    """
    models = {name: load_model(path.parent / member.model) for name, member in file.members.items()}
    interfaces = {
        name: _prepare(name, model, file.members[name], work / "ready" / name, is_free=is_free)
        for name, model in models.items()
    }
    wiring = settle_wiring(file.wiring, interfaces)
    fault = find_fault(wiring, interfaces)
    if fault is not None:
        raise UsageError(f"'{path}' {fault[0]}", hint=fault[1])
    if file.metric == DEFAULT_METRIC and not wiring.chooses:
        raise UsageError(f"'{path}' names no metric", hint='[metric] with name = "top1", ...')
    if ":" in file.metric.name:
        words = f"'{path}' names the metric '{file.metric.name}', code that no bundle may run"
        raise UsageError(words, hint="name a metric that edgekit has")
    find_metric(file.metric)
    return FloatGroup(wiring=wiring, interfaces=interfaces, models=models)


def _prepare(name: str, model: Model, member: MemberFile, folder: Path, *, is_free: bool) -> Interface:
    try:
        ready = ready_model(model, folder, member.dims, may_stay_open=is_free).model
    except UsageError as error:
        hint = error.hint
        # There is no such option here.
        if "--dim" in (hint or ""):
            sizes = ", ".join(f'"{dim}" = SIZE' for dim in sorted(find_unset(model.inputs, member.dims)))
            hint = f"dims = {{ {sizes} }} in [members.{name}]; for cpu alone they stay open"
        raise UsageError(f"member '{name}': {error.message}", hint=hint) from error
    return describe_interface(ready.inputs, ready.outputs)


def _read_samples(group: FloatGroup, file: GroupFile, data: Data, recipe: Recipe) -> SampleSets:
    return read_sample_sets(
        list_data(group.wiring, group.interfaces),
        data.source,
        evaluation=data.evaluation,
        labels=None if data.labels is None else (data.labels, find_metric(file.metric).labels),
        preprocess=data.preprocess,
        most=recipe.samples,
    )


def _tell_cut(group: FloatGroup, sets: SampleSets) -> Iterator[str]:
    """Yields a note where samples begin with more tokens than the first stage with text takes."""
    tokens = group.wiring.tokens
    run, text = next(((stage.run, stage.text) for stage in group.wiring.stages if stage.text), ("", None))
    if tokens is None or text is None or not isinstance(tokens.start, str):
        return
    length, name = (group.interfaces[run].inputs[text.input].shape or (None,))[-1], split_source(tokens.start)[1]
    given = (sample[name].size for samples in (sets.calibration, sets.evaluation) for sample in samples)
    cut = sum(size > length for size in given) if isinstance(length, int) else 0
    if cut:
        yield f"{cut} samples begin with more tokens than the {length} that '{run}' takes: what is more is left out"


def _build_members(job: _Job) -> dict[str, tuple[Path, BuildReport]]:
    """Returns for each member where its bundles lie, and what is known of them."""
    shares = find_equal_weights(tuple(job.group.models.values())) > 0
    built: dict[str, tuple[Path, BuildReport]] = {}
    for name, model in job.group.models.items():
        member, folder = job.file.members[name], job.work / "built" / name
        recipe = msgspec.structs.replace(
            job.recipe,
            dims=member.dims,
            precision=member.precision or job.recipe.precision,
            samples=None,
            forms=_SHARING if shares and not job.recipe.forms else job.recipe.forms,
        )
        source, evaluation = job.samples.find_calibration(name), job.samples.find_evaluation(name)
        data = Data(source=str(source), evaluation=str(evaluation))
        say = partial(_tell, job.progress, name)
        built[name] = folder, build(model.path, data, folder, recipe, verify=False, progress=say)
    return built


def _tell(progress: Progress, name: str, step: str) -> None:
    progress(f"{name}: {step}")


def _finish(target: Target, built: Mapping[str, tuple[Path, BuildReport]], job: _Job) -> GroupTarget:
    """Writes the group of one target, and verifies it."""
    bundles, notes = dict[str, Bundle](), list(job.notes)
    for name, (folder, report) in built.items():
        summary = next(bundle for bundle in report.bundles if bundle.target == target.name)
        if summary.path is None:
            return GroupTarget(target=target.name, failure=f"member '{name}': {summary.failure}")
        notes += [f"{name}: {note}" for note in summary.notes]
        bundles[name] = open_bundle(folder / summary.path.name)
    file, place = job.file, f"{job.file.name}-{target.name}"
    contents = GroupContents(
        name=file.name,
        wiring=job.group.wiring,
        golden=job.samples.golden,
        metric=file.metric,
        programs=GROUP_PROGRAMS,
    )
    try:
        shared = share_weights(bundles, job.work / "shared" / target.name, target.folder)
        group = write_group(contents, shared.bundles, job.staging / place)
        found = verify_group(group, choosing(DeviceChoice()), progress=job.progress) if job.verify else None
    except EdgekitError as error:
        return GroupTarget(target=target.name, failure=str(error), notes=tuple(notes))
    return GroupTarget(
        target=target.name,
        path=job.out / place,
        notes=tuple(notes),
        size_bytes=group.size_bytes,
        # A compiled context has weights of its own.
        shared_bytes=shared.size_bytes if all(each.form == "onnx" for each in group.manifests.values()) else 0,
        verify=found,
    )
