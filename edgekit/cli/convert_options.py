"""Options of `edgekit convert` that belong together, each group as one value."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import click
import msgspec

from edgekit._ort import Level
from edgekit.cli.options import split_names
from edgekit.convert.context import DEFAULT_CONTEXT, ContextOptions
from edgekit.convert.ort_form import Cpu, OrtOptions, Style
from edgekit.devices.register import load_target_here
from edgekit.errors import UsageError
from edgekit.jobs.convert import CoreMlOptions
from edgekit.prepare.transformer import FuseOptions
from edgekit.quantize.weight_only.convert import (
    BLOCK_ROUNDINGS,
    WEIGHT_FORMS,
    BlockRounding,
    WeightForm,
    WeightOnlyOptions,
)
from edgekit.target import Target

Command = Callable[..., int]

_CPUS: tuple[Cpu, ...] = ("arm", "x64")
_STYLES: dict[str, tuple[Style, ...]] = {"full": ("full",), "runtime": ("runtime",), "both": ("full", "runtime")}


class _RoundingChoice(click.Choice[BlockRounding]):
    """The roundings of blocks; who asks for GPTQ is told what does its work."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> BlockRounding:
        if value == "gptq":
            raise UsageError(
                "--rounding gptq: blocks are rounded by COMQ, which makes the same error at the output least",
                hint="--rounding comq --data DATA; edgekit quantize rounds layers by GPTQ where that gains",
            )
        return super().convert(value, param, ctx)


class FormOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The files that are asked for where no target says which: in ORT format as `ort` and `styles` say, and ONNX.

    With `levels` the ONNX files are what ONNX Runtime makes at each.
    """

    ort: OrtOptions
    styles: tuple[Style, ...]
    with_onnx: bool
    levels: tuple[Level, ...] = ()


def forms(function: Command) -> Command:
    """Adds the options of the files without a target, which become the argument `forms`."""

    @click.option("--style", type=click.Choice(sorted(_STYLES)), help="Default: both.")
    @click.option(
        "--level",
        "levels",
        type=click.Choice([level.value for level in Level]),
        multiple=True,
        help="Default: all. With --onnx, several: the optimized model of each.",
    )
    @click.option("--cpu", type=click.Choice(_CPUS), help="The CPU whose kernels the file is for. Default: arm.")
    @click.option(
        "--onnx", "with_onnx", is_flag=True, help="Write the ONNX model too; with --level, the optimized one."
    )
    @functools.wraps(function)
    def command(
        *, style: str | None, levels: tuple[str, ...], cpu: Cpu | None, with_onnx: bool, target: str | None, **rest: Any
    ) -> int:
        given = {"--style": style, "--level": levels, "--cpu": cpu}
        named = [name for name, value in given.items() if value]
        if target is not None and (named or with_onnx):
            _check_settled(load_target_here(target), named, _STYLES[style] if style else (), with_onnx=with_onnx)
        if len(levels) > 1 and (style or not with_onnx):
            raise UsageError(
                "a file in ORT format has one level, and several were given",
                hint="give one --level, or leave --style out and add --onnx",
            )
        chosen = FormOptions(
            ort=OrtOptions(style="full", cpu=cpu or "arm", level=Level(levels[0] if levels else "all")),
            styles=() if levels and with_onnx and not style else _STYLES[style or "both"],
            with_onnx=with_onnx and not levels,
            levels=tuple(map(Level, levels)) if with_onnx else (),
        )
        return function(forms=chosen, target=target, **rest)

    return command


def context(function: Command) -> Command:
    """Adds the options of a QNN context, which become the argument `context`."""

    @click.option("--soc", "socs", metavar="43,69", help="Qualcomm SoCs, all in one QNN context; for --target qnn.")
    @click.option("--htp-arch", "archs", metavar="73,79", help="Or: Hexagon versions, all in one QNN context.")
    @click.option("--embed-context", "embedded", is_flag=True, help="Put the QNN context inside the ONNX file.")
    @functools.wraps(function)
    def command(*, socs: str | None, archs: str | None, embedded: bool, target: str | None, **rest: Any) -> int:
        chosen = ContextOptions(socs=split_names(socs), archs=split_names(archs), embedded=embedded)
        if target is None and chosen != DEFAULT_CONTEXT:
            raise UsageError("--soc, --htp-arch and --embed-context are for a QNN context", hint="add --target qnn")
        return function(context=chosen, target=target, **rest)

    return command


def coreml(function: Command) -> Command:
    """Adds the options of what Core ML's provider writes, which become the argument `coreml`."""

    @click.option("--mlpackage", is_flag=True, help="Write what Core ML would load too; for --target coreml.")
    @click.option("--cache", is_flag=True, help="Write the Core ML provider's cache, for an app to ship.")
    @functools.wraps(function)
    def command(*, mlpackage: bool, cache: bool, target: str | None, **rest: Any) -> int:
        if (mlpackage or cache) and target != "coreml":
            raise UsageError("--mlpackage and --cache are for Core ML", hint="add --target coreml")
        return function(coreml=CoreMlOptions(packages=mlpackage, cache=cache), target=target, **rest)

    return command


