"""Options that several commands share, how their values are parsed, and how devices and a model are opened by them."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import click
import msgspec
from click.core import ParameterSource

from edgekit._files import require_apart, require_place, write_file
from edgekit.bench.subject import Opening
from edgekit.cli.declare import Argument, From, Option, number
from edgekit.data.images import load_preprocess
from edgekit.devices.find import DeviceChoice
from edgekit.errors import UsageError, require_known, reraised
from edgekit.model.model import load_model
from edgekit.model.state import MOST_STEPS, State
from edgekit.recipe import PRECISIONS, Data, PrecisionChoice, Recipe, load_recipe


class _Time(click.ParamType[float]):
    """Seconds, as `90s`, `5m` or `1h`; a number alone counts seconds."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if (match := re.fullmatch(r"([0-9]{1,7}(?:\.[0-9]+)?) ?([smh]?)", str(value).strip())) is None:
            self.fail(f"'{value}' is no time: give 90s, 5m or 1h", param, ctx)
        return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


_EXAMPLES = {
    "--rename": "input.1=image", "--layout": "image=nhwc", "--dim": "batch=1", "--set": "api_level=31",
    "--shape": "image=1,3,224,224", "--freeze": "sr=16000", "--pad": "input_ids=1",
}  # fmt: skip


def parse_assignments(pairs: tuple[str, ...], option: str) -> dict[str, str]:
    """Returns NAME=VALUE pairs as a dict.

    Raises:
        UsageError: a pair has no `=`, no name, or a name comes twice.
    """
    parsed: dict[str, str] = {}
    for pair in pairs:
        # Names of tensors may contain "=", so the last one separates; a parameter's name cannot, but its value can.
        name, equals, value = pair.partition("=") if option == "--set" else pair.rpartition("=")
        if not equals or not name or not value:
            raise UsageError(f"{option} '{pair}' is not NAME=VALUE", hint=f"for example {option} {_EXAMPLES[option]}")
        if name in parsed:
            raise UsageError(f"{option} gives '{name}' twice", hint="give each name once")
        parsed[name] = value
    return parsed


# Takes an option's word, a name and its value.
_Parse = Callable[[str, str, str], Any]


def _parse_size(option: str, name: str, value: str) -> int:
    # `isdigit` is also true for superscripts and digits of other scripts.
    if not value.isascii() or not value.isdigit() or not int(value) < 2**31:
        hint = "one size here: edgekit build takes several" if "," in value else "a whole number from 0 to 2147483647"
        raise UsageError(f"{option} {name}={value}: '{value}' is no size", hint=hint)
    return int(value)


def _parse_number(option: str, name: str, text: str) -> float:
    wrong = UsageError(f"{option} {name}={text}: '{text}' is no number", hint=f"for example {_EXAMPLES[option]}")
    with reraised(ValueError, wrong):
        return int(text) if text.lstrip("-").isdigit() else float(text)


