"""Changes one operator, constant or statement of a checking module at a time, and runs its tests.

    python tools/bench/mutation.py [--sample 12] [--seed 0] [--budget 1800] [MODULE[:LINE] ...]

A mutation is a typical mistake: a flipped or shifted comparison, `and` for `or`, a dropped term, another constant, a
check that is left out. Each is made in a copy of the tree, one for each run, drawn by the seed; a mutant is killed if a
test fails or hangs. Only those tests are run that run the changed line, or all where none does, as in a constant. A
survivor may be noticed by a test of another process, so the share is never too high. MODULE is a part of a path in the
table below, such as `verify` or `history.py:213`. Messages, annotations, decorators and seeds are not changed. Existing
tools did not fit: cosmic-ray 8 has no sampling, no time budget and only one test command, and changes the working tree;
mutmut 3 leaves out constants outside functions, and needs a run of all tests first.
"""

import argparse
import ast
import importlib
import math
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import msgspec
import pytest

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("edgekit", "tests", "targets", "tools", "pyproject.toml", "README.md")
SLOW_IMPORTS = ("numpy", "onnx", "onnxruntime", "PIL.Image", "rich.console", "jinja2", "click")
"""Modules that each run would import again: a forked child saves two seconds."""
SLOWEST = 4.0
"""A mutant hangs if its tests take this many times as long as with the right code."""
LEAST_KILLED = 0.85
TESTS = {
    "verify/metrics/tensor_metrics.py": "metrics",
    "verify/task_scores.py": "gate tasks own_model",
    "data/intervals.py": "verify/metrics verify/gate",
    "verify/metrics/outputs.py": "metrics gate agreement",
    "verify/metrics/agreement.py": "agreement metrics",
    "verify/metrics/fidelity.py": "honesty",
    "verify/own_model.py": "bundle own_model stand_in forms honesty",
    "verify/suspects.py": "suspects",
    "verify/placement.py": "placement forms",
    "verify/history.py": "history",
    "verify/layers/on_device.py": "device_layers causes",
    "verify/task_metrics.py": "tasks quantize/predict",
    "bundle/multi.py": "sign archive",
    "bundle/sign.py": "sign verify/recorded",
    "bundle/checks.py": "archive manifest folder group trust tune/run",
    "quantize/plan.py": "plan wide_weights ranges",
    "quantize/mixed_precision/auto.py": "choose equalize default_mode",
    "quantize/mixed_precision/candidates.py": "relief choose",
    "quantize/mixed_precision/goal_search.py": "default_mode choose placement relief four_bits float_regions",
    "quantize/mixed_precision/relief.py": "relief compared_tensors choose default_mode",
    "quantize/mixed_precision/placement.py": "placement",
    "quantize/ranges.py": "ranges qdq families",
    "quantize/equalize.py": "equalize outside",
    "quantize/gptq.py": "gptq four_bits weight_only",
    "quantize/rounding.py": "gptq four_bits outside",
    "quantize/graph/compared_tensors.py": "readouts compared_tensors",
    "quantize/mixed_precision/score.py": "relief four_bits compared_tensors choose",
    "quantize/accuracy/loss.py": "compared_tensors predict compare",
    "check/rules/rules.py": "rules verdicts placement",
    "check/report.py": "verdicts placement",
    "check/check.py": "graph rules verdicts placement settings advice",
    "convert/ort_format/canonical.py": "canonical",
    "convert/ort_form.py": "custom_ops canonical fusions",
    "prepare/rewrites/activations.py": "rewrites exported",
    "devices/local/emulated.py": "emulated",
    "prepare/clean.py": "clean outside dims",
    "prepare/opset.py": "clean rewrites convert/canonical",
}
"""Checks, gates and numerics of `edgekit/`, each with the tests that should notice a mutation, fastest first: "gate" of
`verify/` is tests/verify/test_verify_gate.py."""

