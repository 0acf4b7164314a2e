"""Reads an `edgekit.toml`: the models, data, targets, gates, devices and packages of an app.

Each error names line and column of its key. Python's TOML parser returns no positions, so this module finds them.
"""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import msgspec

from edgekit._files import AnyPath, as_path
from edgekit.data.images import Preprocess, load_preprocess
from edgekit.data.samples import FUNCTION
from edgekit.devices.find import DeviceChoice, DeviceEntry, ListedDevice, resolve_device
from edgekit.errors import UsageError, reraised, suggest_name
from edgekit.package.package import Kind
from edgekit.package.variant import Extra
from edgekit.recipe import Data, ModelOptions, PrecisionChoice, Recipe, load_targets
from edgekit.serialize import clean_schema, name_valid, read_toml, ready_type
from edgekit.target import TaskLimit, Thresholds, load_target

_Value = TypeVar("_Value")

FILE = "edgekit.toml"

KeyPath = tuple[str, ...]
"""A key, after the keys of the tables that it is in: `("models", "digits", "path")`."""


def find_position(text: str, key_path: KeyPath) -> tuple[int, int]:
    """Returns line and column, from 1, of a key, or of the innermost table around it that is in the text."""
    table, first, best, position = "", 0, 0, (1, 1)
    lines = text.splitlines()
    for last in range(1, len(lines) + 1):
        statement = "\n".join(lines[first:last])
        is_table = statement.lstrip().startswith("[")
        try:
            found: Any = tomllib.loads(statement if is_table else f"{table}\n{statement}")
        except tomllib.TOMLDecodeError:
            # The value continues in the next line, which may look like a key.
            continue
        depth = 0
        while depth < len(key_path) and isinstance(found, dict) and key_path[depth] in found:
            found, depth = cast("dict[str, Any]", found)[key_path[depth]], depth + 1
            found = found[-1] if isinstance(found, list) and found else found
        if depth > best:
            line = lines[first]
            inner = re.search(rf"[{{,]\s*[\"']?({re.escape(key_path[depth - 1])})[\"']?\s*=", line)
            column = inner.start(1) if inner else len(line) - len(line.lstrip())
            best, position = depth, (first + 1, column + 1)
        table, first = statement if is_table else table, last
    return position


class Source(msgspec.Struct, frozen=True):
    """A TOML file and its text; its errors name line and column of a key."""

    path: Path
    text: str

    def refuse(self, key_path: KeyPath, problem: str, *, hint: str) -> UsageError:
        """Returns an error about a key, with its line and column."""
        line, column = find_position(self.text, key_path)
        where = f"'{self.path}', line {line}, column {column}"
        return UsageError(f"{where}: {'.'.join(key_path)}: {problem}" if key_path else f"{where}: {problem}", hint=hint)

    def convert(self, value: object, kind: type[_Value], key_path: KeyPath) -> _Value:
        """Returns a table of the file as a struct.

        Raises:
            UsageError: it has an unknown key or a value of the wrong type, which is named with its line and column.
        """
        try:
            return msgspec.convert(value, ready_type(kind))
        except msgspec.ValidationError as error:
            problem, _, where = str(error).partition(" - at `$")
            unknown = re.search(r"unknown field `([^`]*)`", problem)
            inner = tuple(re.findall(r"\.([^.\[`]+)", where.replace("[...]", ""))) + ((unknown[1],) if unknown else ())
            hint = name_valid(str(error), kind) or "edgekit schema prints the keys"
            raise self.refuse((*key_path, *inner), problem, hint=hint) from error

    def require_name(self, name: str, known: Mapping[str, object], what: str, *place: str) -> None:
        """Checks that a name at the key `place` is one of those in `known`; `what` is the word for them.

        Raises:
            UsageError: there is no such name.
        """
        if name not in known:
            raise self.refuse(place, f"the file has no {what} '{name}'", hint=suggest_name(name, known))


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class DataTable(_Table, frozen=True, kw_only=True):
    """`[models.NAME.data]`: the options `--data`, `--eval`, `--labels`, `--preprocess`, `--samples` and `--golden`.

    `preprocess` is a table, or the path of its file. Paths are relative to the file that names them.
    """

    source: str
    evaluation: str | None = None
    labels: str | None = None
    preprocess: Preprocess | str | None = None
    samples: int | None = None
    golden: str | None = None


