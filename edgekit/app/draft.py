"""Writes a first `edgekit.toml` for a model: facts come from the model, and guesses are marked in comments."""

import contextlib
import json
import re
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from PIL import Image

from edgekit._files import work_folder
from edgekit.bundle.snippets import make_environment
from edgekit.data.images import SUFFIXES, Preprocess
from edgekit.data.samples import load_samples, read_shapes, refuse_endless
from edgekit.errors import DataError, UsageError, reraised
from edgekit.graph.graph import view_model
from edgekit.model.model import Model, load_model, read_proto
from edgekit.model.state import State, first_state, resolve_state
from edgekit.model.tensors import TensorSpec
from edgekit.package.package import Kind
from edgekit.prepare.clean import prepare_model
from edgekit.prepare.shapes import find_sizes
from edgekit.serialize import ready_type
from edgekit.target import target_names

_MAX_IMAGES = 64
# Networks for images halve their size five times, so sides must be multiples of 32.
_STRIDE = 32
_DEFAULT_SIDE = 224
_MOST_STEPS = 16
_INTEGER_TYPES = frozenset({"int32", "int64"})
_Side = Annotated[int, msgspec.Meta(ge=1, le=1 << 14)]
_Value = TypeVar("_Value")


class _FrozenInput(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    value: int
    before: int
    after: int


def draft_app(
    model: Path,
    folder: Path,
    *,
    data: str | None,
    images: Path | None,
    targets: Sequence[str],
    labels: Path | None,
    package: Kind | None,
    existing: str,
) -> tuple[str, list[str]]:
    """Returns the text of an `edgekit.toml` for a model, and a line for each fact that was found or guessed.

    Paths in it are relative to `folder`. It packs the bundles as `package`, if that is given. If `existing` is the text
    of an existing `edgekit.toml`, the model is added at its end, for the targets of that file.

    Raises:
        EdgekitError: the model cannot be read, there is no image, or the data or a target does not exist.
        UsageError: neither or both of `data` and `images` are given, or the model does not take one image.
    """
    if (data is None) == (images is None):
        raise UsageError("init wants sample inputs", hint="give --images FOLDER or --data DATA")
    if (unknown := next((name for name in targets if name not in target_names()), None)) is not None:
        raise UsageError(f"there is no target '{unknown}'", hint=f"targets: {', '.join(target_names())}")
    source = load_model(model)
    side, stride, known = _read_metadata(source)
    # Dynamic height and width get the side of the images, every other dynamic dimension gets 1.
    dims, state = dict[str, int](), State()
    if side is None and images is not None:
        short_side = statistics.median(min(size) for size in _read_sizes(images))
        side = max(stride, min(_DEFAULT_SIDE * 2, round(short_side / stride) * stride))
    for spec in source.inputs:
        for axis, name in spec.name_axes().items():
            dims[name] = side if side is not None and axis in _find_image_axes(spec) else 1
    # `init` does not run the user's code: samples that a function makes are not read.
    if data is not None and Path(data).exists():
        shapes = read_shapes(data, source.inputs)
        dims |= find_sizes(source.inputs, shapes)
        state = _guess_state(source, data, {name for sample in shapes for name in sample})
    frozen = list(_find_frozen(source, dims))
    remarks = [f"freezing '{one.name}' at {one.value} leaves {one.after} of {one.before} nodes" for one in frozen]
    remarks += [f"'{name}' is taken as {size}" for name, size in dims.items()]
    sequence = f"{state.steps} samples in a row are taken as a sequence"
    remarks += [f"output '{output}' feeds '{name}', and {sequence}" for name, output in state.feeds.items()]
    preprocess = None
    if images is not None:
        guessed = _guess_preprocess(source, images, {entry.name for entry in frozen}, dims)
        preprocess = msgspec.structs.replace(guessed, **known)
        kind = f"{preprocess.dtype}{', in a frame' if preprocess.letterbox is not None else ''}"
        size = f"{preprocess.size[0]} x {preprocess.size[1]}"
        taken = f"images are taken as {preprocess.layout}, {size}, {preprocess.color}, {kind}"
        remarks.append(f"{taken}: compare that with how the model was trained")
    environment = make_environment(Path(__file__).parent / "templates")
    environment.filters.update({"toml": _write_value, "key": _quote_key, "table": _write_table})
    text = environment.get_template("edgekit.toml.j2").render(
        name=source.name,
        path=_relate(source.path, folder),
        dims=dims,
        state=state,
        frozen=frozen,
        freeze={entry.name: entry.value for entry in frozen},
        source=_relate(images or Path(str(data)), folder),
        labels=None if labels is None else _relate(labels, folder),
        preprocess=None if preprocess is None else msgspec.to_builtins(preprocess),
        targets=targets,
        package=package,
        beside=existing,
    )
    head = existing.rstrip("\n") + "\n" if existing else ""
    return head + text, remarks


def _guess_state(model: Model, data: str, held: Collection[str]) -> State:
    """Returns the state that is not among the inputs `held` by the data, and how many samples make a sequence.

    These are the most steps, up to 16, of which all samples make whole sequences.
    """
    feeds = resolve_state(None, model.inputs, model.outputs).feeds
    if all(name in held for name in feeds):
        return State()
    absent = {spec.name: first_state(spec) for spec in model.inputs if spec.name in feeds}
    count = load_samples(data, model.inputs, absent=absent).count
    whole = (steps for steps in range(2, _MOST_STEPS + 1) if count % steps == 0)
    return State(steps=max(whole, default=_MOST_STEPS), feeds=feeds)


def _read_metadata(model: Model) -> tuple[int | None, int, dict[str, Any]]:
    """Returns facts from a model's metadata: the side of its square images in pixels, their stride, preprocessing keys.

    The keys `imgsz`, `stride` and `task` are those of Ultralytics (docs.ultralytics.com/modes/export), whose detectors
    (but not classifiers) are trained on letterboxed images; `mean` and `std` are taken as they are. The side is None if
    it is not stated or not square, and the stride 32 if it is not stated.
    """
    found = {entry.key: entry.value for entry in read_proto(model, weights=False).metadata_props}

    def read(key: str, kind: type[_Value]) -> _Value | None:
        with contextlib.suppress(msgspec.DecodeError):
            return msgspec.json.decode(found.get(key, ""), type=ready_type(kind))
        return None

    colours = {key: read(key, tuple[float, float, float]) for key in ("mean", "std")}
    preprocess: dict[str, Any] = {key: value for key, value in colours.items() if value is not None}
    if found.get("task") in {"detect", "segment", "pose", "obb"}:
        preprocess |= {"letterbox": 114, "resize": None}
    height, width = read("imgsz", tuple[_Side, _Side]) or (0, 1)
    return height if height == width else None, read("stride", _Side) or _STRIDE, preprocess


def _find_image_axes(spec: TensorSpec) -> tuple[int, ...]:
    """Returns the axes of height and width, none if the input is no image."""
    if spec.shape is None or len(spec.shape) != 4:
        return ()
    return (1, 2) if spec.shape[3] in {1, 3} else (2, 3)


def _read_sizes(folder: Path) -> Iterator[tuple[int, int]]:
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    if not files:
        raise DataError(f"'{folder}' holds no images", hint="give a folder of JPEG or PNG files")
    files = files[:_MAX_IMAGES]
    refuse_endless(files)
    for path in files:
        unreadable = DataError(f"'{path}' is no image that can be read", hint="remove it from the folder")
        with reraised((OSError, ValueError), unreadable), Image.open(path) as image:
            yield image.size


def _guess_preprocess(model: Model, images: Path, frozen: set[str], dims: Mapping[str, int]) -> Preprocess:
    image_inputs = [spec for spec in model.inputs if spec.name not in frozen]
    if len(image_inputs) != 1 or not _find_image_axes(image_inputs[0]):
        named = ", ".join(spec.name for spec in image_inputs)
        raise UsageError(f"the model takes no image alone: its inputs are {named}", hint="give --data with all of them")
    (spec,) = image_inputs
    list(_read_sizes(images))
    names = spec.name_axes()
    shape = [dim if isinstance(dim, int) else dims[names[axis]] for axis, dim in enumerate(spec.shape or ())]
    height_axis, width_axis = _find_image_axes(spec)
    channels = shape[3 if height_axis == 1 else 1]
    is_bytes = spec.dtype in {"uint8", "int8"}
    guessed = {
        "size": (shape[width_axis], shape[height_axis]),
        "resize": shape[width_axis] if shape[width_axis] == shape[height_axis] else None,
        "color": "L" if channels == 1 else "RGB",
        "layout": "NHWC" if height_axis == 1 else "NCHW",
        # Bytes stay as they are; floats are scaled to 0 to 1, unless the model's metadata state otherwise.
        "scale": 1.0 if is_bytes else 1 / 255,
        "dtype": spec.dtype,
    }
    no_image = UsageError(f"input '{spec.name}' takes {spec.dtype}, no image", hint="give --data instead")
    with reraised(msgspec.ValidationError, no_image):
        return msgspec.convert(guessed, ready_type(Preprocess))


def _find_frozen(model: Model, dims: Mapping[str, int]) -> Iterator[_FrozenInput]:
    """Yields the scalar integer inputs that choose a branch, each with a value that the graph compares it with."""
    graph = view_model(read_proto(model, weights=False), model.path.parent)
    for spec in model.inputs:
        if spec.dtype not in _INTEGER_TYPES or spec.shape not in {(), (1,)}:
            continue
        # The value that an Equal compares the input with.
        readers = (node for node in graph.readers(spec.name) if node.op_type == "Equal")
        compared = ([graph.number(other) for other in node.input if other != spec.name] for node in readers)
        value = next((int(numbers[0]) for numbers in compared if numbers and numbers[0] is not None), None)
        if value is None:
            continue
        other_dims = {name: size for name, size in dims.items() if not name.startswith(f"{spec.name}:")}
        with work_folder() as work:
            frozen = prepare_model(model, work / "frozen.onnx", other_dims, constants={spec.name: value})
            after = view_model(read_proto(frozen, weights=False))
        counts = [sum(len(each.nodes) for each in graph_of_model.iterate()) for graph_of_model in (graph, after)]
        yield _FrozenInput(name=spec.name, value=value, before=counts[0], after=counts[1])


def _relate(path: Path, folder: Path) -> str:
    if not path.exists():
        # `module:function` is no path, and stays as it is.
        if ":" in str(path):
            return str(path)
        raise DataError(f"'{path}' does not exist", hint="check the path")
    full, root = path.absolute(), folder.absolute()
    return full.relative_to(root).as_posix() if full.is_relative_to(root) else str(full)


def _write_value(value: Any) -> str:
    """Returns a text, a number or a list of numbers in TOML, which writes these as JSON does."""
    return json.dumps(value, ensure_ascii=False)


def _write_table(values: Mapping[str, object]) -> str:
    return f"{{ {', '.join(f'{_quote_key(key)} = {_write_value(value)}' for key, value in values.items())} }}"


def _quote_key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _write_value(name)