# Operators by the names of their classes in `ast`, and those that may stand there by mistake.
_OPERATORS = {
    "Lt": "LtE GtE", "LtE": "Lt Gt", "Gt": "GtE LtE", "GtE": "Gt Lt", "Eq": "NotEq", "NotEq": "Eq", "Is": "IsNot",
    "IsNot": "Is", "In": "NotIn", "NotIn": "In", "Add": "Sub", "Sub": "Add", "Mult": "Div", "Div": "Mult",
    "FloorDiv": "Mult", "Mod": "Mult", "Pow": "Mult", "BitAnd": "BitOr", "BitOr": "BitAnd",
}  # fmt: skip
_NAMES = {"min": "max", "any": "all", "minimum": "maximum", "floor": "ceil", "argmin": "argmax"}
_SWAPPED = {**_NAMES, **{new: old for old, new in _NAMES.items()}}


Outcome = Literal["killed", "hung", "survived"]


class Mutation(msgspec.Struct, frozen=True):
    """One change of a module: the bytes from `start` to `end` become `text`."""

    module: str
    line: int
    start: int
    end: int
    before: str
    text: str

    def apply(self, source: bytes) -> bytes:
        """Returns a source with the change made."""
        return source[: self.start] + self.text.encode() + source[self.end :]


def list_mutations(module: str, source: bytes) -> list[Mutation]:
    """Returns all single changes of a module, in the order of its lines."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found, tree = [], ast.parse(source)
    # A variable of the name `floor` is no function: without it the module would only fail.
    stored = (node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    own = {node.id for node in stored} | {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    for node, changed in _walk(tree):
        if isinstance(node, ast.Name) and isinstance(changed, ast.Name) and node.id in own:
            continue
        start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[operator]
        text = ast.unparse(changed)
        text = f"({text})" if isinstance(changed, ast.expr) else text
        found.append(Mutation(module, node.lineno, start, end, source[start:end].decode(), text))
    return sorted(set(found), key=lambda item: (item.line, item.start, item.text))


def _walk(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, ast.expr | ast.stmt]]:
    if isinstance(node, ast.expr | ast.stmt):
        yield from ((node, changed) for changed in _change(node))
    if isinstance(node, ast.If | ast.IfExp | ast.While) and isinstance(node.test, ast.Name | ast.Call | ast.Attribute):
        yield node.test, ast.UnaryOp(ast.Not(), node.test)
    if isinstance(node, ast.keyword) and isinstance(node.value, ast.Name) and node.value.id == node.arg:
        yield node.value, ast.Constant(None)
    for name, value in ast.iter_fields(node):
        if name in {"annotation", "returns", "decorator_list", "keywords"} and not isinstance(node, ast.Call):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_kept(child):
                yield from _walk(child)


def _is_kept(node: ast.AST) -> bool:
    """Returns True for messages, seeds, and guards against mistakes such as `zip(..., strict=True)`."""
    is_seed = isinstance(node, ast.Call) and ast.unparse(node.func).endswith("default_rng")
    return isinstance(node, ast.JoinedStr) or is_seed or (isinstance(node, ast.keyword) and node.arg == "strict")


def _change(node: ast.expr | ast.stmt) -> Iterator[ast.expr | ast.stmt]:
    match node:
        case ast.Compare(ops=ops):
            for place, op in enumerate(ops):
                for new in _list_mistaken(op):
                    yield _replaced(node, ops=[*ops[:place], new, *ops[place + 1 :]])
        case ast.BoolOp(op=op, values=values):
            yield _replaced(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
            for place in range(len(values)):
                kept = values[:place] + values[place + 1 :]
                yield kept[0] if len(kept) == 1 else _replaced(node, values=kept)
        case ast.BinOp(op=op) | ast.AugAssign(op=op):
            for new in _list_mistaken(op):
                yield _replaced(node, op=new)
        case ast.UnaryOp(operand=operand):
            yield operand
        case _:
            yield from _change_leaf(node)


def _change_leaf(node: ast.expr | ast.stmt) -> Iterator[ast.expr | ast.stmt]:
    match node:
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            yield ast.Constant(value + 1)
        case ast.Name(id=name) if name in _SWAPPED:
            yield ast.Name(_SWAPPED[name])
        case ast.Attribute(attr=name) if name in _SWAPPED:
            yield _replaced(node, attr=_SWAPPED[name])
        case ast.Continue():
            yield ast.Break()
        case ast.Break():
            yield ast.Continue()
        case ast.Raise():
            yield ast.Pass()


def _list_mistaken(op: ast.AST) -> list[Any]:
    return [getattr(ast, name)() for name in _OPERATORS.get(type(op).__name__, "").split()]


def _replaced(node: ast.AST, **fields: object) -> Any:
    return type(node)(**{**dict(ast.iter_fields(node)), **fields})


def list_tests(module: str) -> list[str]:
    """Returns the test files that the table names for a module."""
    named = (name if "/" in name else f"{module.split('/', maxsplit=1)[0]}/{name}" for name in TESTS[module].split())
    return ["tests/{0}/test_{0}_{1}.py".format(*name.split("/")) for name in named]


class Watch:
    """A plugin of pytest that writes the places, as in `verify/history.py:213`, that each test runs.

    Those that a fixture runs, which may be set up once for many tests, count for each test that reads the fixture.
    """

    def __init__(self, root: Path) -> None:
        self.modules = {str(root / "edgekit" / module): module for module in TESTS}
        self.notes, self.seen = root / "places.json", set[str]()
        self.fixtures, self.tests = dict[str, set[str]](), dict[str, set[str]]()

    def trace(self, frame: FrameType, _event: str, _argument: object) -> Any:
        """Notes a line of one of the modules."""
        module = self.modules.get(frame.f_code.co_filename)
        if module is None:
            return None
        self.seen.add(f"{module}:{frame.f_lineno}")
        return self.trace

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        """Notes the places of one fixture."""
        outer, self.seen = self.seen, self.fixtures.setdefault(fixturedef.argname, set())
        try:
            return (yield)
        finally:
            outer.update(self.seen)
            self.seen = outer

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Function) -> Generator[None, object, object]:
        """Notes the places of one test."""
        self.seen = set()
        sys.settrace(self.trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            self.tests[item.nodeid] = self.seen.union(*(self.fixtures.get(name, ()) for name in item.fixturenames))

    def pytest_sessionfinish(self) -> None:
        """Writes the notes."""
        self.notes.write_bytes(msgspec.json.encode(self.tests))


class Select(msgspec.Struct):
    """A plugin of pytest that leaves out all tests but those of these names, if there are any."""

    names: set[str]

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leaves tests out."""
        items[:] = [item for item in items if item.nodeid in self.names] or items


