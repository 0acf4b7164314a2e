"""The options of a build, which a recipe file can hold as well."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec

from edgekit._files import AnyPath, as_path
from edgekit._ort import CPU_PROVIDER
from edgekit.data.images import Preprocess
from edgekit.errors import UsageError, look_up
from edgekit.model.state import State
from edgekit.model.tensors import OutputKind, StatedOutput, TensorSpec
from edgekit.serialize import name_valid, read_toml, ready_type
from edgekit.target import Form, Precision, Target, TaskLimit, Thresholds, find_group, load_target

PrecisionChoice = Literal["auto", "int8", "int16", "w8a8", "w8a16", "w4a16", "w4a8", "fp16", "fp32"]
PRECISIONS: tuple[str, ...] = get_args(PrecisionChoice)
"""The names of precisions; w8a8 and w8a16 are other names of int8 and int16."""
INTEGER_PRECISIONS: tuple[str, ...] = tuple(word for word in PRECISIONS if not word.startswith("fp"))
"""Those of quantized models, and "auto"."""
_LEFT_OUT = "the recipe leaves out other forms"
_ONCE = "models of several sizes share one file of weights, which only the ONNX form can"
# Files in ORT format and compiled contexts have their weights inside.
_SHARING: tuple[Form, ...] = ("onnx",)
_NAMED: dict[str, Precision] = {**{word: word for word in get_args(Precision)}, "w8a8": "int8", "w8a16": "int16"}


class Data(msgspec.Struct, frozen=True, kw_only=True):
    """Where the samples of a build come from.

    `source` calibrates; `evaluation` verifies, or if it is None a part of `source` that is held out. `labels` holds the
    class of each evaluation sample. `golden` is the folder of an earlier build of the same model and data: its float
    reference is reused, so that a build on another kind of CPU has the same bytes.
    """

    source: str
    evaluation: str | None = None
    labels: Path | None = None
    preprocess: Preprocess | None = None
    golden: Path | None = None

    def __post_init__(self) -> None:
        # Users of the Python API give any path as text or as a Path.
        for name, kind in (("source", str), ("evaluation", str), ("labels", Path), ("golden", Path)):
            given = getattr(self, name)
            if given is not None and not isinstance(given, kind):
                msgspec.structs.force_setattr(self, name, kind(as_path(given)))


class Licence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The licences of the model and its data, as the user states them; SPDX identifiers are best."""

    model: str = "unknown"
    data: str = "unknown"


