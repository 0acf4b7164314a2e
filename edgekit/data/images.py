"""Images as model inputs: the preprocessing, which an app must repeat, is described as data."""

import json
import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Literal, get_args

import msgspec
import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from edgekit.data.npz import MALFORMED
from edgekit.errors import DataError, reraised
from edgekit.model.tensors import Array, TensorSpec, shape_matches
from edgekit.serialize import read_toml

SUFFIXES = frozenset({".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".webp"})
# Pillow's own guard warns at a third of this and raises at two thirds (Image.MAX_IMAGE_PIXELS, 89 million); both are
# against files that unpack to far more than their size.
_MAX_PIXELS = 1 << 28
_MOST_SIDE = 1 << 14
_NO_IMAGE: tuple[type[Exception], ...] = (*MALFORMED, UnidentifiedImageError, Image.DecompressionBombError)
# The transposition that shows an image upright, by the Orientation of EXIF 2.32 (tag 0x0112); 1 is upright.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # fmt: skip
_MOST_CHANNELS = 4
# A scale may be written with a few digits, such as 0.0039.
_ROUNDED = 1.01
ImageType = Literal["float32", "float16", "uint8", "int8"]


class Preprocess(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """From an image file to a tensor: resize the shorter side, crop the centre, order, scale, normalise.

    `size` is [width, height] of the tensor. With `resize` the shorter side is scaled to it and the centre is cropped;
    with `letterbox` the whole image is scaled to fit, in the centre of a frame of this grey (0 to 255; YOLO models are
    trained with 114); otherwise the image is stretched to `size`. A value v becomes (v * scale - mean) / std, per
    channel in the order of `color`.
    """

    size: tuple[int, int]
    resize: int | None = None
    letterbox: int | None = None
    resample: Literal["nearest", "bilinear", "bicubic", "lanczos"] = "bilinear"
    color: Literal["RGB", "BGR", "L"] = "RGB"
    layout: Literal["NCHW", "NHWC"] = "NCHW"
    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    dtype: ImageType = "float32"


def load_preprocess(path: Path) -> Preprocess:
    """Reads a preprocessing file.

    Raises:
        DataError: the file is missing or malformed, or a key is unknown.
    """
    preprocess = read_toml(path, Preprocess, hint="--preprocess takes a .toml file", error=DataError)
    sizes = (*preprocess.size, *(() if preprocess.resize is None else (preprocess.resize,)))
    if preprocess.letterbox is not None and (preprocess.resize is not None or not 0 <= preprocess.letterbox <= 255):
        words = f"'{path}': letterbox is a grey from 0 to 255, and goes without resize"
        raise DataError(words, hint="letterbox = 114 suits YOLO")
    numbers = (preprocess.scale, *preprocess.mean, *preprocess.std)
    if not all(0 < size <= _MOST_SIDE for size in sizes) or not all(map(math.isfinite, numbers)):
        words = f"'{path}' is no preprocessing: sizes {list(sizes)}, numbers {list(numbers)[:7]}"
        raise DataError(words, hint=f"sizes are 1 to {_MOST_SIDE}, numbers finite")
    channels = 1 if preprocess.color == "L" else 3
    if any(len(values) not in {1, channels} for values in (preprocess.mean, preprocess.std)) or 0.0 in preprocess.std:
        words = f"'{path}': mean and std want 1 or {channels} numbers, and std none that is 0"
        raise DataError(words, hint="for example mean = [0.485, 0.456, 0.406] and std = [0.229, 0.224, 0.225]")
    # Subtracted from pixels that are all smaller, or all larger, it leaves a picture hardly any contrast.
    farthest, reach = max(preprocess.mean, key=abs), 255 * abs(preprocess.scale)
    if abs(farthest) > reach * _ROUNDED:
        words = f"'{path}': mean = {farthest:g} lies outside the pixels, which reach {reach:g} once they are scaled"
        raise DataError(words, hint="scale = 1, where mean and std are of pixels from 0 to 255")
    return preprocess


def refuse_other_input(preprocess: Preprocess, spec: TensorSpec) -> None:
    """Refuses a preprocessing that makes other tensors than an input takes, and names the keys that make these.

    Raises:
        DataError: the size, the layout, the number of channels or the type is another one.
    """
    if _makes(preprocess, spec):
        return
    fitting = next((other for other in _list_others(preprocess, spec) if _makes(other, spec)), None)
    before, after = (msgspec.to_builtins(each) for each in (preprocess, fitting or preprocess))
    keys = [f"{key} = {json.dumps(value)}" for key, value in after.items() if value != before[key]]
    words = f"--preprocess makes {preprocess.dtype}{_shape_of(preprocess)} of an image, the model wants {spec}"
    none_fits = "no preprocessing makes that of one image: give a .npz"
    raise DataError(words, hint=f"write into the file: {'; '.join(keys)}" if fitting else none_fits)


def _shape_of(preprocess: Preprocess) -> list[int]:
    (width, height), channels = preprocess.size, 1 if preprocess.color == "L" else 3
    return [channels, height, width] if preprocess.layout == "NCHW" else [height, width, channels]


def _makes(preprocess: Preprocess, spec: TensorSpec) -> bool:
    shape = _shape_of(preprocess)
    return preprocess.dtype == spec.dtype and (shape_matches(shape, spec) or shape_matches([1, *shape], spec))


def _list_others(preprocess: Preprocess, spec: TensorSpec) -> Iterator[Preprocess]:
    """Yields the preprocessing with the sizes and the type of the input, in each layout, in colour and in grey."""
    first, second, third = (None, None, None, *(spec.shape or ()))[-3:]
    axes = (("NCHW", (third, second)), ("NHWC", (second, first)))
    for (layout, sides), color in product(axes, (preprocess.color, "RGB", "L")):
        # An open dimension takes what the file says. So short a side is an axis of channels.
        size = tuple(side if isinstance(side, int) else now for side, now in zip(sides, preprocess.size, strict=True))
        if min(size) > _MOST_CHANNELS and spec.dtype in get_args(ImageType):
            yield msgspec.structs.replace(preprocess, size=size, layout=layout, color=color, dtype=spec.dtype)


def read_image(path: Path, preprocess: Preprocess) -> Array:
    """Returns an image as a tensor of shape [C, H, W] or [H, W, C].

    Raises:
        DataError: the file is no image, or far too large.
    """
    # Each of Pillow's readers raises other exceptions.
    unread = DataError(f"'{path}' is no image that can be read", hint="remove it from the folder")
    with reraised(_NO_IMAGE, unread), Image.open(path) as opened:
        # The size comes from the header, before a pixel is unpacked.
        if opened.width * opened.height > _MAX_PIXELS:
            raise DataError(f"'{path}' has {opened.width} x {opened.height} pixels", hint="give smaller images")
        # First the colour, then the size: palettes cannot be interpolated.
        image = opened.convert("L" if preprocess.color == "L" else "RGB")
        # Phones store the sensor's image, and in EXIF how the phone was held. Pillow's own exif_transpose rewrites all
        # tags, and fails if one of them is damaged.
        turn = _UPRIGHT.get(opened.getexif().get(ExifTags.Base.Orientation, 1))
        image = _resize(image if turn is None else image.transpose(turn), preprocess)
    pixels = np.asarray(image).reshape(image.height, image.width, -1)
    if preprocess.color == "BGR":
        pixels = pixels[..., ::-1]
    if preprocess.dtype in {"float32", "float16"}:
        mean, std = np.asarray(preprocess.mean, np.float32), np.asarray(preprocess.std, np.float32)
        # All in float32, as in an app: in float64 the last bit would differ from the phone's input. Values beyond the
        # range of float32 are refused later, by the check of the samples, which names the input.
        with np.errstate(all="ignore"):
            pixels = (pixels.astype(np.float32) * np.float32(preprocess.scale) - mean) / std
    elif preprocess.dtype == "int8":
        # In 16 bits, because the values 0 to 255 do not fit into int8 before 128 is subtracted.
        pixels = pixels.astype(np.int16) - 128
    pixels = pixels.astype(preprocess.dtype)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1) if preprocess.layout == "NCHW" else pixels)


def _resize(image: Image.Image, preprocess: Preprocess) -> Image.Image:
    width, height = preprocess.size
    method = Image.Resampling[preprocess.resample.upper()]
    if preprocess.letterbox is not None:
        factor = min(width / image.width, height / image.height)
        image = image.resize((max(1, round(image.width * factor)), max(1, round(image.height * factor))), method)
        frame = Image.new(image.mode, (width, height), (preprocess.letterbox,) * len(image.getbands()))
        frame.paste(image, ((width - image.width) // 2, (height - image.height) // 2))
        return frame
    if preprocess.resize is None:
        return image.resize((width, height), method)
    factor = preprocess.resize / min(image.size)
    # Never smaller than the crop: rounding could leave the image one pixel short.
    image = image.resize((max(width, round(image.width * factor)), max(height, round(image.height * factor))), method)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))
