"""Writes the kernels of ONNX Runtime's CPU provider, as the wheel lists them, into `targets/cpu/rules.toml`.

    python tools/refresh_cpu_kernels.py

The part above the marker in that file is written by hand and is kept.
"""

import importlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnxruntime

state: Any = importlib.import_module("onnxruntime.capi._pybind_state")
RULES = Path(__file__).parents[1] / "targets" / "cpu" / "rules.toml"
MARKER = "# Below: the kernels of the wheel, written by tools/refresh_cpu_kernels.py."
NEWEST = 10_000
DOMAINS = {"": "ai.onnx", "ai.onnx.ml": "ai.onnx.ml", "com.microsoft": "com.microsoft"}
NAMES = {"float": "float32", "double": "float64"}
LIMITED = ("qdq-uint8", "qdq-int8", "qdq-uint16", "qdq-int16", "qdq-uint4", "qdq-int4")
"""A quantized unit without an integer kernel runs in float, so it needs only the float32 kernel."""
CAST = "cast"
"""The marker among the types of a kernel that takes float16 only through casts to float32."""

Key = tuple[str, int, int, tuple[str, ...]]


def main() -> None:
    """Rewrites the lower part of the rules."""
    groups: dict[Key, list[str]] = {}
    for domain, op, key in (*list_kernels(), *list_functions()):
        groups.setdefault((DOMAINS[domain], *key), []).append(op)
    source = f"kernels of onnxruntime {onnxruntime.__version__}"
    blocks = [render(key, ops, source) for key, ops in sorted(groups.items())]
    kept = RULES.read_text(encoding="utf-8").partition(MARKER)[0]
    RULES.write_text(f"{kept}{MARKER}\n\n" + "\n\n".join(blocks) + "\n", encoding="utf-8")


def list_kernels() -> Iterator[tuple[str, str, tuple[int, int, tuple[str, ...]]]]:
    """Yields each operator that has a kernel, with the versions and the types of its first input."""
    named = first_types()
    found: dict[tuple[str, str], list[Any]] = {}
    for kernel in state.get_all_opkernel_def():
        if kernel.domain in DOMAINS:
            found.setdefault((kernel.domain, kernel.op_name), []).append(kernel)
    for (domain, op), kernels in sorted(found.items()):
        types = {
            form
            for kernel in kernels
            for name in named.get((domain, op), ())
            for form in kernel.type_constraints.get(name, ())
        }
        low = min(kernel.version_range[0] for kernel in kernels)
        high = max(kernel.version_range[1] for kernel in kernels)
        yield domain, op, (low, min(high, NEWEST), forms(types))


def list_functions() -> Iterator[tuple[str, str, tuple[int, int, tuple[str, ...]]]]:
    """Yields the operators without a kernel that ONNX defines as functions of others, which a session expands."""
    kernels = {(kernel.domain, kernel.op_name) for kernel in state.get_all_opkernel_def()}
    schemas: Sequence[Any] = onnx.defs.get_all_schemas()
    for schema in schemas:
        unfolds = schema.has_function or schema.has_context_dependent_function
        if schema.domain == "" and unfolds and ("", schema.name) not in kernels:
            yield "", schema.name, (1, NEWEST, ())


def first_types() -> Mapping[tuple[str, str], Sequence[str]]:
    """Returns the names of the type of an operator's first input, or of its first output if it has no input."""
    found: dict[tuple[str, str], list[str]] = {}
    for schema in state.get_all_operator_schema():
        for parameter in list(schema.inputs)[:1] or list(schema.outputs)[:1]:
            found.setdefault((schema.domain, schema.name), []).append(parameter.typeStr)
    return found


def forms(types: Iterable[str]) -> tuple[str, ...]:
    """Returns element types by the names that check uses; none if the kernel takes any."""
    plain = {plain_name(text) for text in types}
    if "float32" in plain:
        plain |= {*LIMITED, *(() if "float16" in plain else ("float16", CAST))}
    return (*sorted(plain), "unknown") if plain else ()


def plain_name(text: str) -> str:
    """Returns the name of a type, "sequence" for any sequence."""
    kind, _, inner = text.partition("(")
    word = inner.rstrip(")")
    return NAMES.get(word, word) if kind == "tensor" else {"seq": "sequence"}.get(kind, kind)


def render(key: Key, ops: Sequence[str], source: str) -> str:
    """Returns one `[[op]]` entry."""
    domain, low, high, types = key
    lines = ["[[op]]", f"types = {json.dumps(sorted(ops))}", f'domains = ["{domain}"]', f"since = [{low}, {high}]"]
    lines += [f"forms = {json.dumps([form for form in types if form != CAST])}"] if types else []
    lines += ['use = ["no_fp16"]'] if CAST in types else []
    return "\n".join((*lines, f'source = "{source}"'))


if __name__ == "__main__":
    main()
