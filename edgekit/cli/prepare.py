"""`edgekit prepare`."""

from pathlib import Path
from typing import Annotated

from edgekit.check.report import count_of
from edgekit.cli import options
from edgekit.cli.declare import Answer, Option, as_command
from edgekit.cli.options import name_values
from edgekit.cli.screen import show_line, show_remarks
from edgekit.data.images import Preprocess, load_preprocess
from edgekit.devices.find import load_target_here
from edgekit.errors import look_up
from edgekit.jobs.check import PrepareOptions, PrepareReport, prepare_for
from edgekit.model.model import load_model
from edgekit.prepare.interface import LAYOUTS, InterfaceChanges, Layout
from edgekit.progress import Progress


def _read_layout(option: str, name: str, value: str) -> Layout:
    return look_up(LAYOUTS, value, f"{option} {name}={value}: there is no layout '{value}'")


@as_command
def prepare_command(
    model: options.ModelFile,
    dims: options.Sizes,
    opset: Annotated[int | None, Option("Convert to this opset, up or down.", "N")],
    inputs: Annotated[
        str | None,
        Option(
            "Keep these inputs; a value inside the graph becomes an input, and the nodes before it are removed.", "A,B"
        ),
    ],
    outputs: Annotated[
        str | None, Option("Keep these outputs, or values inside the graph, and what they need.", "A,B")
    ],
    freeze: options.Freeze,
    renames: Annotated[dict[str, str], name_values("Rename an input or an output.", "OLD=NEW", "--rename")],
    layouts: Annotated[
        dict[str, Layout],
        name_values("Layout in which the app passes an input.", "INPUT=nhwc", "--layout", _read_layout),
    ],
    embedded: Annotated[
        str | None,
        Option(
            "Take uint8 images: the normalisation of this preprocessing moves into the model.",
            "[INPUT=]FILE.toml",
            "--embed-preprocess",
        ),
    ],
    external: Annotated[
        bool | None,
        Option(
            "Weights in a file beside the model, or in it. Default: beside from 1 GiB on.",
            words="--external-data/--inline-data",
            default=None,
        ),
    ],
    custom_ops: options.CustomOps,
    dequantize: Annotated[bool, Option("Make a dynamically quantized model float, for other targets than the CPU.")],
    fix: Annotated[
        bool,
        Option("Apply the rewrites that check calls automatic (the default).", words="--fix/--no-fix", default=True),
    ],
    target: Annotated[str | None, Option("Also apply the rewrites with which this target takes more nodes.", "NAME")],
    settings: options.Settings,
    out: Annotated[Path, Option("The prepared model (.onnx).", "FILE")],
    progress: Progress,
) -> Answer:
    """Fix the shapes of MODEL and clean its graph, as a provider will see it.

    \b
    Example:
      edgekit prepare model.onnx --dim batch=1 --outputs scores,boxes --out prepared.onnx
      edgekit prepare model.onnx --fix --target nnapi --set api_level=31 --out prepared.onnx
    """
    options.require_suffix(out, ".onnx")
    source = load_model(model, custom_ops=custom_ops)
    image_input, preprocess = _parse_embedded(embedded)
    changes = InterfaceChanges(
        preprocess=preprocess,
        image_input=image_input,
        layouts=layouts,
        renames=renames,
    )
    prepare_options = PrepareOptions(
        dims=dims,
        opset=opset,
        inputs=options.split_names(inputs),
        outputs=options.split_names(outputs),
        constants=freeze,
        changes=changes,
        dequantize=dequantize,
        fix=fix,
        external=external,
        target=None if target is None else load_target_here(target, settings),
    )
    report = prepare_for(source, out, prepare_options, progress)
    return Answer(report, lambda: _show_prepared(report, out))


def _parse_embedded(given: str | None) -> tuple[str, Preprocess | None]:
    """Parses --embed-preprocess [INPUT=]FILE: returns the input, "" if none is named, and the preprocessing.

    Raises:
        DataError: the file cannot be read.
    """
    if given is None:
        return "", None
    name, equals, file = given.rpartition("=")
    # A path may contain "=".
    if not equals or Path(given).exists():
        return "", load_preprocess(Path(given))
    return name, load_preprocess(Path(file))


def _show_prepared(report: PrepareReport, out: Path) -> None:
    """Prints the prepared model, the rewrites and their gain, and the images that an app passes to it."""
    show_line(f"{out}: {count_of(report.model.node_count, 'node')}, opset {report.model.opsets.get('ai.onnx')}")
    show_remarks((*report.model.inputs, *report.model.outputs) if report.is_refaced else ())
    for fix in report.fixes:
        show_line(f"- {fix.id}: {count_of(len(fix.nodes), 'node')}")
    if report.gain is not None:
        for when, share in (("before", report.gain.before), ("after", report.gain.after)):
            taken = f"{share.taken}/{share.nodes} nodes, {share.taken_macs:.0%} of MACs"
            show_line(
                f"{when}: {report.gain.target}: {share.verdict}; {taken} in {count_of(share.partitions, 'partition')}"
            )
    if report.preprocess is not None:
        left = report.preprocess
        show_line(f"an app gives {left.color} images of {left.size[0]} x {left.size[1]} as uint8, not normalised")
