"""The generated reference holds every command with its options, every key of the files, and every public name."""

import json
import re
import sys
import tomllib

import click
import jsonschema
import msgspec
import pytest
from doc_pages import PAGES, ROOT

import edgekit
from edgekit.cli.main import COMMANDS, group
from edgekit.devices.find import list_devices
from edgekit.evidence import Evidence
from edgekit.prepare.clean import CLEANING
from edgekit.prepare.fix import REWRITES
from edgekit.verify.task_metrics import METRICS

sys.path.insert(0, str(ROOT / "tools"))

from docs_reference import REPORTS, WRITTEN, list_commands, render_reference
from docs_targets import render_target
from docs_types import find_structs

REFERENCE = render_reference()


def _section(page: str, heading: str) -> str:
    found = re.search(rf"^##+ {re.escape(heading)}(?: \{{[^}}]*\}})?$(.*?)(?=^##+ |\Z)", page, re.DOTALL | re.MULTILINE)
    assert found is not None, heading
    return found[1]


def test_every_command_is_listed() -> None:
    assert {name.split()[1] for name, _ in list_commands(group)} == set(COMMANDS)


@pytest.mark.parametrize(("name", "command"), list(list_commands(group)))
def test_every_option_stands_in_the_section_of_its_command(name: str, command: click.Command) -> None:
    section = _section(REFERENCE["reference/commands.md"], name)
    assert all(option in section for one in command.params for option in one.opts if option.startswith("--"))


@pytest.mark.parametrize("table", [("reference/files.md", WRITTEN), ("reference/reports.md", REPORTS)])
def test_every_key_stands_in_the_table_of_its_file(table: tuple[str, dict[str, tuple[type, str]]]) -> None:
    path, roots = table
    for title, (kind, _) in roots.items():
        section = _section(REFERENCE[path], title)
        assert all(f"`{field.encode_name}`" in section for field in msgspec.structs.fields(kind))


@pytest.mark.parametrize("roots", [WRITTEN, REPORTS])
def test_no_two_values_of_a_page_have_one_name(roots: dict[str, tuple[type, str]]) -> None:
    names = [kind.__name__ for kind in find_structs([kind for kind, _ in roots.values()], computed=True)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("title", "good", "bad"),
    [
        ("recipe.toml", {"targets": ["qnn"], "metric": {"name": "top1"}}, {"target": ["qnn"]}),
        ("preprocess.toml", {"size": [224, 224]}, {"size": [224]}),
        ("devices.toml", {"device": [{"name": "pi", "device": "ssh:pi"}]}, {"device": [{"name": "pi"}]}),
        ("driver.toml", {"refused": ["SOFTMAX"]}, {"refused": "SOFTMAX"}),
    ],
)
def test_a_schema_takes_what_the_code_takes(title: str, good: object, bad: object) -> None:
    check = jsonschema.Draft202012Validator(json.loads(REFERENCE[f"reference/{title}.schema.json"]))
    assert check.is_valid(good)
    assert not check.is_valid(bad)


@pytest.mark.parametrize("block", re.findall(r"```toml\n(.*?)```", "".join(PAGES.values()), re.DOTALL))
def test_a_toml_of_a_page_is_one_that_edgekit_reads(block: str) -> None:
    given = tomllib.loads(block)
    checks = (jsonschema.Draft202012Validator(json.loads(text)) for path, text in REFERENCE.items() if ".toml" in path)
    assert any(check.is_valid(given) for check in checks)


@pytest.mark.parametrize("name", dir(edgekit))
def test_every_public_name_is_documented(name: str) -> None:
    assert len(text := _section(REFERENCE["reference/python.md"], name).strip()) > 20
    assert " at 0x" not in text


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("docs/reference/rewrites.md", (*REWRITES, *(each.id for each in CLEANING))),
        ("docs/reference/metrics.md", tuple(METRICS)),
        ("docs/reference/devices.md", tuple(status.name for status in list_devices())),
        ("docs/concepts/evidence.md", tuple(Evidence)),
        ("docs/concepts/gates.md", ("min_cosine", "min_sqnr_db", "max_lost_share", "max_latency_ratio")),
    ],
)
def test_a_table_names_all_that_there_are(page: str, names: tuple[str, ...]) -> None:
    assert [name for name in names if f"`{name}`" not in PAGES[page]] == []


def test_every_target_has_a_page_and_its_tables() -> None:
    targets = {path.parent.name for path in (ROOT / "targets").glob("*/target.toml")}
    pages = {path.stem for path in (ROOT / "docs" / "targets").glob("*.md")} - {"index"}
    assert pages == targets, "write docs/targets/NAME.md, and name it in mkdocs.yml"
    for name in targets:
        assert f"<!-- target {name} -->" in PAGES[f"docs/targets/{name}.md"]
        assert edgekit.load_target(name).provider in render_target(name)
