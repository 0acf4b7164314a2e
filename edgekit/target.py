"""A target: an execution provider on a kind of device, described in `targets/<name>/target.toml`."""

import itertools
import operator
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from edgekit.errors import TargetError, UsageError, look_up, require_known, suggest_name
from edgekit.phones import find_phone, read_phones
from edgekit.serialize import read_toml

Precision = Literal["int8", "int16", "w4a16", "w4a8", "fp16", "fp32"]
"""What a model is built in. int8 has 8 bits for weights and activations; int16 has 8 for weights and 16 for
activations; w4a16 and w4a8 have 4 for weights."""
INTEGERS: tuple[Precision, ...] = ("int8", "int16", "w4a16", "w4a8")
"""The precisions of quantized models: they need calibration samples."""
Form = Literal["onnx", "full", "runtime", "context"]


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Parameter(_Strict, frozen=True, kw_only=True):
    """A property of the device that changes placement or conversion, such as its SoC or API level.

    As far as these are set, a value must be one of `choices`, match the regular expression `pattern` as a whole, and be
    an integer from `minimum` to `maximum`. `implies` maps a value to the values that other parameters get by it.
    `names` is a file of devices (`phones.py`): a value is then a device's name, and sets the parameters of its chip.
    """

    description: str
    default: str
    choices: tuple[str, ...] = ()
    pattern: str = ""
    minimum: int | None = None
    maximum: int | None = None
    names: str = ""
    implies: dict[str, dict[str, str]] = {}


class IntegerTypes(_Strict, frozen=True, kw_only=True):
    """What an integer precision changes of a `Quantization`; None is as in int8.

    `weight_bits` applies to weights with a scale per channel, but for depthwise and transposed convolutions, which keep
    8. `weight_block` is how many weights share a scale, 0 for a scale per channel.
    """

    activation: Literal["uint8", "int8", "uint16"] | None = None
    weight_bits: Literal[4, 8] | None = None
    weight_block: Literal[0, 16, 32, 64, 128] | None = None


class IntegerScheme(_Strict, frozen=True, kw_only=True):
    """Which integers a target wants, or a plan chooses, and where Q and DQ nodes stand.

    `scheme` says where ONNX Runtime's quantizer places Q and DQ nodes: by its rules for QNN, or by its general ones.
    With `reduce_range`, weights have 7 bits. All inputs and the output of an operator of `shared_ops` get one scale.
    Weights of `unsigned_ops` are stored as uint8 with a zero point of 128 instead of int8, with the same values. With
    `float_bias`, biases stay float instead of int32.
    """

    scheme: Literal["qnn", "ort"]
    activation: Literal["uint8", "int8", "uint16"]
    weight: Literal["uint8", "int8"]
    reduce_range: bool = False
    shared_ops: tuple[str, ...] = ()
    unsigned_ops: tuple[str, ...] = ()
    float_bias: bool = False


class Quantization(IntegerScheme, frozen=True, kw_only=True):
    """How the provider wants a quantized model: in int8, and what is different in other `precisions`.

    Only operators of `op_types` are quantized (empty: all that can be), and none of `float_ops`, which the provider
    takes in float only. Weights of `per_channel_ops` get a scale per output channel. With a `weight_block`, a MatMul
    with an input of three dimensions and weights of 4 bits becomes a MatMulNBits with blocks of this size.
    """

    activation_symmetric: bool = False
    weight_symmetric: bool = True
    per_channel_ops: tuple[str, ...] = ()
    op_types: tuple[str, ...] = ()
    float_ops: tuple[str, ...] = ()
    weight_bits: Literal[4, 8] = 8
    weight_block: Literal[0, 16, 32, 64, 128] = 0
    precisions: dict[Precision, IntegerTypes] = {}

    def at(self, precision: Precision) -> "Quantization":
        """Returns the settings of an integer precision."""
        types = self.precisions.get(precision, IntegerTypes())
        given = {name: getattr(types, name) for name in IntegerTypes.__struct_fields__}
        return msgspec.structs.replace(self, **{name: it for name, it in given.items() if it is not None})


