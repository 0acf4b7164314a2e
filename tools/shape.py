"""Counts lines of code, modules, and functions with one caller. `python tools/shape.py [ROOT]`, or `make shape`.

Import-linter's contracts in pyproject.toml, not this program, say which module may import which. The counts are no
limits: a module is a chapter that a person reads in one sitting, however long that is.
"""

import ast
import gc
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec

BANNED_NAMES = frozenset({"utils", "util", "common", "helpers", "base", "core", "types", "misc"})


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of a tree of modules; lines are lines of code, without blank lines, comments and docstrings."""

    modules: int
    median_module_lines: float
    code_lines: int
    import_lines: int
    functions: int
    median_function_lines: float
    called_once: int

    @property
    def table(self) -> str:
        """The counts as lines of text."""
        return "\n".join(
            [
                f"code lines                 {self.code_lines:7,}",
                f"modules                    {self.modules:7,}   median {self.median_module_lines:.0f} lines",
                f"functions                  {self.functions:7,}   median {self.median_function_lines:.0f} lines",
                f"called from one place only {self.called_once / max(self.functions, 1):7.0%}",
                f"lines that import          {self.import_lines / max(self.code_lines, 1):7.1%}",
            ]
        )


def measure_shape(folder: Path) -> Shape:
    """Returns the counts of all Python modules below a folder.

    A function counts as called from one place if its name is read once in the whole tree, apart from imports. Two
    functions of the same name share their readers, so the share is slightly too low.
    """
    modules = {path: list(ast.walk(ast.parse(path.read_bytes()))) for path in sorted(folder.rglob("*.py"))}
    nodes = [node for module in modules.values() for node in module]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    reads = Counter(name for node in nodes if (name := _read_name(node)))
    return Shape(
        modules=len(modules),
        median_module_lines=median(path.read_bytes().count(b"\n") for path in modules) if modules else 0,
        code_lines=sum(len(_code_lines(module)) for module in modules.values()),
        import_lines=sum(len(_spans(module, (ast.Import, ast.ImportFrom))) for module in modules.values()),
        functions=len(functions),
        median_function_lines=median(_length(node) for node in functions) if functions else 0,
        called_once=sum(reads[node.name] == 1 for node in functions),
    )


def find_banned_names(folder: Path) -> list[str]:
    """Returns a line for each module whose name is so general that it excludes nothing."""
    paths = (path for path in sorted(folder.rglob("*.py")) if path.stem in BANNED_NAMES)
    return [f"{path}: a module named '{path.stem}' excludes nothing; name what it owns" for path in paths]


def _read_name(node: ast.AST) -> str:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) else ""


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _code_lines(nodes: Sequence[ast.AST]) -> set[int]:
    """Returns the lines on which a node of the syntax tree begins or ends, without docstrings."""
    docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}
    found: set[int] = set()
    for node in nodes:
        begin, end = getattr(node, "lineno", None), getattr(node, "end_lineno", None)
        if begin is None or end is None or id(node) in docs:
            continue
        if isinstance(node, ast.Expr) and id(node.value) in docs:
            continue
        found |= {begin, end} if not isinstance(node, ast.Constant) else set(range(begin, end + 1))
    return found


def _spans(nodes: Sequence[ast.AST], kinds: tuple[type[ast.stmt], ...]) -> set[int]:
    found = (node for node in nodes if isinstance(node, kinds))
    return {line for node in found for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def main() -> int:
    """Prints the counts of the package, and returns 1 if a module has a name that excludes nothing."""
    # Syntax trees have no cycles that must be found: to look for them takes as long as to make and read the trees.
    gc.disable()
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent
    print(measure_shape(root / "edgekit").table)
    banned = find_banned_names(root / "edgekit")
    print(*banned, sep="\n", end="\n" if banned else "")
    return 1 if banned else 0


if __name__ == "__main__":
    sys.exit(main())
