"""Builds a verified folder for each target from the models of a group.

A `group.toml` says which models belong together, and which output feeds which input. The float models run end to end
once: that gives the golden samples of the group, and the calibration samples of each member.
"""

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec

from edgekit._files import staged_entries, work_folder, write_file
from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.bundle import wiring as wires
from edgekit.bundle.checks import find_fault as find_name_fault
from edgekit.bundle.folder import Bundle, open_bundle
from edgekit.bundle.golden import INPUTS, OUTPUTS, Golden, write_labels, write_rows, writing_rows
from edgekit.bundle.group import find_equal_weights, share_weights, write_group
from edgekit.data.samples import Samples
from edgekit.data.sets import Label, SampleSets, read_sample_sets
from edgekit.devices.find import DeviceChoice, choose_here
from edgekit.errors import EdgekitError, UsageError
from edgekit.jobs.build import build
from edgekit.model.model import Model, load_model
from edgekit.model.tensors import Array, Tensors
from edgekit.package.formats import GROUP_PROGRAMS
from edgekit.prepare import ready_model
from edgekit.prepare.clean import make_runnable
from edgekit.prepare.shapes import OpenDimsError
from edgekit.progress import Progress, name_steps, say_nothing
from edgekit.recipe import Data, PrecisionChoice, Recipe, load_targets, takes_any_size
from edgekit.report.summary import BuildReport
from edgekit.report.tables import GroupBuild, GroupTarget
from edgekit.serialize import read_toml, suggest_key, to_json
from edgekit.target import Form, Target, TaskLimit
from edgekit.verify.on_devices import choosing, verify_group
from edgekit.verify.task_metrics import decode_text, find_metric

DEFAULT_METRIC = TaskLimit(name="exact-match", decoder="strings", max_drop=5.0, gate="estimate")
"""The metric of a group that states none: the share of results that equal those of the float models exactly."""


class MemberFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[members.NAME]`: a model, relative to the file, the sizes of its dynamic dimensions, and its precision."""

    model: str
    dims: dict[str, int] = {}
    precision: PrecisionChoice | None = None


class GroupFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a `group.toml`; inputs that `stages` do not connect are connected by name."""

    members: Annotated[dict[str, MemberFile], msgspec.Meta(min_length=1, max_length=wires.MAX_MEMBERS)]
    stages: Annotated[tuple[wires.Stage, ...], msgspec.Meta(min_length=1, max_length=wires.MAX_MEMBERS)]
    tokens: wires.Tokens | None = None
    metric: TaskLimit = DEFAULT_METRIC
    name: str = ""


_TABLES = (GroupFile, MemberFile, wires.Stage, wires.Text, wires.Crop, wires.Tokens, TaskLimit)
# The hint about an unknown key: the most similar key of any table, or the list of the file's keys.
_VALID_KEYS = {key for table in _TABLES for key in table.__struct_fields__}
_KEYS = partial(suggest_key, valid=_VALID_KEYS, otherwise=f"the keys are {', '.join(GroupFile.__struct_fields__)}")


def read_group_file(path: Path) -> GroupFile:
    """Reads a `group.toml`; a group without a name gets that of the file.

    Raises:
        UsageError: the file cannot be read, is malformed, has an unknown key, or its name cannot name a folder.
    """
    found = read_toml(path, GroupFile, hint="a group is a .toml file", keys=_KEYS)
    found = msgspec.structs.replace(found, name=found.name or path.stem)
    fault = "has a folder in it" if "/" in found.name else find_name_fault(found.name)
    if fault is not None:
        raise UsageError(f"the name {found.name[:99]!r} in '{path}' {fault}", hint='name = "speech"')
    return found


_CALIBRATION, _EVALUATION = 256, 64
# How many inputs are kept of the first sample, when the number of iterations of loops is not known yet.
_FIRST_SAMPLE_RUNS = 8


class _Group(msgspec.Struct, frozen=True, kw_only=True):
    """The models of a group as they were given, with their interfaces and their wiring."""

    file: GroupFile
    wiring: wires.Wiring
    interfaces: Mapping[str, wires.Interface]
    models: Mapping[str, Model]


def _run_float(group: _Group, sets: SampleSets, folder: Path) -> Golden:
    """Runs every sample through the group, and returns the golden samples of the whole group.

    Inputs of each member, spread over samples and runs, are kept in NAME/calibration.npz and NAME/evaluation.npz.
    Without labels, the decoded results of the float models are the labels of the golden samples.

    Raises:
        UsageError: the metric needs labels, and there are none.
        DataError: a sample cannot run, or a member is never run.
        ModelError: a model has a newer opset than this ONNX Runtime supports, and cannot be lowered.
        RuntimeRefusal: ONNX Runtime cannot run a model.
    """
    metric, sessions = group.file.metric, dict[str, CpuSession]()
    for name, given in group.models.items():
        # As in its own build.
        model = make_runnable(given, folder / "opened" / name)
        # Without optimization, as for the reference of a bundle.
        sessions[name] = CpuSession(model.path, SessionSettings(level=Level.DISABLED, libraries=model.custom_ops))

    def run(samples: Samples, part: str, limit: int) -> Iterator[dict[str, Array]]:
        with contextlib.ExitStack() as opened:
            files = {name: writing_rows(folder / name / f"{part}.npz", ragged=True) for name in sessions}
            rows = {name: opened.enter_context(file) for name, file in files.items()}
            calls, strides = dict.fromkeys(sessions, 0), dict.fromkeys(sessions, 1)

            def run_member(name: str, given: Sequence[Tensors]) -> list[Tensors]:
                for sample in given:
                    # About `limit` inputs are kept, spread over all samples and over the runs of each.
                    is_full = rows[name].count >= (2 * limit if sample_index else _FIRST_SAMPLE_RUNS)
                    if not is_full and (calls[name] + sample_index) % strides[name] == 0:
                        rows[name].append(sample)
                    calls[name] += 1
                return [sessions[name].run(sample) for sample in given]

            for sample_index, sample in enumerate(samples):
                if sample_index == 1:
                    # The other samples are assumed to have as many runs as the first one.
                    strides = {name: max(1, math.ceil(count * samples.count / limit)) for name, count in calls.items()}
                calls = dict.fromkeys(sessions, 0)
                yield from wires.run_pipeline(group.wiring, group.interfaces, [sample], run_member)

    for _ in run(sets.calibration, "calibration", _CALIBRATION):
        pass
    labels = None if sets.labels is None else list(sets.labels)
    decoded_labels: list[Label] = []
    golden = folder / "golden"
    with writing_rows(golden / OUTPUTS, ragged=True) as outputs:
        for result in run(sets.evaluation, "evaluation", _EVALUATION):
            outputs.append(result)
            if labels is None:
                if find_metric(metric).labels != "text":
                    raise UsageError(f"metric '{metric.name}' needs labels", hint="give --eval DATA with --labels FILE")
                decoded_labels.append(decode_text(result[metric.output or next(iter(result))], metric))
    inputs, count = write_rows(golden / INPUTS, sets.evaluation, ragged=True)
    write_labels(golden, labels or decoded_labels)
    return Golden(folder=golden, samples=count, inputs=inputs, outputs=outputs.specs, has_labels=True)


# A file in ORT format contains its weights, so that members cannot share them.
_SHARING_FORMS: tuple[Form, ...] = ("context", "onnx")


def build_group(
    path: Path, data: Data, out: Path, recipe: Recipe, *, verify: bool, progress: Progress = say_nothing
) -> GroupBuild:
    """Makes the folder of a group for each target, verifies it end to end, and writes both and a report into `out`.

    `path` is a `group.toml`. `data` holds the inputs of the group; the calibration samples of its members come from
    running the float models. A target that cannot be built or does not pass is a finding.

    Raises:
        EdgekitError: the file, a model, the data or the recipe is wrong; then `out` is unchanged.
    """
    start = time.monotonic()
    file, targets = read_group_file(path), load_targets(choose_here(recipe))
    with work_folder() as work, staged_entries(out) as staging:
        group = _open_members(path, file, work, is_free=takes_any_size(targets))
        progress(f"run the float models of {file.name}")
        sets = read_sample_sets(
            wires.list_data(group.wiring, group.interfaces),
            data.source,
            evaluation=data.evaluation,
            labels=None if data.labels is None else (data.labels, find_metric(file.metric).labels),
            preprocess=data.preprocess,
            most=recipe.samples,
        )
        golden = _run_float(group, sets, work / "samples")
        shares_weights = find_equal_weights(tuple(group.models.values())) > 0
        built: dict[str, BuildReport] = {}
        for name, model in group.models.items():
            member, member_samples = file.members[name], work / "samples" / name
            member_recipe = msgspec.structs.replace(
                recipe,
                dims=member.dims,
                precision=member.precision or recipe.precision,
                samples=None,
                forms=_SHARING_FORMS if shares_weights and not recipe.forms else recipe.forms,
            )
            calibration, evaluation = (str(member_samples / f"{part}.npz") for part in ("calibration", "evaluation"))
            member_data, place = Data(source=calibration, evaluation=evaluation), work / "built" / name
            said = name_steps(progress, name)
            built[name] = build(model.path, member_data, place, member_recipe, verify=False, progress=said)
        truncation_notes = tuple(_describe_truncation(group, sets))

        def finish(target: Target) -> GroupTarget:
            """Writes the group of one target, and verifies it."""
            bundles, notes, place = dict[str, Bundle](), list(truncation_notes), f"{file.name}-{target.name}"
            for name, report in built.items():
                summary = next(bundle for bundle in report.bundles if bundle.target == target.name)
                if summary.path is None:
                    return GroupTarget(target=target.name, failure=f"member '{name}': {summary.failure}")
                notes += [f"{name}: {note}" for note in summary.notes]
                bundles[name] = open_bundle(summary.path)
            try:
                sharing, shared_bytes = share_weights(bundles, work / "shared" / target.name, target.folder)
                folder = staging / place
                written = write_group(file.name, group.wiring, sharing, golden, file.metric, GROUP_PROGRAMS, folder)
                found = verify_group(written, choosing(DeviceChoice()), progress=progress) if verify else None
            except EdgekitError as error:
                return GroupTarget(target=target.name, failure=str(error), notes=tuple(notes))
            return GroupTarget(
                target=target.name,
                path=out / place,
                notes=tuple(notes),
                size_bytes=written.size_bytes,
                # Compiled contexts do not share weights.
                shared_bytes=shared_bytes if all(each.form == "onnx" for each in written.manifests.values()) else 0,
                verify=found,
            )

        group_report = GroupBuild(
            group=file.name,
            members={name: model.sha256 for name, model in group.models.items()},
            calibration_samples=sets.calibration.count,
            golden_samples=golden.samples,
            targets=tuple(map(finish, targets)),
            seconds=round(time.monotonic() - start, 2),
        )
        write_file(staging / "report.json", to_json(group_report).encode())
    return group_report


def _open_members(path: Path, file: GroupFile, work: Path, *, is_free: bool) -> _Group:
    """Returns the models of a group with its complete wiring; if `is_free`, dimensions without a size stay open.

    Raises:
        UsageError: the wiring does not fit the models.
        ModelError: a model cannot be read.
    """
    models = {name: load_model(path.parent / member.model) for name, member in file.members.items()}
    interfaces: dict[str, wires.Interface] = {}
    for name, model in models.items():
        try:
            ready = ready_model(model, work / "ready" / name, file.members[name].dims, may_stay_open=is_free).model
        except UsageError as error:
            hint = error.hint
            # A group has no option --dim.
            if "--dim" in (hint or ""):
                names = error.names if isinstance(error, OpenDimsError) else ()
                sizes = ", ".join(f'"{dim}" = SIZE' for dim in sorted(names))
                hint = f"dims = {{ {sizes} }} in [members.{name}]; for cpu alone they stay open"
            raise UsageError(f"member '{name}': {error.message}", hint=hint) from error
        interfaces[name] = wires.describe_interface(ready.inputs, ready.outputs)
    wiring = wires.resolve_wiring(wires.Wiring(stages=file.stages, tokens=file.tokens), interfaces)
    if (fault := wires.find_fault(wiring, interfaces)) is not None:
        raise UsageError(f"'{path}' {fault[0]}", hint=fault[1])
    if file.metric == DEFAULT_METRIC and not any(stage.text or stage.crop for stage in wiring.stages):
        raise UsageError(f"'{path}' names no metric", hint='[metric] with name = "top1", ...')
    if ":" in file.metric.name:
        words = f"'{path}' names the metric '{file.metric.name}', code that no bundle may run"
        raise UsageError(words, hint="name a metric that edgekit has")
    find_metric(file.metric)
    return _Group(file=file, wiring=wiring, interfaces=interfaces, models=models)


def _describe_truncation(group: _Group, sets: SampleSets) -> Iterator[str]:
    """Yields a note if samples start with more tokens than the first stage that reads text accepts."""
    tokens = group.wiring.tokens
    run, text = next(((stage.run, stage.text) for stage in group.wiring.stages if stage.text), ("", None))
    if tokens is None or text is None or not isinstance(tokens.start, str):
        return
    length, name = (group.interfaces[run].inputs[text.input].shape or (None,))[-1], wires.split_source(tokens.start)[1]
    token_counts = (sample[name].size for samples in (sets.calibration, sets.evaluation) for sample in samples)
    truncated = sum(size > length for size in token_counts) if isinstance(length, int) else 0
    if truncated:
        words = f"more tokens than the {length} that '{run}' takes: further tokens are cut off"
        yield f"{truncated} samples begin with {words}"