class Conversion(_Strict, frozen=True, kw_only=True):
    """Which files the target loads: `forms` in the order of preference, the first is the one an app should load.

    `unusable` maps other forms to the reason why the provider cannot use them. Without `saves_fusions`, an ORT file of
    the runtime style has no saved fusions for nodes on the CPU. A provider that changes the layout of the graph at load
    inserts Transposes between such nodes, and replaying the fusions would drop these.
    """

    forms: tuple[Form, ...]
    cpu: Literal["arm", "x64"]
    reason: str
    unusable: dict[Form, str] = {}
    saves_fusions: bool = True


class Platform(_Strict, frozen=True, kw_only=True):
    """What an app needs on one operating system.

    `minimum_os` is its oldest version (on Android the API level), "" if not known. `runtime` names the package of ONNX
    Runtime with the provider. `load_target` adds the session's `provider_options` to those here.
    """

    minimum_os: str = ""
    runtime: str = ""
    provider_options: dict[str, str] = {}


class ChainedProvider(_Strict, frozen=True, kw_only=True):
    """A provider that a session gets after the target's own, with its options."""

    provider: str
    provider_options: dict[str, str] = {}


class Session(_Strict, frozen=True, kw_only=True):
    """What an app must pass when it makes a session; `{name}` in a value is replaced by the value of that parameter.

    An option whose value is then empty is left out, so that the provider's default applies. `config` holds session
    config entries. `chain` lists the providers after the target's own and before the CPU. `platforms` holds the
    operating systems that have the provider, by name: android, ios, linux, macos, windows.
    """

    provider_options: dict[str, str] = {}
    config: dict[str, str] = {}
    platforms: dict[str, Platform] = {}
    chain: tuple[ChainedProvider, ...] | msgspec.UnsetType = msgspec.UNSET


class Verification(_Strict, frozen=True, kw_only=True):
    """A stand-in for the target's devices: its name, the form that it runs, and how many samples it gets at most."""

    device: str
    form: Form
    samples: int


class TaskLimit(_Strict, frozen=True, kw_only=True):
    """A metric of the task against labels, and how much worse than the float model a run may be.

    `name` is a metric (`edgekit verify --help` lists them) or `module:function`; `output` the output that it needs,
    several separated by commas, "" for the first that fits. `decoder` with `alphabet` and `blank` turns an output into
    text. `positive` is the class whose score an AUC ranks, `ignore` the class of a mask that does not count, `peak` the
    largest value of an image. `higher_is_better` is for a `module:function`.

    There are three limits. `max_drop` is the largest drop below the float model, in points (hundredths of a share,
    decibels, or the function's own unit). `min_share` is the least share of the float model's value: 0.98 is 98 % of
    it. `at_least` is the least value. The whole 95 % interval must keep the first two limits; with `gate = "estimate"`
    only the measured value must.
    """

    name: str
    output: str = ""
    decoder: str = ""
    alphabet: str = ""
    blank: int = 0
    positive: int = 1
    ignore: int = 255
    peak: float | None = None
    higher_is_better: bool = True
    max_drop: float | None = None
    min_share: float | None = None
    at_least: float | None = None
    gate: Literal["bound", "estimate"] = "bound"


_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Ratio = Annotated[float, msgspec.Meta(gt=0)]