def _run_tests(root: Path, files: Sequence[str], plugin: Watch | Select) -> None:
    """Runs tests in a child of its own session."""
    os.setsid()
    os.chdir(root)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.path.insert(0, str(root))
    os.environ["PYTHONPATH"] = str(root)
    sys.dont_write_bytecode = isinstance(plugin, Select)
    argv = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", f"--basetemp={root / 'work'}"]
    os._exit(pytest.main([*argv, *files], plugins=[plugin]))


class Measured(msgspec.Struct, frozen=True):
    """How long the tests of a file take with the right code, infinity if one fails, and what places each runs."""

    seconds: float
    tests: dict[str, set[str]]


class Bench(msgspec.Struct, frozen=True):
    """A copy of the tree in which tests run, and the files of tests that were measured."""

    root: Path
    measured: dict[str, Measured]

    def run(self, files: Sequence[str], limit_s: float, plugin: Watch | Select) -> Outcome:
        """Runs tests until the first failure, or until a time limit."""
        child = multiprocessing.get_context("fork").Process(target=_run_tests, args=(self.root, files, plugin))
        child.start()
        child.join(limit_s)
        if child.exitcode is None:
            os.killpg(child.pid or 0, signal.SIGKILL)
            child.join()
            return "hung"
        # Once the right code was measured, such a code tells of a mutant that cannot be imported.
        missing = {pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED}
        if child.exitcode in missing and isinstance(plugin, Watch):
            sys.exit(f"these are no tests: {' '.join(files)}")
        return "killed" if child.exitcode else "survived"

    def measure(self, file: str) -> Measured:
        """Runs a file of tests with the right code, once; its time sets the limit for mutants."""
        if file not in self.measured:
            start, watch = time.monotonic(), Watch(self.root)
            passed = self.run([file], 600.0, watch) == "survived"
            seconds = time.monotonic() - start if passed else math.inf
            tests = msgspec.json.decode(watch.notes.read_bytes(), type=dict[str, set[str]]) if passed else {}
            self.measured[file] = Measured(seconds, tests)
            if not passed:
                print(f"its modules are left out, as it fails as it is: {file}", flush=True)
        return self.measured[file]

    def judge(self, mutation: Mutation) -> Outcome | None:
        """Returns whether a test notices a change, None if tests fail without it."""
        files = {file: self.measure(file) for file in list_tests(mutation.module)}
        seconds = sum(each.seconds for each in files.values())
        if seconds == math.inf:
            return None
        place, path = f"{mutation.module}:{mutation.line}", self.root / "edgekit" / mutation.module
        source, before = path.read_bytes(), path.stat()
        found = {file: {test for test, seen in each.tests.items() if place in seen} for file, each in files.items()}
        path.write_bytes(mutation.apply(source))
        try:
            wanted = [file for file, tests in found.items() if tests] or [*files]
            return self.run(wanted, 10.0 + SLOWEST * seconds, Select(set().union(*found.values())))
        finally:
            path.write_bytes(source)
            # Bytecode is taken for that of a source of the same second and size.
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def draw(wanted: Sequence[str], sample: int, seed: int) -> dict[str, list[Mutation]]:
    """Returns the changes to try for each requested module: all changes of a line that is named, else a sample."""
    drawn = {}
    for module in TESTS:
        names = [name for name in wanted if name.split(":")[0].removeprefix("edgekit/") in module]
        if wanted and not names:
            continue
        lines = {int(name.split(":")[1]) for name in names if ":" in name}
        every = list_mutations(module, (ROOT / "edgekit" / module).read_bytes())
        named = [item for item in every if item.line in lines]
        few = random.Random(f"{seed} {module}").sample(every, min(sample, len(every)))  # noqa: S311 - a draw, no secret
        drawn[module] = named if lines else few
    return drawn