class ModelTable(ModelOptions, frozen=True, kw_only=True):
    """`[models.NAME]`: a model file, its samples, and build options; `targets` are all of the file by default."""

    path: str
    data: DataTable
    targets: tuple[str, ...] = ()


class GroupTable(_Table, frozen=True, kw_only=True):
    """`[groups.NAME]`: models that belong together, as for `edgekit group build`; `path` is their `group.toml`.

    `data` holds the inputs of the whole group, and in `labels` its expected results. `[gates]` does not apply to it:
    `group.toml` states its metric.
    """

    path: str
    data: DataTable
    targets: tuple[str, ...] = ()


class TargetTable(_Table, frozen=True, kw_only=True):
    """`[targets.NAME]`: a target with its parameters (`settings`) and limits (`thresholds`).

    `target` is its name or folder, if that is not NAME.
    """

    target: str = ""
    settings: dict[str, str | int] = {}
    precision: PrecisionChoice = "auto"
    thresholds: dict[str, Any] = {}
    fix: bool = True


class GateTable(_Table, frozen=True, kw_only=True):
    """`[gates]`: limits for every bundle: the options `--max-drop` and `--metric`."""

    max_drop: float | None = None
    metric: TaskLimit | None = None


class VerifyTable(_Table, frozen=True, kw_only=True):
    """`[verify]`: the devices to run on (those of the targets by default), and in `require` those that must run.

    A name may be that of a `[devices.NAME]`; `on_file` and `settings` are `--on-file` and `--set`. With
    `accept_unproven` bundles that are not proven are packed, and count as passed.
    """

    enabled: bool = True
    on: tuple[str, ...] = ()
    on_file: str | None = None
    settings: dict[str, str] = {}
    require: tuple[str, ...] = ()
    accept_unproven: bool = False

    @property
    def names_devices(self) -> bool:
        """True if the file names devices, so that those of the targets are not used."""
        return bool(self.on) or self.on_file is not None


class PackageTable(_Table, frozen=True, kw_only=True):
    """`[packages.NAME]`: bundles of one model, packed as by `edgekit package`; by default for all targets that fit."""

    kind: Kind = msgspec.field(name="as")
    model: str = ""
    targets: tuple[str, ...] = ()
    name: str = ""
    group: str = ""
    version: str = ""
    extras: tuple[Extra, ...] = msgspec.field(name="with", default=())
    allow_failed: bool = False


class KeyTable(_Table, frozen=True, kw_only=True):
    """`[keys]`: the private key that signs each bundle that may be released, and the public one (default: SIGN.pub).

    With it, packages contain only bundles that this key signed.
    """

    sign: str
    check: str = ""


class SweepTable(_Table, frozen=True, kw_only=True):
    """`[sweep]`: where cells are built and kept: the options `--workers`, `--scheduler` and `--store`.

    A store is a folder, relative to the file, or a URL that fsspec opens.
    """

    workers: int = 1
    scheduler: str | None = None
    store: str | None = None


class AppTable(_Table, frozen=True, kw_only=True):
    """An `edgekit.toml`; all results are written below `out`.

    `time_budget_s` limits planning and verification of a bundle, as `edgekit build --time-budget`; devices that
    `[verify]` names have limits of their own. `[commands.NAME]` holds options of other commands, which are used if
    `--config` names the file.
    """

    version: Literal[1] = 1
    out: str = "build"
    time_budget_s: float | None = None
    models: dict[str, ModelTable] = {}
    groups: dict[str, GroupTable] = {}
    targets: dict[str, TargetTable]
    gates: GateTable = GateTable()
    verify: VerifyTable = VerifyTable()
    devices: dict[str, DeviceEntry] = {}
    packages: dict[str, PackageTable] = {}
    keys: KeyTable | None = None
    sweep: SweepTable = SweepTable()
    commands: dict[str, dict[str, Any]] = {}


