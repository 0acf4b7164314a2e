"""The operators that a custom minimal build of ONNX Runtime needs, and those that a build lacks for a model.

The config's format is that of ORT's `tools/python/util/reduced_build_config_parser.py`.
"""

import importlib
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from edgekit._files import write_file
from edgekit.convert.ort_format.report import inspect_ort
from edgekit.errors import ModelError, UsageError, reraised
from edgekit.serialize import ready_type

_FAILURES = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


def list_type_entries(models: Sequence[Path]) -> dict[tuple[str, str], str]:
    """Returns the types that each operator needs, as JSON for a build's config, by domain and operator.

    An operator has no entry, and is built with all types, if its kernel has no separate code for each type, or if only
    saved optimisations produce it.

    Raises:
        ModelError: the tool cannot read a file.
    """
    tool: Any = importlib.import_module("onnxruntime.tools.ort_format_model")
    manager, operators = tool.OperatorTypeUsageManager(), dict[str, dict[int, set[str]]]()
    for model in models:
        unread = ModelError(f"ONNX Runtime's tool finds no types in '{model}'", hint="leave --types out")
        # The tool leaves the file open until it is garbage-collected.
        quiet = warnings.catch_warnings(action="ignore", category=ResourceWarning)
        with reraised(_FAILURES, unread, quote=True), quiet:
            tool.OrtFormatModelProcessor(str(model), operators, manager).process()
    found = {(domain, op) for domain, opsets in operators.items() for ops in opsets.values() for op in ops}
    entries = {(domain, op): manager.get_config_entry(domain, op) for domain, op in sorted(found)}
    return {key: entry for key, entry in entries.items() if entry}


_HEADER = "# For ONNX Runtime's build.sh --minimal_build extended --include_ops_by_config\n"
_TYPED_HEADER = "# With --enable_reduced_operator_type_support each operator has kernels for these types only.\n"
_MAIN_DOMAIN = "ai.onnx"
_ALL = "!no_ops_specified_means_all_ops_are_required"
# The types after an operator: JSON of two levels at most.
_LIMIT = re.compile(r"\{(?:[^{}]|\{[^{}]*\})*\}")
_TYPED = re.compile(rf"(\w+)\s*({_LIMIT.pattern})")
_HINT = "give a file that edgekit operators wrote"


class _Entry(msgspec.Struct, frozen=True):
    inputs: dict[str, list[str]] = {}
    outputs: dict[str, list[str]] = {}
    custom: list[list[str]] = []


Operators = dict[tuple[str, int], frozenset[str]]
"""Operators by domain and opset."""
Types = dict[tuple[str, str], frozenset[str]]
"""The types to which operators are limited, by domain and name, such as `input 0 float`; others have all types."""


def write_operators(models: Sequence[Path], out: Path, *, types: bool = False) -> None:
    """Writes the config of a build that runs every one of these ORT-format files; it does not contain their paths.

    A runtime-style file should be listed together with its full-style file: only the latter has the layouts that a
    session gives to the operators of saved optimisations.

    Args:
        models: ORT-format files.
        out: the path of the config.
        types: limits each operator to the types that its nodes have, for a smaller build.

    Raises:
        UsageError: no file is given.
        ModelError: a file is damaged, or no ORT-format file.
    """
    lines = list_operators(models, types=types)
    header = _HEADER + (_TYPED_HEADER if types else "")
    write_file(out, (header + "".join(f"{line}\n" for line in lines)).encode())


def list_operators(models: Sequence[Path], *, types: bool = False) -> tuple[str, ...]:
    """Returns the lines of a config, `domain;opset;Operator,Operator`, for every one of these ORT-format files.

    With `types` each operator is followed by the types of its kernel, as JSON.

    Raises:
        UsageError: no file is given.
        ModelError: a file is damaged, or no ORT-format file.
    """
    if not models:
        raise UsageError("there is no model to write a config for", hint="give one .ort file or more")
    reports = [inspect_ort(model) for model in models]
    operators = _group_kernels(kernel for report in reports for kernel in report.kernels)
    # A kernel for saved optimisations may need types that no node of the file has.
    produced = {name for report in reports for name in report.saved_optimizations}
    entries = list_type_entries(models) if types else {}
    limits = {key: entry for key, entry in entries.items() if _full_name(*key) not in produced}
    return tuple(
        f"{domain};{opset};{','.join(name + limits.get((domain, name), '') for name in sorted(names))}"
        for (domain, opset), names in sorted(operators.items())
    )