def try_all(bench: Bench, drawn: dict[str, list[Mutation]], budget_s: float) -> Iterator[tuple[Mutation, Outcome]]:
    """Yields each change and its result, taking the modules in turn, until the time is over."""
    end = time.monotonic() + budget_s
    for turn in range(max(map(len, drawn.values()), default=0)):
        for mutations in drawn.values():
            if turn >= len(mutations):
                continue
            if time.monotonic() > end:
                return
            if (outcome := bench.judge(mutations[turn])) is not None:
                yield mutations[turn], outcome


def show(tried: Sequence[tuple[Mutation, Outcome]]) -> float:
    """Prints a table by module, and returns the share that was killed or hung."""
    print(f"\n{'module':36} mutants  killed    hung  survived")
    for module in (*dict.fromkeys(mutation.module for mutation, _ in tried), ""):
        found = Counter(outcome for mutation, outcome in tried if module in {mutation.module, ""})
        figures = f"{found.total():7} {found['killed']:7} {found['hung']:7} {found['survived']:9}"
        print(f"{module or 'all':36} {figures}")
    return 1 - sum(outcome == "survived" for _, outcome in tried) / len(tried)


def main() -> None:
    """Draws, tries and prints mutations; exits with 1 if too few are killed, or if tests fail without a mutation."""
    for name in SLOW_IMPORTS:
        importlib.import_module(name)
    parser = argparse.ArgumentParser()
    parser.add_argument("modules", nargs="*", metavar="MODULE[:LINE]")
    parser.add_argument("--sample", type=int, default=12, help="changes of each module")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=float, default=1800.0, help="seconds")
    options = parser.parse_args()
    drawn = draw(options.modules, options.sample, options.seed)
    with tempfile.TemporaryDirectory() as folder:
        for name in NEEDED:
            source = ROOT / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, Path(folder, name))
        bench, tried = Bench(Path(folder), {}), []
        for mutation, outcome in try_all(bench, drawn, options.budget):
            tried.append((mutation, outcome))
            if outcome != "killed":
                print(f"{outcome} {mutation.module}:{mutation.line}: {mutation.before} -> {mutation.text}", flush=True)
    if not tried:
        sys.exit(f"nothing to change in {' '.join(options.modules) or 'no time'}")
    killed = show(tried)
    print(f"killed {killed:.1%} of {len(tried)} drawn by seed {options.seed}, at least {LEAST_KILLED:.0%} wanted")
    fails = any(each.seconds == math.inf for each in bench.measured.values())
    sys.exit(killed < LEAST_KILLED or fails)


if __name__ == "__main__":
    main()