class TensorNotes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an app must know of an input or output, and the model file does not say.

    `layout` names the axes, for example "NCHW". `preprocessing` says how an input is made, `postprocessing` what an
    output means, for example "softmax, then the largest of the classes in labels.txt".
    """

    layout: str | None = None
    preprocessing: str | None = None
    postprocessing: str | None = None


class ForecastGoal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Phones and boards, by name, for which the time of a run is forecast, and the most milliseconds allowed."""

    devices: tuple[str, ...]
    max_ms: Annotated[float, msgspec.Meta(gt=0)] | None = None


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of a build that belong to a model; a recipe and `[models.NAME]` of an `edgekit.toml` have them."""

    dims: dict[str, int] = {}
    buckets: dict[str, tuple[int, ...]] = {}
    pad: dict[str, float] = {}
    freeze: dict[str, float] = {}
    outputs: dict[str, OutputKind | StatedOutput] = {}
    state: State | None = None
    licence: Licence = Licence()
    tensors: dict[str, TensorNotes] = {}


class Recipe(ModelOptions, frozen=True, kw_only=True):
    """How to build bundles of a model.

    `dims` sets the sizes of dynamic dimensions. `buckets` gives one of them several sizes: a bundle then has a model
    for each, and `pad` holds the number that fills each input up to the next size, 0 by default. `freeze` replaces
    inputs by constants of one number, `settings` sets parameters of targets. `samples` limits the calibration samples.

    `max_drop` is the percentage of golden samples whose first class may change; it replaces `min_top1_agreement` of the
    targets. `thresholds` replaces single limits, by the name of the target; `metric` is a metric of the task that every
    target must keep.

    With `fix` each target gets the graph rewrites by which its provider takes more. `outputs` states what outputs are,
    by name; the others are guessed from their values. `state` states how many samples are the steps of a sequence, and
    which outputs become inputs of the next step; otherwise their names say it. `forms` limits the forms of a target
    that a bundle has; empty means all. `float_constants` says how large constants of float nodes are stored: "auto" is
    in 8 or 16 bits if held-out outputs lose at most 0.1 dB by it. `forecast` adds a forecast of the time on phones and
    boards, perhaps with a limit. `licence` and `tensors` (notes by the name of an input or output) are copied into the
    manifest.
    """

    targets: tuple[str, ...] = ("all",)
    settings: Mapping[str, str | int] = {}
    precision: PrecisionChoice = "auto"
    samples: int | None = None
    max_drop: float | None = None
    thresholds: dict[str, dict[str, Any]] = {}
    metric: TaskLimit | None = None
    fix: bool = True
    forms: tuple[Form, ...] = ()
    float_constants: Literal["auto", "float32"] = "auto"
    # UNSET is left out of manifests: bundles without a forecast keep the bytes of earlier versions.
    forecast: ForecastGoal | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        # One that is made in Python is held to the types that a file is held to. Settings may be numbers; they are kept
        # as text.
        for field in msgspec.structs.fields(Recipe):
            if (given := getattr(self, field.name)) is msgspec.UNSET:
                continue
            if field.name == "settings" and isinstance(given, dict):
                given = {name: str(value) for name, value in given.items()}
            try:
                msgspec.structs.force_setattr(self, field.name, msgspec.convert(given, ready_type(field.type)))
            except msgspec.ValidationError as error:
                raise UsageError(
                    f"a Recipe has {given!r:.60} as '{field.name}': {error}",
                    hint=name_valid(str(error), field.type) or "help(edgekit.Recipe) says what it holds",
                ) from error


def load_recipe(path: AnyPath) -> Recipe:
    """Reads a recipe file.

    Raises:
        UsageError: the file cannot be read, is malformed, or has an unknown key.
    """
    return read_toml(as_path(path), Recipe, hint="--recipe takes a .toml file")


def load_metric(text: str) -> TaskLimit:
    """Returns the metric that --metric names: a name, `module:function`, or a `.toml` file with the keys of [metric].

    Raises:
        UsageError: the file cannot be read, is malformed, or has an unknown key.
    """
    if not text.endswith(".toml"):
        return TaskLimit(name=text)
    return read_toml(Path(text), TaskLimit, hint="--metric takes a name or a .toml")


def load_targets(recipe: Recipe) -> tuple[Target, ...]:
    """Returns the targets of a recipe with their parameters and thresholds set, each once.

    Raises:
        UsageError: a target, a parameter, its value or the precision does not exist for these targets.
    """
    names = [name for given in recipe.targets for name in find_group(given) or (given,)]
    loaded = [load_target(name) for name in dict.fromkeys(names)]
    for key in recipe.settings:
        if not any(key in target.parameters for target in loaded):
            valid = ", ".join(sorted({name for target in loaded for name in target.parameters})) or "none"
            raise UsageError(f"no target here has a parameter '{key}'", hint=f"parameters: {valid}")
    for key in recipe.thresholds:
        if key not in {target.name for target in loaded}:
            raise UsageError(f"the recipe has thresholds for '{key}', which is not built", hint="name a built target")
    targets: list[Target] = []
    for name, known in zip(dict.fromkeys(names), loaded, strict=True):
        mine = {key: value for key, value in recipe.settings.items() if key in known.parameters}
        wanted = recipe.forms or (_SHARING if recipe.buckets else ())
        target = _keep_forms(load_target(name, mine), wanted, recipe.buckets)
        choose_precision(target, recipe.precision)
        changes = recipe.thresholds.get(target.name, {})
        named = {"named": sorted(changes)} if changes else {}
        try:
            limits = msgspec.to_builtins(target.thresholds) | changes | named
            thresholds = msgspec.convert(limits, ready_type(Thresholds))
        except msgspec.ValidationError as error:
            hint = name_valid(str(error), Thresholds) or f"limits: {', '.join(Thresholds.__struct_fields__)}"
            raise UsageError(f"the recipe's [thresholds.{target.name}] is wrong: {error}", hint=hint) from error
        if recipe.max_drop is not None:
            least = 1 - recipe.max_drop / 100
            thresholds = msgspec.structs.replace(thresholds, min_top1_agreement=least, granted_samples=0)
        if recipe.metric is not None:
            thresholds = msgspec.structs.replace(thresholds, task=recipe.metric)
        targets.append(msgspec.structs.replace(target, thresholds=thresholds))
    return tuple(targets)


def takes_any_size(targets: Sequence[Target]) -> bool:
    """Returns True if dimensions may stay dynamic for all targets.

    ONNX Runtime's CPU provider takes any size, other providers those within their shape profiles.
    """
    return all(target.provider == CPU_PROVIDER or target.profiles for target in targets)


def refuse_profiles(targets: Sequence[Target], inputs: Sequence[TensorSpec]) -> None:
    """Refuses shape profiles that lack an input with dynamic dimensions, or do not fit the inputs of a model.

    Raises:
        UsageError: an input is missing or unknown, or a shape differs in its rank or in a fixed size.
    """
    open_inputs = {spec.name: spec for spec in inputs if not spec.is_static}
    for target in (target for target in targets if target.profiles):
        names, words = target.profiles[0].keys(), ", ".join(target.shape_profiles or ())
        if absent := sorted(open_inputs.keys() - names):
            raise UsageError(f"the profiles of '{target.name}' lack input '{absent[0]}'", hint=f"add it to {words}")
        for name, shape in ((name, shape) for profile in target.profiles for name, shape in profile.items()):
            wrong = f"the profiles of '{target.name}' name '{name}', which is no input"
            known = look_up({spec.name: spec for spec in inputs}, name, wrong)
            fixed = known.shape or shape
            pairs = zip(fixed, shape, strict=False)
            if len(fixed) != len(shape) or any(isinstance(size, int) and size != own for size, own in pairs):
                raise UsageError(f"the profile {name}:{'x'.join(map(str, shape))} does not fit {known}", hint=words)


def choose_precision(target: Target, wanted: PrecisionChoice) -> Precision:
    """Returns the precision to build a target with.

    Raises:
        UsageError: the target does not take the wanted precision.
    """
    if wanted == "auto":
        return target.precision
    if (precision := _NAMED[wanted]) not in target.precisions:
        hint = f"it takes {', '.join(target.precisions)}, or leave --precision out"
        raise UsageError(f"target '{target.name}' does not take {precision}: {target.precision_reason}", hint=hint)
    return precision


def _keep_forms(target: Target, wanted: Collection[Form], buckets: Collection[str]) -> Target:
    """Returns a target that loads only the wanted forms, also in its `verification`.

    Raises:
        UsageError: the target loads none of them, or `buckets` are wanted and a form cannot share weights.
    """
    alone = sorted(set(wanted) - set(_SHARING)) if buckets else ()
    if alone:
        words = f"the recipe wants the forms {', '.join(alone)}, which cannot share weights, and buckets"
        raise UsageError(words, hint='leave out forms, or say forms = ["onnx"]')
    forms = tuple(form for form in target.conversion.forms if not wanted or form in wanted)
    if not forms:
        loads = ", ".join(target.conversion.forms)
        words = f"target '{target.name}' loads none of the forms {', '.join(wanted)}"
        raise UsageError(words, hint=f"it loads {loads}")
    if forms == target.conversion.forms:
        return target
    return msgspec.structs.replace(
        target,
        conversion=msgspec.structs.replace(target.conversion, forms=forms, reason=_ONCE if buckets else _LEFT_OUT),
        verification=tuple(
            each if each.form in forms else msgspec.structs.replace(each, form=forms[0]) for each in target.verification
        ),
    )