class App(msgspec.Struct, frozen=True, kw_only=True):
    """An `edgekit.toml` that was read: its path, to whose folder other paths are relative, and its content."""

    path: Path
    table: AppTable

    @property
    def out(self) -> Path:
        """The folder of the results."""
        return self.path.parent / self.table.out


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """A model, or a group of models (`path` is its `group.toml`), for one target: the arguments of its build."""

    model: str
    target: str
    path: Path
    data: Data
    recipe: Recipe
    is_group: bool = False

    @property
    def name(self) -> str:
        """The model and the target, as `--only` takes them."""
        return f"{self.model}/{self.target}"


def load_app(path: AnyPath) -> App:
    """Reads an `edgekit.toml`.

    Raises:
        UsageError: it cannot be read, is malformed, has an unknown key, or names something that does not exist.
    """
    path = as_path(path)
    hint, keys = "edgekit init MODEL writes one", f"the message names the place in what is to be an {FILE}"
    raw, source = read_toml(path, dict[str, Any], hint=hint, keys=keys), Source(path, path.read_text())
    # Entry by entry: in a table of tables msgspec's error names the key of a field, but not the name of the entry.
    kinds: dict[str, Any] = {
        "models": ModelTable,
        "groups": GroupTable,
        "targets": TargetTable,
        "devices": DeviceEntry,
        "packages": PackageTable,
    }
    tables: dict[str, Any] = {}
    for section, kind in kinds.items():
        section_table = raw.get(section, {})
        if isinstance(section_table, dict):
            entries = cast("dict[str, Any]", section_table)
            tables[section] = {name: source.convert(entry, kind, (section, name)) for name, entry in entries.items()}
    rest = source.convert({**raw, **{section: {} for section in tables}}, AppTable, ())
    for section, others in (("models", "groups"), ("targets", "targets")):
        if not tables.get(section) and not tables.get(others):
            raise UsageError(f"'{source.path}' has no [{section}.NAME]", hint=f"edgekit init MODEL writes an {FILE}")
    app = App(path=path, table=msgspec.structs.replace(rest, **tables))
    _check_names(app, source)
    return app


def list_cells(app: App) -> tuple[Cell, ...]:
    """Returns a cell for each model and each of its targets, in the order of the file; then those of the groups.

    Raises:
        EdgekitError: a preprocessing file or a target cannot be read.
    """
    folder, gates, cells = app.path.parent, app.table.gates, list[Cell]()
    subjects: dict[str, ModelTable | GroupTable] = {**app.table.models, **app.table.groups}
    for name, subject in subjects.items():
        data_table, model_options = subject.data, dict[str, Any]()
        preprocess = data_table.preprocess
        data = Data(
            source=_resolve_source(folder, data_table.source),
            evaluation=None if data_table.evaluation is None else _resolve_source(folder, data_table.evaluation),
            labels=None if data_table.labels is None else folder / data_table.labels,
            preprocess=load_preprocess(folder / preprocess) if isinstance(preprocess, str) else preprocess,
            golden=None if data_table.golden is None else folder / data_table.golden,
        )
        if isinstance(subject, ModelTable):
            model_options = {key: getattr(subject, key) for key in ModelOptions.__struct_fields__}
            model_options |= {"max_drop": gates.max_drop, "metric": gates.metric}
        for target in subject.targets or tuple(app.table.targets):
            table = app.table.targets[target]
            target_name = _name_target(app, target, table)
            recipe = Recipe(
                **model_options,
                samples=data_table.samples,
                targets=(target_name,),
                settings={key: str(value) for key, value in table.settings.items()},
                precision=table.precision,
                thresholds={load_target(target_name).name: table.thresholds} if table.thresholds else {},
                fix=table.fix,
            )
            path, is_group = folder / subject.path, isinstance(subject, GroupTable)
            cells.append(Cell(model=name, target=target, path=path, data=data, recipe=recipe, is_group=is_group))
    return tuple(cells)