def fuse(function: Command) -> Command:
    """Adds the options of fusion, which become the argument `fuse`."""

    @click.option("--fuse", type=click.Choice(["transformer"]), help="Fuse patterns into ONNX Runtime's own operators.")
    @click.option("--model-type", metavar="NAME", help="The family of the transformer. Default: bert.")
    @click.option("--heads", type=int, default=0, metavar="N", help="Its attention heads. Default: found out.")
    @click.option("--hidden-size", type=int, default=0, metavar="N", help="Its hidden size. Default: found out.")
    @functools.wraps(function)
    def command(*, fuse: str | None, model_type: str | None, heads: int, hidden_size: int, **rest: Any) -> int:
        if fuse is None and (model_type or heads or hidden_size):
            raise UsageError("--model-type, --heads and --hidden-size say how to fuse", hint="add --fuse transformer")
        chosen = FuseOptions(model_type=model_type or "bert", heads=heads, hidden=hidden_size)
        return function(fuse=chosen if fuse else None, **rest)

    return command


def weights(function: Command) -> Command:
    """Adds the options of weights, which become the argument `weights`."""

    @click.option(
        "--weights", "form", type=click.Choice(WEIGHT_FORMS), help="Make weights smaller; activations stay float."
    )
    @click.option("--keep", metavar="A,B", help="Nodes whose weights stay as they are.")
    @click.option("--block", type=int, metavar="N", help="Weights that share a scale in int8 and int4. Default: 32.")
    @click.option("--rounding", type=_RoundingChoice(BLOCK_ROUNDINGS), help="Of int4; comq learns from --data.")
    @click.option("--accuracy-level", "accuracy", type=int, metavar="0-4", help="Of MatMulNBits; 4: int8 products.")
    @click.option("--lpbq", is_flag=True, help="Scales of int4 that Qualcomm's HTP holds.")
    @functools.wraps(function)
    def command(
        *,
        form: WeightForm | None,
        keep: str | None,
        block: int | None,
        rounding: BlockRounding | None,
        accuracy: int | None,
        lpbq: bool,
        **rest: Any,
    ) -> int:
        if form is None and (keep or block or rounding or lpbq or accuracy is not None):
            raise UsageError(
                "--keep, --block, --rounding, --lpbq and --accuracy-level say how to make weights smaller",
                hint="add --weights int8",
            )
        chosen = WeightOnlyOptions(
            form=form or "int8",
            kept=split_names(keep),
            block=block or 32,
            accuracy_level=accuracy or 0,
            rounding=rounding or "nearest",
            lpbq=lpbq,
        )
        return function(weights=chosen if form else None, **rest)

    return command


def _check_settled(target: Target, named: Sequence[str], styles: tuple[Style, ...], *, with_onnx: bool) -> None:
    """Refuses options that a target settles; an ONNX form that it loads may be asked for, and is written anyway."""
    forms = ", ".join(target.conversion.forms)
    for style in styles:
        if style in target.conversion.unusable:
            raise UsageError(
                f"{target.provider} cannot use a file of {style} style: {target.conversion.unusable[style]}",
                hint=f"'{target.name}' loads {forms}: leave --style out",
            )
    if named:
        raise UsageError(
            f"target '{target.name}' settles style, level and CPU, so that {' and '.join(named)} would go unheard",
            hint=f"leave them out ('{target.name}' loads {forms}), or leave --target out",
        )
    if with_onnx and "onnx" not in target.conversion.forms:
        raise UsageError(
            f"target '{target.name}' loads no ONNX file, so that --onnx would write one for nobody",
            hint=f"leave --onnx out ('{target.name}' loads {forms}), or leave --target out",
        )
