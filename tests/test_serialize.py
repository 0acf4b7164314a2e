"""JSON of a report has its fields and its public properties."""

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec import inspect

from edgekit._proc import run_process
from edgekit.app.result import CellResult
from edgekit.bench.history import PastBench
from edgekit.evidence import Evidence
from edgekit.model.tensors import ListColumns
from edgekit.quantize.plan import QuantPlan
from edgekit.serialize import fill, to_builtins, to_json
from edgekit.verify.history import PastRun
from edgekit.verify.report import VerifyReport


class _Report(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    value: float
    path: Path
    evidence: Evidence

    @property
    def passed(self) -> bool:
        return self.value > 0


def test_properties_enums_paths_and_infinities() -> None:
    report = _Report(name="a", value=float("inf"), path=Path("x/y"), evidence=Evidence.SAME_EP)
    assert to_builtins((report,)) == [
        {"name": "a", "value": None, "path": "x/y", "evidence": "same-ep", "passed": True}
    ]
    assert json.loads(to_json(report))["passed"] is True


def test_evidence_is_ordered() -> None:
    assert Evidence.DEVICE.is_at_least(Evidence.SIMULATOR)
    assert not Evidence.PREDICTED.is_at_least(Evidence.EMULATED)
    assert all(kind.meaning for kind in Evidence)


def list_structs(kind: inspect.Type, found: dict[type[msgspec.Struct], None]) -> dict[type[msgspec.Struct], None]:
    """Adds the structs that a type holds, itself included."""
    if isinstance(kind, inspect.StructType):
        if kind.cls in found:
            return found
        found[kind.cls] = None
    for inner in list_inner(kind):
        list_structs(inner, found)
    return found


def list_inner(kind: inspect.Type) -> Iterator[inspect.Type]:
    yield from (field.type for field in getattr(kind, "fields", ()))
    yield from (*getattr(kind, "types", ()), *getattr(kind, "item_types", ()))
    yield from (each for name in ("item_type", "key_type", "value_type") if (each := getattr(kind, name, None)))


def list_unreadable(root: type[msgspec.Struct]) -> list[type[msgspec.Struct]]:
    """Returns the structs within one whose JSON, with their properties, their own reader refuses."""
    structs = list_structs(inspect.type_info(root), {})
    members = {kind: [it for base in kind.__mro__ for it in vars(base).items()] for kind in structs}
    shown = {kind: [name for name, it in its if isinstance(it, property)] for kind, its in members.items()}
    return [
        kind
        for kind, names in shown.items()
        if kind.__struct_config__.forbid_unknown_fields and any(not name.startswith("_") for name in names)
    ]


@pytest.mark.parametrize("root", [QuantPlan, VerifyReport, CellResult, PastBench, PastRun])
def test_what_commands_write_and_read_again_has_no_key_that_its_reader_refuses(root: type[msgspec.Struct]) -> None:
    """`quantize --plan-only` writes a plan for `--plan`, and a property in it would be an unknown field there."""
    assert list_unreadable(root) == []
    # A struct that is not written so has one.
    assert list_unreadable(ListColumns) == [ListColumns]


MEETING = """
import sys, threading
import msgspec
from edgekit.serialize import ready_type

sys.setswitchinterval(1e-6)

def meet():
    class Inner(msgspec.Struct):
        x: int
        y: tuple[int, ...] = ()
    class Outer(msgspec.Struct):
        a: tuple[Inner, ...]
        b: dict[str, Inner]
    barrier = threading.Barrier(8)
    def read():
        barrier.wait()
        msgspec.json.decode(b'{"a": [{"x": 1}], "b": {"c": {"x": 2}}}', type=KIND)
    threads = [threading.Thread(target=read) for _ in range(8)]
    for each in threads: each.start()
    for each in threads: each.join()

for _ in range(300): meet()
"""


@pytest.mark.parametrize(("kind", "ends"), [("ready_type(Outer)", True), ("Outer", False)])
def test_threads_may_meet_a_type_at_the_same_time(kind: str, ends: bool) -> None:
    done = run_process([sys.executable, "-c", MEETING.replace("KIND", kind)], timeout_s=60)
    # If the second ends too with a new version of msgspec, `ready_type` can go.
    assert done.succeeded is ends, done.ending


def find_unread_types(source: str) -> list[str]:
    """Returns the calls that give msgspec a type that does not come from ready_type."""
    positional = {"msgspec.convert", "msgspec.json.Decoder"}
    decoders = {"msgspec.json.decode", "msgspec.toml.decode", "msgspec.msgpack.decode", *positional}
    found = list[str]()
    # To read each module costs seconds.
    if not any(name in source for name in decoders):
        return found
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        # To write each call as text costs seconds too.
        if getattr(call.func, "attr", "") not in {"convert", "Decoder", "decode"}:
            continue
        name, kinds = ast.unparse(call.func), [word.value for word in call.keywords if word.arg == "type"]
        if name in positional:
            kinds += call.args[-1:]
        if name in decoders:
            found += [name for kind in kinds if not ast.unparse(kind).startswith("ready_type(")]
    return found


def test_whatever_is_decoded_has_its_type_from_ready_type() -> None:
    assert find_unread_types("msgspec.json.decode(text, type=Manifest)") == ["msgspec.json.decode"]
    assert find_unread_types("msgspec.convert(value, Manifest)") == ["msgspec.convert"]
    assert find_unread_types("msgspec.json.Decoder(ready_type(Manifest)).decode(text)") == []
    package = Path(__file__).parents[1] / "edgekit"
    files = [path for path in package.rglob("*.py") if path != package / "serialize.py"]
    assert {path: found for path in files if (found := find_unread_types(path.read_text()))} == {}


class _Box(msgspec.Struct, kw_only=True):
    width: int
    height: int

    @property
    def area(self) -> int:
        return self.width * self.height


class _Described(msgspec.Struct, kw_only=True):
    width: int
    area: int
    name: str
    unit: str = "mm"


def test_a_struct_takes_what_is_given_and_else_what_the_first_source_has() -> None:
    first, second = _Box(width=2, height=3), _Described(width=9, area=9, name="lid", unit="cm")
    assert fill(_Described, first, name="box") == _Described(width=2, area=6, name="box", unit="mm")
    assert fill(_Described, first, second, area=1) == _Described(width=2, area=1, name="lid", unit="cm")
    with pytest.raises(TypeError, match="name"):
        fill(_Described, first)
