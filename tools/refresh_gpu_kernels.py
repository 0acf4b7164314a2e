"""Writes the kernels of a provider, as ONNX Runtime's documentation lists them, into `targets/NAME/rules.toml`.

    python tools/refresh_gpu_kernels.py ORT/docs/OperatorKernels.md --target cuda --target directml

ONNX Runtime writes OperatorKernels.md from its registrations, so it covers providers that cannot be loaded on this
machine. The part above the marker in the rules is written by hand and is kept.
"""

import argparse
import importlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from refresh_cpu_kernels import plain_name

state: Any = importlib.import_module("onnxruntime.capi._pybind_state")
TARGETS = Path(__file__).parents[1] / "targets"
MARKER = "# Below: the registered kernels, written by tools/refresh_gpu_kernels.py."
HEADINGS = {"cuda": "CUDAExecutionProvider", "directml": "DmlExecutionProvider"}
DOMAINS = {"ai.onnx": "", "com.microsoft": "com.microsoft"}
# Where Q and DQ form a unit with the node between them, the node is also taken with these types if it is in float.
QUANTIZED = {"cuda": (), "directml": ("qdq-int8", "qdq-uint8")}
# The first input of Where is the condition, so check takes the type from the second.
DATA_INPUTS = {"Where": 1}


class Kernel(msgspec.Struct, frozen=True, kw_only=True):
    """A registration: the versions of the operator, and the types that it takes for each type name of the schema."""

    domain: str
    op: str
    low: int
    high: int
    types: dict[str, tuple[str, ...]]