def name_values(help_text: str, metavar: str, words: str = "", parse_one: _Parse | None = None) -> Option:
    """Returns an option of NAME=VALUE pairs, parsed into a dict; `parse_one` converts each value (default: text)."""

    def parse(_context: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> dict[str, Any]:
        option = parameter.opts[0]
        parsed = parse_assignments(given, option)
        return {name: value if parse_one is None else parse_one(option, name, value) for name, value in parsed.items()}

    return Option(help_text, metavar, words, multiple=True, callback=parse)


ModelFile = Annotated[Path, Argument()]
ModelFiles = Annotated[tuple[Path, ...], Argument()]
DataSource = Annotated[str, Option("Sample inputs: .npz, folder, or module:function.", "DATA")]
PreprocessFile = Annotated[Path | None, Option("How images become inputs of the model (.toml).", "FILE")]
EvaluationSource = Annotated[str | None, Option("Samples to verify with; default: some of --data.", "DATA", "--eval")]
TargetNames = Annotated[
    tuple[str, ...],
    Option(
        "A target, its folder, or those of phones and boards (all), of PCs (pc), or of this machine (auto).",
        "NAME",
        "--target",
        default=("all",),
    ),
]
TargetName = Annotated[str, Option("A target, its folder, or this machine's (auto).", "NAME")]
Settings = Annotated[dict[str, str], name_values("A parameter of the target.", "NAME=VALUE", "--set")]
Dims = Annotated[dict[str, int], name_values("The size of a dynamic dimension.", "NAME=INT", "--dim", _parse_size)]
DimsOrBuckets = Annotated[
    tuple[str, ...],
    Option("The size of a dynamic dimension; several give a model for each.", "NAME=INT[,INT...]", "--dim"),
]
Pad = Annotated[
    dict[str, float],
    name_values("The value that pads an input to the next size (default 0).", "INPUT=NUMBER", "", _parse_number),
]
Shapes = Annotated[tuple[str, ...], Option("All dimensions of an input.", "INPUT=1,3,224,224", "--shape")]
Freeze = Annotated[
    dict[str, float],
    name_values("Make an input a constant; the data may still contain it.", "INPUT=NUMBER", "", _parse_number),
]
SampleCount = Annotated[int | None, number("Use at most N samples.", 1, metavar="N")]
Steps = Annotated[
    int | None,
    number("N samples in a row are one sequence: state is passed from each to the next.", 1, MOST_STEPS, metavar="N"),
]
PrecisionWord = Annotated[
    PrecisionChoice | None, Option("Default: auto.", type=click.Choice(PRECISIONS, case_sensitive=False))
]
RecipeFile = Annotated[Path | None, Option("These options in a .toml file.", "FILE")]
CacheFolder = Annotated[Path | None, Option("Keep the calibration here; an interrupted one continues.", "DIR")]
CustomOps = Annotated[tuple[Path, ...], Option("A library with custom operators; its code is run.", "LIB.so")]
PublicKey = Annotated[Path | None, Option("Refuse what the owner of this public key (PEM) did not sign.", "FILE")]
HtmlFile = Annotated[Path | None, Option("Write an HTML page as well.", "FILE")]
Metric = Annotated[str | None, Option("A metric with labels: top1, miou, wer, ..., module:function, or .toml.", "NAME")]
MetricDrop = Annotated[float | None, number("Largest drop of the metric below the float model, in points.", 0)]
AcceptUnproven = Annotated[bool, Option('Count a verdict of "not proven" as a pass; the result says so.')]


def require_places(outputs: Iterable[Path | None], inputs: Iterable[Path | None]) -> None:
    """Checks the paths of files to write, before any work is done.

    Raises:
        UsageError: an output is an input, or two outputs are one file.
        OutputError: an output cannot be written.
    """
    written = [path for path in outputs if path is not None]
    require_apart(written, [path for path in inputs if path is not None])
    for path in written:
        require_place(path)


def write_page(path: Path | None, draw: Callable[[], str]) -> None:
    """Writes a page, if a path for it was given: `draw` makes its text."""
    if path is not None:
        write_file(path, draw().encode())


_FILES = {".aar", ".gz", ".html", ".json", ".mlpackage", ".npz", ".onnx", ".ort", ".tar", ".tflite", ".txt", ".zip"}


def require_suffix(out: Path | None, suffix: str = "") -> None:
    """Checks that what is written has no name of another kind of file; a folder has the suffix "".

    Raises:
        UsageError: it has.
    """
    if out is not None and out.suffix.lower() in _FILES - {suffix}:
        hint = f"give --out {out.with_suffix(suffix)}"
        raise UsageError(f"--out '{out}' would be {f'a {suffix} file' if suffix else 'a folder'}", hint=hint)


def list_given() -> frozenset[str]:
    """Returns the words of the options, and the names of the arguments, that are given on the command line."""
    context, default = click.get_current_context(), ParameterSource.DEFAULT
    given = (it for it in context.command.params if context.get_parameter_source(it.name or "") is not default)
    return frozenset(max(it.opts, key=len) for it in given if context.params[it.name or ""] is not False)


def refuse_unused(unused: str, reason: str) -> None:
    """Checks that none of some options (their words, separated by spaces) is given; `reason` is the hint.

    Raises:
        UsageError: one is given.
    """
    given = list_given()
    for option in unused.split():
        if option in given:
            raise UsageError(f"{option} means nothing here", hint=reason)


def require_with(*pairs: tuple[str, str]) -> None:
    """Checks options that need another one: each pair has some options, and the option that they need.

    Raises:
        UsageError: one is given without the option that it needs.
    """
    given = list_given()
    for dependents, needed in pairs:
        for option in dependents.split():
            if option in given and needed.split()[0] not in given:
                raise UsageError(f"{option} needs {needed}", hint=f"add {needed}")


def max_drop(help_text: str) -> Option:
    """Returns the option --max-drop, a percentage."""
    return number(help_text, 0, 100, metavar="PCT")


def time_budget(help_text: str) -> Option:
    """Returns the option --time-budget, a time."""
    return Option(f"{help_text} (90s, 5m, 1h).", "60s", type=_Time())


def verify_option(what: str) -> Option:
    """Returns the option --verify/--no-verify of a build of bundles or groups."""
    help_text = f"Run each {what} on the emulators and simulators of its device that this machine has."
    return Option(help_text, words="--verify/--no-verify", default=True)


def parse_buckets(dims: tuple[str, ...], shapes: tuple[str, ...], path: Path) -> dict[str, dict[str, Any]]:
    """Returns --dim and --shape as the tables of a recipe: `dims` of one size, `buckets` of several (NAME=INT,INT).

    Raises:
        EdgekitError: one is malformed, or contradicts the model.
    """
    given = parse_assignments(dims, "--dim")
    several = {name: value.split(",") for name, value in given.items() if "," in value}
    single = {name: _parse_size("--dim", name, value) for name, value in given.items() if name not in several}
    buckets = {name: tuple(_parse_size("--dim", name, size) for size in sizes) for name, sizes in several.items()}
    return {"dims": {**single, **_parse_shapes(shapes, path)}, "buckets": buckets}


def choose_sizes(dims: Dims, shapes: Shapes) -> dict[str, int]:
    """Returns the sizes of --dim with those of --shape, for the model that is the command's first argument.

    Raises:
        EdgekitError: a --shape is malformed, or contradicts the model.
    """
    context = click.get_current_context()
    path = next(context.params[each.name or ""] for each in context.command.params if isinstance(each, click.Argument))
    return {**dims, **_parse_shapes(shapes, path)}


Sizes = Annotated[dict[str, int], From(choose_sizes)]


def _parse_shapes(pairs: tuple[str, ...], path: Path) -> dict[str, int]:
    """Returns --shape INPUT=1,3,224,224 pairs as sizes of the dynamic dimensions, by name or as INPUT:AXIS.

    A name that gets several sizes, as exporters give axes that have nothing in common, does not count.

    Raises:
        EdgekitError: a pair is malformed, names no input, or contradicts a dimension that the model fixes.
    """
    if pairs and path.is_dir():
        raise UsageError(f"--shape is for a model, and '{path}' is a folder", hint="a bundle has its sizes")
    specs = {spec.name: spec for spec in load_model(path).inputs} if pairs else {}
    sizes, named = dict[str, int](), dict[str, dict[str, int]]()
    for name, text in parse_assignments(pairs, "--shape").items():
        require_known(name, specs, f"the model has no input '{name}'")
        given = [_parse_size("--shape", name, size.strip()) for size in text.split(",")]
        # An input of unknown rank takes any number of axes.
        dims = specs[name].shape or tuple(None for _ in given)
        if len(dims) != len(given) or any(isinstance(w, int) and w != g for w, g in zip(dims, given, strict=True)):
            hint = "the model fixes the numbers" if len(dims) == len(given) else "one size an axis"
            raise UsageError(f"--shape {name}={text} does not fit the model's {specs[name]}", hint=hint)
        for axis, (dim, size) in enumerate(zip(dims, given, strict=True)):
            if not isinstance(dim, int):
                named.setdefault(dim or f"{name}:{axis}", {})[f"{name}:{axis}"] = size
    for dim, own in named.items():
        sizes |= own if len({*own.values()}) > 1 else {dim: next(iter(own.values()))}
    return sizes


def split_names(names: str | None) -> tuple[str, ...]:
    """Returns the names of a comma-separated list; none for None."""
    return tuple(name.strip() for name in names.split(",") if name.strip()) if names else ()


def choose_recipe(
    path: Path | None, tables: Mapping[str, Any], values: Mapping[str, Any], steps: int | None = None
) -> Recipe:
    """Returns the recipe of a file, changed by options: entries of tables, and values.

    A value of None or () was not given, and leaves the recipe as it is.

    Raises:
        UsageError: the recipe cannot be read.
    """
    base = load_recipe(path) if path else Recipe()
    merged = {key: {**getattr(base, key), **table} for key, table in tables.items()}
    given = {key: value for key, value in values.items() if value not in (None, ())}
    if steps is not None:
        given["state"] = msgspec.structs.replace(base.state or State(), steps=steps)
    return msgspec.structs.replace(base, **merged, **given)


def read_data(source: str, preprocess: Path | None, **files: Any) -> Data:
    """Returns the data of --data and --preprocess; `files` are further fields of `Data`.

    Raises:
        DataError: the preprocessing file cannot be read.
    """
    return Data(source=source, preprocess=load_preprocess(preprocess) if preprocess else None, **files)


SessionTarget = Annotated[
    str | None, Option("Open a model with the session options of this target, or of this machine's (auto).", "NAME")
]
Threads = Annotated[int, number("Threads; 0: ONNX Runtime chooses.", 0, 256, metavar="N", default=0)]
FirstSample = Annotated[str | None, Option("Run the first sample of DATA. Default: a golden or a random one.", "DATA")]


def choose_devices(
    names: Annotated[tuple[str, ...], Option("A device; may be given several times.", "DEVICE", "--on")],
    on_file: Annotated[Path | None, Option("The devices that a devices.toml lists.", "FILE")],
    settings: Annotated[
        dict[str, str], name_values("A setting of the device android, as phone=pixel-6.", "NAME=VALUE", "--set")
    ],
) -> DeviceChoice:
    """Returns the devices that --on, --on-file and --set name."""
    return DeviceChoice(names=names, file=on_file, settings=settings)


Devices = Annotated[DeviceChoice, From(choose_devices)]
Required = Annotated[tuple[str, ...], Option("Like --on, but it is a failure if it cannot run.", "DEVICE", "--require")]


def add_required(choice: DeviceChoice, required: Sequence[str]) -> DeviceChoice:
    """Returns a choice of devices that also names the required ones."""
    return msgspec.structs.replace(choice, names=tuple(dict.fromkeys((*choice.names, *required))))


def choose_opening(target: SessionTarget, dims: Sizes, freeze: Freeze, data: FirstSample) -> Opening:
    """Returns how a bundle or a model is opened."""
    return Opening(target=target, data=data, dims=dims, freeze=freeze)


ModelOpening = Annotated[Opening, From(choose_opening)]