class Thresholds(_Strict, frozen=True, kw_only=True):
    """What a run must reach to pass, over all samples, output by output.

    `min_top1_agreement` is the least share of decisions that agree with the float model (classes, places of a map,
    steps of a sequence, detections); with classes, `granted_samples` more may disagree. `min_agreement` is the least
    share of the variance of values and images, and of the similarities between vectors, that must be kept. Where a
    figure misses its limit, but perhaps by chance, the verdict is "not proven". `min_cosine` and `min_sqnr_db` apply to
    outputs of unknown meaning, and wherever `named`, the limits that the user set, contains them.

    `max_cpu_nodes` limits the nodes that a provider leaves to the CPU; None sets no limit. `min_taken_macs` is the
    least share of the multiply-accumulates that the provider must take for the target to be useful.

    With `gate = "bound"`, the lower end of the 95 % interval of an agreement or SQNR must keep the limit, and no sample
    is granted: few samples then do not pass by luck. Shipped targets gate the point estimates ("estimate"), because an
    emulator runs too few samples to prove 90 %. `max_latency_ratio` and `max_memory_ratio` are relative to a reference
    run on the same device; `max_size_bytes` and `max_size_share` (of the float model) limit the model file that an app
    loads. `task` is a metric that needs labels.

    `max_lost_share` is the largest share of the multiply-accumulates (of nodes: four times that) that may run on the
    CPU against the prediction. With `needs_placement`, a run must have observed what the provider takes; a prediction
    is then not enough.
    """

    min_cosine: Annotated[float, msgspec.Meta(ge=-1, le=1)]
    min_top1_agreement: _Share
    min_sqnr_db: Annotated[float, msgspec.Meta(ge=-200, le=200)]
    granted_samples: _Count = 0
    max_cpu_nodes: _Count | None = None
    min_taken_macs: _Share = 0.0
    gate: Literal["estimate", "bound"] = "estimate"
    max_latency_ratio: _Ratio | None = None
    max_memory_ratio: _Ratio | None = None
    max_size_bytes: _Count | None = None
    max_size_share: _Ratio | None = None
    max_lost_share: _Share = 0.05
    needs_placement: bool = False
    max_drift_db: Annotated[float, msgspec.Meta(ge=0, le=400)] | None = 12.0
    task: TaskLimit | None = None
    min_agreement: _Share = 0.9
    named: tuple[str, ...] = ()


class Variant(_Strict, frozen=True, kw_only=True):
    """What is different about a target if its parameters have the values in `when`; None means no difference.

    `provider_options` are added to those of the session.
    """

    when: dict[str, str]
    provider_options: dict[str, str] = {}
    precisions: tuple[Precision, ...] | None = None
    precision_reason: str | None = None
    quantization: Quantization | None = None
    conversion: Conversion | None = None
    verification: tuple[Verification, ...] | None = None


class Target(_Strict, frozen=True, kw_only=True):
    """Everything edgekit knows about a target, with `settings` holding the value of each parameter.

    `minimum_ort` is the oldest ONNX Runtime whose provider was seen to do what is described here; in `target.toml` it
    may be `{name}`, the value of a parameter.

    `fallback` are the targets that an app tries next if this one cannot run; the last, "cpu", is ONNX Runtime's own
    provider, which also runs the files of the others if there is no bundle for it. `socs` names the values of the
    parameter `soc_model`. `rewrites` are the rewrites that every model for the target gets, also where the provider
    takes no more nodes by them. `float_rewrites` are further ones for models that stay float: they may write operators
    that only this provider has.
    `float_bits` is the width in which its provider computes floats, whatever their type in the file. `shape_profiles`
    names the parameters with the smallest, the usual and the largest shapes of inputs: if they are set, dimensions may
    stay dynamic.
    """

    name: str
    title: str
    provider: str
    minimum_ort: str
    runtime: str
    precisions: tuple[Precision, ...]
    precision_reason: str
    parameters: dict[str, Parameter] = {}
    quantization: Quantization
    conversion: Conversion
    session: Session
    variants: tuple[Variant, ...] = ()
    verification: tuple[Verification, ...]
    thresholds: Thresholds
    fallback: tuple[str, ...] = ("cpu",)
    socs: dict[str, str] = {}
    rewrites: tuple[str, ...] = ()
    float_rewrites: tuple[str, ...] = ()
    float_bits: Literal[16, 32] = 32
    shape_profiles: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    settings: dict[str, str] = {}
    folder: Path = Path()

    @property
    def precision(self) -> Precision:
        """The precision that "auto" stands for."""
        return self.precisions[0]

    @property
    def is_for_phones(self) -> bool:
        """True if a phone's operating system has the provider."""
        return not {"android", "ios"}.isdisjoint(self.session.platforms)

    @property
    def profiles(self) -> tuple[dict[str, tuple[int, ...]], ...]:
        """The smallest, the usual and the largest shapes of the inputs, by name; () if none are set."""
        given = [self.settings.get(name, "") for name in self.shape_profiles or ()]
        entries = [[entry.rpartition(":") for entry in text.split(",") if entry] for text in given]
        shapes = ({name: tuple(map(int, shape.split("x"))) for name, _, shape in each} for each in entries)
        return tuple(shapes) if any(given) else ()

    def widens(self, precision: Precision) -> bool:
        """Returns True if single activations may get 16 bits in this precision, which has 8 for the others."""
        return "int16" in self.precisions and self.quantization.at(precision).activation != "uint16"