def main() -> None:
    """Rewrites the lower part of the rules of each named target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--target", action="append", choices=sorted(HEADINGS), required=True)
    options = parser.parse_args()
    for name in options.target:
        kernels = list(read_table(options.table.read_text(encoding="utf-8"), HEADINGS[name]))
        write_rules(TARGETS / name / "rules.toml", kernels, "docs/OperatorKernels.md", QUANTIZED[name])


def write_rules(path: Path, kernels: Iterable[Kernel], source: str, quantized: Sequence[str] = ()) -> None:
    """Replaces the part below the marker of a `rules.toml`."""
    kept = path.read_text(encoding="utf-8").partition(MARKER)[0]
    entries = render_ops(kernels, source, quantized)
    path.write_text(f"{kept}{MARKER}\n\n" + "\n\n".join(entries) + "\n", encoding="utf-8")


def read_table(text: str, provider: str) -> Iterator[Kernel]:
    """Yields the kernels of a provider from the text of OperatorKernels.md."""
    section = text.partition(f"## Operators implemented by {provider}")[2].partition("\n<a name=")[0]
    domain = op = ""
    for line in section.splitlines():
        cells = line.split("|")
        if found := re.match(r"\|\*\*Operator Domain:\*\* \*(.*?)\*", line):
            domain = found[1]
        elif len(cells) == 6 and domain in DOMAINS and (version := _read_version(cells[3])):
            op = cells[1].strip() or op
            types = {
                name: tuple(sorted({plain_name(kind.strip()) for kind in kinds.split(",")}))
                for name, kinds in re.findall(r"\*\*(\w+)\*\* = ([^*]*?)(?=<br|$)", cells[4])
            }
            yield Kernel(domain=DOMAINS[domain], op=op, low=version[0], high=version[1], types=types)


def _read_version(text: str) -> tuple[int, int] | None:
    # "13+" means only 13: a kernel without an end version fits no newer version of its operator (kernel_registry.cc).
    found = re.fullmatch(r"\[(\d+), (\d+)\]|(\d+)\+?", text.strip())
    return None if found is None else (int(found[1] or found[3]), int(found[2] or found[3]))


def render_ops(kernels: Iterable[Kernel], source: str, quantized: Sequence[str] = ()) -> list[str]:
    """Returns one `[[op]]` entry for all operators whose kernels are equal."""
    by_op: dict[tuple[str, str], list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        by_op[kernel.domain, kernel.op].append(kernel)
    grouped: dict[tuple[str, str], list[str]] = defaultdict(list)
    schemas = _list_schemas()
    for (domain, op), its in sorted(by_op.items()):
        if found := schemas.get((domain, op)):
            grouped[domain or "ai.onnx", _render(its, found, quantized)].append(op)
    return [
        f'[[op]]\ntypes = {json.dumps(ops)}\ndomains = ["{domain}"]\n{text}\nsource = "{source}"'
        for (domain, text), ops in grouped.items()
    ]


def _list_schemas() -> Mapping[tuple[str, str], Sequence[Any]]:
    found: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for schema in state.get_all_operator_schema():
        found[schema.domain, schema.name].append(schema)
    return {key: sorted(its, key=lambda schema: schema.since_version) for key, its in found.items()}


def _render(kernels: Sequence[Kernel], schemas: Sequence[Any], quantized: Sequence[str]) -> str:
    low, high = min(kernel.low for kernel in kernels), max(kernel.high for kernel in kernels)
    versions = [schema for schema in schemas if low <= schema.since_version <= high] or [schemas[-1]]
    forms: dict[int, tuple[str, ...]] = {}
    # (inputs or outputs, their positions) -> version -> the types
    others: dict[tuple[str, tuple[int, ...]], dict[int, tuple[str, ...]]] = defaultdict(dict)
    for schema in versions:
        fitting = [kernel for kernel in kernels if kernel.low <= schema.since_version <= kernel.high]
        main = _main_type(schema)
        for name in {name for kernel in fitting for name in kernel.types}:
            taken = tuple(sorted({kind for kernel in fitting for kind in kernel.types.get(name, ())}))
            if name == main:
                forms[schema.since_version] = (*taken, *quantized) if "float32" in taken else taken
                continue
            for side, operands in (("inputs", schema.inputs), ("outputs", schema.outputs)):
                at = tuple(place for place, operand in enumerate(operands) if operand.typeStr == name)
                if at and not set(_allowed(schema, name)) <= set(taken):
                    others[side, at][schema.since_version] = taken
    known = [schema.since_version for schema in versions]
    lines = [f"since = [{low}, {high}]"]
    lines += [f"forms = {json.dumps(sorted({kind for its in forms.values() for kind in its}))}"] if forms else []
    rules = _by_version(forms, known, lambda its: f'kind = "forms", allowed = {json.dumps(its)}') if forms else []
    # If all versions have the same types, these are already in `forms`.
    rules = rules if len(set(forms.values())) > 1 else []
    for (side, at), its in sorted(others.items()):
        of = "" if side == "inputs" else 'of = "outputs", '
        head = f'kind = "dtype", {of}at = {list(at)}, allowed = '
        rules += _by_version(its, known, lambda kinds, head=head: head + json.dumps(kinds))
    return "\n".join((*lines, *(["rules = [", *(f"  {{ {rule} }}," for rule in rules), "]"] if rules else [])))


def _by_version(found: Mapping[int, tuple[str, ...]], known: Sequence[int], show: Any) -> list[str]:
    """Returns a rule for each run of versions that take the same types."""
    runs: list[tuple[int, int, tuple[str, ...]]] = []
    for at, version in enumerate(known):
        if version not in found:
            continue
        if runs and runs[-1][2] == found[version] and runs[-1][1] == known[at - 1]:
            runs[-1] = (runs[-1][0], version, found[version])
        else:
            runs.append((version, version, found[version]))
    rules: list[str] = []
    for first, last, kinds in runs:
        when = [f"since_min = {first}"] if first != known[0] else []
        when += [f"since_max = {last}"] if last != known[-1] else []
        rules.append(show(list(kinds)) + (f", when = {{ {', '.join(when)} }}" if when else ""))
    return rules


def _main_type(schema: Any) -> str:
    operands = list(schema.inputs) or list(schema.outputs)
    return str(operands[min(DATA_INPUTS.get(schema.name, 0), len(operands) - 1)].typeStr)


def _allowed(schema: Any, name: str) -> list[str]:
    for constraint in schema.type_constraints:
        if constraint.type_param_str == name:
            return [plain_name(kind) for kind in constraint.allowed_type_strs]
    return [plain_name(name)]


if __name__ == "__main__":
    main()