def choose_for(app: App) -> DeviceChoice:
    """Returns the devices that `[verify]` names; no name means those of the targets.

    Raises:
        UsageError: a name in `[devices]` is malformed.
    """
    verify, known, folder = app.table.verify, app.table.devices, app.path.parent
    tables = {name: {"name": name, **msgspec.to_builtins(known[name])} for name in verify.on if name in known}
    words = f"'{app.path}': an entry of [devices] is malformed"
    malformed = UsageError(words, hint="a name has letters, digits and a few marks")
    with reraised(msgspec.ValidationError, malformed, quote=True):
        listed = [msgspec.convert(table, ready_type(ListedDevice)) for table in tables.values()]
    return DeviceChoice(
        names=tuple(name for name in verify.on if name not in known),
        file=None if verify.on_file is None else folder / verify.on_file,
        listed=tuple(resolve_device(entry, folder) for entry in listed),
        settings=verify.settings,
    )


def describe_schema() -> dict[str, Any]:
    """Returns the JSON Schema of `edgekit.toml`, which editors use (`#:schema FILE` in its first line)."""
    schema = msgspec.json.schema(AppTable)
    # The file may change single limits of a target, so none of them is required.
    (limits,), defined = msgspec.json.schema_components([Thresholds], ref_template="#/$defs/{name}")
    schema["$defs"] |= defined
    changes = {key: value for key, value in defined[limits["$ref"].rpartition("/")[2]].items() if key != "required"}
    schema["$defs"]["TargetTable"]["properties"]["thresholds"] = changes
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": FILE, **clean_schema(schema)}


def _resolve_source(folder: Path, source: str) -> str:
    """Returns a path relative to `folder`; `module:function` stays as it is."""
    return source if FUNCTION.fullmatch(source) else str(folder / source)


def _check_names(app: App, source: Source) -> None:
    """Checks the names of tables, the paths of models, and the settings of targets.

    Raises:
        UsageError: a table, a file or a setting does not exist, or a name is used twice.
    """
    table = app.table
    for section, subjects in (("models", table.models), ("groups", table.groups)):
        for name, subject in subjects.items():
            for wanted in subject.targets:
                source.require_name(wanted, table.targets, "target", section, name, "targets")
            path = app.path.parent / subject.path
            if not path.is_file():
                words = f"there is no {section.removesuffix('s')} '{path}'"
                raise source.refuse((section, name, "path"), words, hint="give its path")
    for name, group in table.groups.items():
        if name in table.models:
            raise source.refuse(("groups", name), f"a model is called '{name}', too", hint="give it another name")
        if group.data.golden is not None:
            raise source.refuse(("groups", name, "data", "golden"), "a group has no golden build", hint="leave it out")
    for name, entry in table.targets.items():
        # The target must have the parameters and limits that the file names.
        target_name = _name_target(app, name, entry)
        settings = {key: str(value) for key, value in entry.settings.items()}
        for key in ("target", "settings", "thresholds"):
            try:
                target = load_target(target_name, settings if key != "target" else {})
                if key == "thresholds" and entry.thresholds:
                    limits = {target.name: entry.thresholds}
                    load_targets(Recipe(targets=(target_name,), settings=settings, thresholds=limits))
            except UsageError as error:
                raise source.refuse(("targets", name, key), error.message, hint=error.hint or "") from error
    known = {**table.models, **table.groups}
    for name, package in table.packages.items():
        if not package.model and len(known) > 1:
            words = f"a package holds one model, and the file has {len(known)}"
            raise source.refuse(("packages", name), words, hint=f"add model = NAME: {', '.join(known)}")
        if package.model:
            source.require_name(package.model, known, "model", "packages", name, "model")
        for wanted in package.targets:
            source.require_name(wanted, table.targets, "target", "packages", name, "targets")


def _name_target(app: App, name: str, table: TargetTable) -> str:
    wanted = table.target or name
    return str(app.path.parent / wanted) if "/" in wanted else wanted