def read_text(path: Path) -> str:
    """Returns the text of a config.

    Raises:
        UsageError: it cannot be read.
    """
    with reraised((OSError, UnicodeDecodeError), UsageError(f"cannot read the config '{path}'", hint=_HINT)):
        return path.read_text()


def read_operators(path: Path) -> tuple[Operators, Types] | None:
    """Returns the operators of a config and their types, or None if it stands for all operators.

    Raises:
        UsageError: the file is missing, or no config.
    """
    lines = [line.strip() for line in read_text(path).splitlines()]
    named: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
    limits: Types = {}
    for number, line in enumerate(lines, start=1):
        if not line or line.startswith(("#", "!")):
            continue
        if (match := re.fullmatch(r"([\w.]+);(\d+(?:,\d+)*);(.*)", _LIMIT.sub("", line))) is None:
            words = f"line {number} of '{path}' is no line of a config"
            raise UsageError(words, hint="a line is `domain;opset;Operator,Operator`")
        domain = match[1]
        for opset in match[2].split(","):
            named[domain, int(opset)] |= {name.strip() for name in match[3].split(",")}
        for typed in _TYPED.finditer(line):
            limits[domain, typed[1]] = limits.get((domain, typed[1]), frozenset()) | _read_entry(typed[2], path)
    if not named and _ALL in lines:
        return None
    return {key: frozenset(names) for key, names in named.items()}, limits


def _read_entry(entry: str, path: Path) -> frozenset[str]:
    unknown = UsageError(f"'{path}' limits an operator in no known way: {entry[:80]}", hint=_HINT)
    with reraised(msgspec.DecodeError, unknown):
        found = msgspec.json.decode(entry, type=ready_type(_Entry))
    sides = (("input", found.inputs), ("output", found.outputs))
    named = {f"{side} {place} {name}" for side, places in sides for place, names in places.items() for name in names}
    return frozenset(named | {" ".join(types) for types in found.custom})


def find_lacking(model: Path, config: Path) -> tuple[str, ...]:
    """Returns the operators that an ORT-format file needs and a build's config lacks, as `domain:operator:opset`.

    If the config limits types, missing types of a kernel are listed too: `domain:operator (input 0 double)`.

    Raises:
        UsageError: the config cannot be read.
        ModelError: the model is damaged, or no ORT-format file.
    """
    if (found := read_operators(config)) is None:
        return ()
    (built, limits), report = found, inspect_ort(model)
    lacking = [
        f"{domain}:{name}:{opset}"
        for (domain, opset), names in sorted(_group_kernels(report.kernels).items())
        for name in sorted(names - built.get((domain, opset), frozenset()))
    ]
    for (domain, name), entry in list_type_entries([model]).items() if limits else ():
        missing = _read_entry(entry, config) - limits.get((domain, name), frozenset())
        if (domain, name) in limits and missing:
            lacking.append(f"{domain}:{name} ({', '.join(sorted(missing))})")
    # The types that a produced operator needs are unknown: any limit may be too tight.
    lacking += [
        f"{domain}:{name} (all types: it comes with saved optimisations)"
        for domain, name in sorted(limits)
        if _full_name(domain, name) in report.saved_optimizations
    ]
    return tuple(lacking)


def _full_name(domain: str, name: str) -> str:
    """Returns an operator's name for reports: with its domain unless that is ONNX's own."""
    return name if domain == _MAIN_DOMAIN else f"{domain}.{name}"


def _group_kernels(kernels: Iterable[str]) -> Operators:
    grouped: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
    for kernel in kernels:
        domain, _, rest = kernel.partition(":")
        name, _, opset = rest.rpartition(":")
        grouped[domain or _MAIN_DOMAIN, int(opset) if opset.isdigit() else 1].add(name)
    return {key: frozenset(names) for key, names in grouped.items()}