def read_version(version: str) -> tuple[int, ...]:
    """Returns a version such as "1.31.1" as numbers that compare, with 0 for a part that is no number."""
    return tuple(int(part) if part.isascii() and part.isdigit() else 0 for part in version.split("."))


_GROUPS = ("all", "pc")


def target_names() -> tuple[str, ...]:
    """Returns the names of the targets that edgekit ships, sorted."""
    return tuple(sorted(path.parent.name for path in targets_folder().glob("*/target.toml")))


def find_group(name: str) -> tuple[str, ...]:
    """Returns the targets of the group "all" (for phones and boards) or "pc" (for PCs alone), none for other names."""
    if name not in _GROUPS:
        return ()
    return tuple(known for known in target_names() if load_target(known).is_for_phones == (name == "all"))


def load_target(name: str, settings: Mapping[str, str | float] | None = None) -> Target:
    """Returns a target by name or by the path of its folder, with parameters set.

    Raises:
        UsageError: there is no such target or parameter, or a parameter's value is not allowed.
        TargetError: `target.toml` is malformed, or names a form that its provider cannot use.
    """
    folder = targets_folder() / name if name in target_names() else Path(name)
    if not folder.is_dir() and "," in name:
        each = " ".join(f"--target {part.strip()}" for part in name.split(","))
        raise UsageError(f"there is no target '{name}'", hint=f"name each by itself: {each}")
    if not folder.is_dir():
        raise UsageError(f"there is no target '{name}'", hint=suggest_name(name, (*target_names(), *_GROUPS, "auto")))
    target = _read_target(folder)
    chosen = {key: parameter.default for key, parameter in target.parameters.items() if not parameter.names}
    _refuse_unusable(target, folder)
    named = _name_settings(target, folder, {key: str(value) for key, value in (settings or {}).items()})
    given = {key: _check_setting(target, key, value) for key, value in named.items()}
    for key, value in given.items():
        for other, its in target.parameters[key].implies.get(value, {}).items():
            # Both may be given if one implies the other: a SoC has one architecture, an architecture many SoCs.
            back = target.parameters[other].implies.get(given.get(other, ""), {}).get(key)
            if given.get(other, its) != its and back != value:
                words = f"'{key}={value}' contradicts '{other}={given[other]}'"
                raise UsageError(words, hint=f"{key} {value} means {other} {its}")
            chosen[other] = its
    chosen |= given
    target = msgspec.structs.replace(target, settings=chosen, folder=folder)
    for variant in target.variants:
        if variant.when.items() <= target.settings.items():
            options = {**target.session.provider_options, **variant.provider_options}
            session = msgspec.structs.replace(target.session, provider_options=options)
            kept = {name: it for name in _VARIED if (it := getattr(variant, name)) is not None}
            target = msgspec.structs.replace(target, session=session, **kept)
    _refuse_profiles(target)
    session = Session(
        provider_options=_fill(target.session.provider_options, chosen),
        config=_fill(target.session.config, chosen),
        platforms={
            name: Platform(
                minimum_os=platform.minimum_os.format_map(chosen),
                runtime=platform.runtime or target.runtime,
                provider_options=_fill({**target.session.provider_options, **platform.provider_options}, chosen),
            )
            for name, platform in target.session.platforms.items()
        },
        chain=tuple(
            ChainedProvider(provider=each.provider, provider_options=_fill(each.provider_options, chosen))
            for each in target.session.chain or ()
        )
        or msgspec.UNSET,
    )
    return msgspec.structs.replace(target, session=session, minimum_ort=target.minimum_ort.format_map(chosen))


