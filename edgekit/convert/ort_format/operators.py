"""Which operators a custom minimal build of ONNX Runtime needs, and what a build lacks for a model.

The config's format is that of ORT's `tools/python/util/reduced_build_config_parser.py`.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from edgekit._files import write_file
from edgekit.convert.ort_format.report import inspect_ort
from edgekit.errors import UsageError

_HEADER = "# For ONNX Runtime's build.sh --minimal_build extended --include_ops_by_config\n"
_MAIN_DOMAIN = "ai.onnx"
_ALL = "!no_ops_specified_means_all_ops_are_required"
# What the config calls an element type; integers are called as in C++.
_TYPES = {
    "float32": "float", "float64": "double", "float16": "MLFloat16", "bfloat16": "BFloat16", "string": "std::string",
    "bool": "bool",
}  # fmt: skip

Operators = dict[tuple[str, int], frozenset[str]]
"""Operators by domain and opset."""


def write_operators(models: Sequence[Path], out: Path, *, types: bool = False) -> None:
    """Writes the config of a build that runs every one of these ORT-format files; no path enters it.

    A runtime-style file wants its full-style file in the list: the layouts that a session gives to the operators its
    saved optimisations produce stand there only.

    Args:
        models: ORT-format files.
        out: where the config goes.
        types: allows the element types that occur in the models, and no others, which makes the build smaller still.

    Raises:
        UsageError: no file is given.
        ModelError: a file is damaged, or no ORT-format file.
    """
    lines = list_operators(models)
    if types:
        used = sorted({_TYPES.get(name, f"{name}_t") for model in models for name in inspect_ort(model).types})
        lines = (f"!globally_allowed_types;{','.join(used)}", *lines)
    write_file(out, (_HEADER + "".join(f"{line}\n" for line in lines)).encode())


def list_operators(models: Sequence[Path]) -> tuple[str, ...]:
    """Returns the lines of a config, `domain;opset;Operator,Operator`, for every one of these ORT-format files.

    Raises:
        UsageError: no file is given.
        ModelError: a file is damaged, or no ORT-format file.
    """
    if not models:
        raise UsageError("there is no model to write a config for", hint="give one .ort file or more")
    operators = _group_kernels(kernel for model in models for kernel in inspect_ort(model).kernels)
    return tuple(f"{domain};{opset};{','.join(sorted(names))}" for (domain, opset), names in sorted(operators.items()))


def read_operators(path: Path) -> Operators | None:
    """Returns the operators of a config, or None if it stands for all of them.

    Raises:
        UsageError: the file is missing, or no config.
    """
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the config '{path}'", hint="give a file that edgekit operators wrote") from error
    named: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
    for number, line in enumerate(lines, start=1):
        if not line or line.startswith(("#", "!")):
            continue
        match = re.fullmatch(r"([\w.]+);(\d+(?:,\d+)*);(.*)", re.sub(r"\{.*?\}\}|\{.*?\}", "", line))
        if match is None:
            raise UsageError(
                f"line {number} of '{path}' is no line of a config", hint="a line is `domain;opset;Operator,Operator`"
            )
        for opset in match[2].split(","):
            named[match[1], int(opset)] |= {name.strip() for name in match[3].split(",")}
    if not named and _ALL in lines:
        return None
    return {key: frozenset(names) for key, names in named.items()}


def find_lacking(model: Path, config: Path) -> tuple[str, ...]:
    """Returns the operators, as `domain:operator:opset`, that an ORT-format file needs and a build's config has not.

    Raises:
        UsageError: the config cannot be read.
        ModelError: the model is damaged, or no ORT-format file.
    """
    built = read_operators(config)
    if built is None:
        return ()
    needed = _group_kernels(inspect_ort(model).kernels)
    return tuple(
        f"{domain}:{name}:{opset}"
        for (domain, opset), names in sorted(needed.items())
        for name in sorted(names - built.get((domain, opset), frozenset()))
    )


def _group_kernels(kernels: Iterable[str]) -> Operators:
    grouped: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
    for kernel in kernels:
        domain, _, rest = kernel.partition(":")
        name, _, opset = rest.rpartition(":")
        grouped[domain or _MAIN_DOMAIN, int(opset) if opset.isdigit() else 1].add(name)
    return {key: frozenset(names) for key, names in grouped.items()}
