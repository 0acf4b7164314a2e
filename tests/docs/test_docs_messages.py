"""Each message of the code has a row on its page, and what troubleshooting quotes is the code's, word for word."""

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from doc_pages import PAGES, ROOT
from fixture_types import MakeOnce

from edgekit.cli.main import run_command
from edgekit.prepare.fix import REWRITES

sys.path.insert(0, str(ROOT / "tools"))

from docs_messages import ROOMS, render_messages
from docs_texts import Message, list_messages, read_module, walk

_QUOTED = re.findall(r"^\| `(.+?)` \|", PAGES["docs/troubleshooting.md"], re.MULTILINE)


@functools.cache
def _read_sources() -> tuple[set[str], set[str]]:
    """Returns the texts of all modules, and the parts of their errors; to keep the trees would cost more than this."""
    texts, literals = set[str](), set[str]()
    for file in (ROOT / "edgekit").rglob("*.py"):
        nodes = walk(ast.parse(file.read_text()))
        texts |= _list_texts(nodes)
        if "standalone" not in file.parts:
            literals.update(" ".join(text.split()) for text in _list_literals(nodes))
    return texts, literals


def _list_texts(nodes: list[ast.AST]) -> set[str]:
    """Returns the texts of a module, with `…` for each value that is put into them."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(re.sub(r"\{\w+\}", "…", node.value))
        elif isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            found.add("".join(str(part) for part in parts))
    return found


@pytest.fixture(scope="module")
def messages(make_once: MakeOnce) -> tuple[Message, ...]:
    """All messages: to read the code takes seconds, and each worker would do it."""

    def write(folder: Path) -> None:
        (folder / "messages.json").write_bytes(msgspec.json.encode(list_messages()))

    text = (make_once("messages", write) / "messages.json").read_bytes()
    return msgspec.json.decode(text, type=tuple[Message, ...])


def test_the_page_quotes_messages() -> None:
    assert len(_QUOTED) > 50
    assert len(set(_QUOTED)) == len(_QUOTED)


def test_quoted_messages_are_those_of_the_code(messages: tuple[Message, ...]) -> None:
    texts = _read_sources()[0] | {message.text for message in messages}
    reworded = "there is no such model file '…'"
    assert [quoted for quoted in (*_QUOTED, reworded) if not any(quoted in text for text in texts)] == [reworded]


def _list_ids(file: Path) -> Iterator[str]:
    """Yields the ids that calls in a module name, with `…` for a value that is put into one."""
    for node in walk(ast.parse(file.read_text())):
        given = node.value if isinstance(node, ast.keyword) and node.arg == "id" else None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Adviser":
            given = node.args[0]
        if isinstance(given, ast.Constant):
            yield str(given.value)
        elif isinstance(given, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in given.values)


def test_every_id_of_advice_and_of_a_cause_has_a_row() -> None:
    ids = {id_ for name in ("check/advice.py", "profile/profile.py") for id_ in _list_ids(ROOT / "edgekit" / name)}
    assert {"no-builder", "one-thread"} <= ids
    assert ids - set(_QUOTED) == set()
    rewrites = PAGES["docs/reference/rewrites.md"]
    assert [name for name in REWRITES if f"`{name}`" not in rewrites] == []


def _list_literals(nodes: list[ast.AST]) -> Iterator[str]:
    """Yields the parts of messages that a module writes out where it makes an error, which is what has a hint."""
    for node in nodes:
        if isinstance(node, ast.Call) and node.args and any(given.arg == "hint" for given in node.keywords):
            yield from (
                part.value
                for given in node.args
                for part in (given.values if isinstance(given, ast.JoinedStr) else [given])
                if isinstance(part, ast.Constant) and isinstance(part.value, str)
            )


def test_every_error_has_a_row(messages: tuple[Message, ...]) -> None:
    page, (_, written) = render_messages(messages), _read_sources()
    assert len(written) > 400
    assert {text for text in written if text.replace("|", "\\|") not in page} == set()
    assert {message.room for message in messages} <= set(ROOMS)
    assert "- `libcdsprpc.so, which reaches the NPU, is not there`" in page


def test_what_a_command_prints_has_a_row_with_its_next_step(
    messages: tuple[Message, ...], work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(work)
    texts = [re.escape(each.text).replace("…", ".+") for each in messages if each.kind]
    rows = [re.compile(f"{text} \\(.*") for text in texts]
    for line in (
        "check missing.onnx",
        "build model.onnx --data missing.npz --target nnapi --out out",
        "build model.onnx --data samples.npz --target qnnn --out out",
        "build model.onnx --data samples.npz --target qnn --out out --set soc=8550",
        "prepare model.onnx --dim batch=1 --out out.onnx",
        "verify model.onnx",
        "verify bundles/model-nnapi --on androyd",
        "verify bundles/model-nnapi --labels eval.npy --metric top2",
        "package bundles --as aar --name 3 --out out",
        "quantize bundles/model-nnapi/model.onnx --data samples.npz --target nnapi --out out.onnx",
        "run missing.toml",
    ):
        assert run_command(line.split()) == 2, line
        printed = capsys.readouterr().err.splitlines()[-1].removeprefix("edgekit: error: ")
        assert any(row.fullmatch(printed) for row in rows), line


def test_a_message_and_its_next_step_are_read_from_the_source() -> None:
    source = """
_KINDS = {"a": "one way", "b": "another way"}

def _explain(name):
    return "is empty" if not name else "is too long"

def read(path, kind):
    if kind not in _KINDS:
        raise UsageError(f"there is no kind '{kind}'", hint=suggest_name(kind, _KINDS))
    said = _explain(path)
    words = f"'{path}' {said}"
    raise DataError(words, hint=_KINDS[kind])

def load(path):
    malformed = DataError(f"'{path}' is malformed", hint="write it again")
    with reraised(ValueError, malformed, quote=True), reading(f"the file '{path}'", UsageError, "give another"):
        return parse(path)
"""
    lacks = "it names the nearest valid name, or lists all of them"
    assert read_module(source) == [
        Message(room="", text="there is no kind '…'", kind="UsageError", hint=lacks),
        Message(room="", text="'…' is empty", kind="DataError", hint="one way / another way"),
        Message(room="", text="'…' is too long", kind="DataError", hint="one way / another way"),
        Message(room="", text="'…' is malformed: …", kind="DataError", hint="write it again"),
        Message(room="", text="cannot read the file '…': …", kind="UsageError", hint="give another"),
    ]


def test_no_error_ends_without_a_next_step() -> None:
    texts = (path.read_text() for path in (ROOT / "edgekit").rglob("*.py"))
    assert [text for text in texts if re.search(r"hint=(\"\"|''|None)\W", text)] == []