def _read_target(folder: Path) -> Target:
    hint, keys = "a target is a folder with target.toml", f"compare it with '{targets_folder()}'"
    return read_toml(folder / "target.toml", Target, hint=hint, keys=keys, error=TargetError)


def _refuse_unusable(target: Target, folder: Path) -> None:
    """Refuses forms that the provider cannot use; a user's own target inherits `unusable` of shipped ones."""
    unusable = dict(target.conversion.unusable)
    if folder.parent != targets_folder():
        shipped = (_read_target(targets_folder() / name) for name in target_names())
        for one in (one for one in shipped if one.provider == target.provider):
            unusable |= one.conversion.unusable
    variants = (variant.conversion for variant in target.variants if variant.conversion is not None)
    for form in (form for conversion in (target.conversion, *variants) for form in conversion.forms):
        if form in unusable:
            raise TargetError(
                f"target '{target.name}' has the form '{form}', which {target.provider} cannot use: {unusable[form]}",
                hint=f"leave '{form}' out of its forms",
            )


def targets_folder() -> Path:
    """Returns the folder of the shipped targets and of the data about their devices."""
    shipped = Path(__file__).parent / "_targets"
    return shipped if shipped.is_dir() else Path(__file__).parent.parent / "targets"


def _name_settings(target: Target, folder: Path, settings: Mapping[str, str]) -> dict[str, str]:
    """Returns settings with the parameters of a device's chip in place of the device's name."""
    named = dict(settings)
    for key, parameter in target.parameters.items():
        if not parameter.names or key not in named:
            continue
        phone = find_phone(named.pop(key), read_phones(folder / parameter.names))
        stands_for = {"soc_model": str(phone.soc_model), "htp_arch": str(phone.htp)}
        if str(phone.htp) not in target.parameters["htp_arch"].choices:
            words = f"{phone.name} has HTP v{phone.htp}, which {target.provider} does not run on"
            raise UsageError(words, hint="it begins with v68: build for xnnpack or cpu there")
        for other, its in stands_for.items():
            if named.setdefault(other, its) != its:
                words = f"'{other}={named[other]}' contradicts '{key}={phone.name}'"
                raise UsageError(words, hint=f"its {other} is {its}")
    return named


def _check_setting(target: Target, key: str, value: str) -> str:
    parameter = look_up(target.parameters, key, f"target '{target.name}' has no parameter '{key}'")
    wrong = f"'{value}' is no {key} of '{target.name}'"
    if parameter.choices:
        require_known(value, parameter.choices, wrong)
    if parameter.pattern and not re.fullmatch(parameter.pattern, value):
        raise UsageError(wrong, hint=f"{key}: {parameter.description}")
    if parameter.minimum is not None or parameter.maximum is not None:
        low, high = parameter.minimum or 0, parameter.maximum
        if not re.fullmatch(r"\d{1,9}", value) or int(value) < low or (high is not None and int(value) > high):
            top = "" if high is None else f" to {high}"
            raise UsageError(wrong, hint=f"a whole number from {low}{top}")
    return value


def _refuse_profiles(target: Target) -> None:
    """Refuses shape profiles unless all name the same inputs, with sizes that do not fall from one to the next."""
    shapes = target.profiles
    names = ", ".join(target.shape_profiles or ())
    for one, other in itertools.pairwise(shapes):
        for name in sorted(one.keys() | other.keys()):
            low, high = one.get(name), other.get(name)
            if low is None or high is None or len(low) != len(high) or any(map(operator.gt, low, high)):
                said = " to ".join(str(each.get(name)) for each in shapes)
                hint = f"{names}: shapes of as many axes for the same inputs, none smaller than in the one before"
                raise UsageError(f"the profiles of input '{name}' do not rise: {said}", hint=hint)


_VARIED = tuple(name for name in Variant.__struct_fields__ if name not in {"when", "provider_options"})


def _fill(entries: Mapping[str, str], settings: Mapping[str, str]) -> dict[str, str]:
    filled = {key: value.format_map(settings) for key, value in entries.items()}
    return {key: value for key, value in filled.items() if value}
