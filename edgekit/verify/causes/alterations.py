"""Was a bundle's model changed since the build: by its layers, and by its files of ORT format against its ONNX file."""

from collections.abc import Iterator

import msgspec

from edgekit.bundle.folder import Bundle, read_target
from edgekit.bundle.golden.golden import read_inputs
from edgekit.convert.equality import MAX_SAMPLES, compare_with_source
from edgekit.convert.ort_form import OrtOptions, Style
from edgekit.data.samples import select_samples, spread_indices
from edgekit.errors import RuntimeRefusal
from edgekit.model.model import load_model
from edgekit.target import Form
from edgekit.verify.causes.fingerprints import find_changed

COMPARED_FORMS: tuple[Form, ...] = ("onnx", "full", "runtime")
"""Forms of a model that this machine can run."""
_HALF_TOLERANCE = 0.05
"""Files of ORT format of an fp16 bundle are made from the float32 model."""


class Alteration(msgspec.Struct, frozen=True, kw_only=True):
    """What is not as it was built, in words, and the layer where it begins, "" where that is not known."""

    layer: str
    words: str


def find_alterations(bundle: Bundle) -> tuple[Alteration, ...]:
    """Returns what in a bundle is not as it was built.

    Digests tell first: a bundle with a changed file cannot be opened. This is for one whose digests were made anew.

    Raises:
        BundleError: the fingerprints of the layers are malformed.
    """
    changed = find_changed(bundle)
    if changed is not None:
        return (Alteration(layer=changed.layer, words=changed.words),)
    return tuple(_compare_forms(bundle)) if "onnx" in bundle.manifest.forms else ()


def _compare_forms(bundle: Bundle) -> Iterator[Alteration]:
    """Yields the files of ORT format that do not compute what the ONNX file beside them does."""
    source, target = load_model(bundle.find_model("onnx")), read_target(bundle)
    few = select_samples(read_inputs(bundle.golden), spread_indices(bundle.manifest.golden.samples, MAX_SAMPLES))
    styles: tuple[Style, ...] = ("full", "runtime")
    for style in styles:
        if style not in bundle.manifest.forms:
            continue
        path = bundle.find_model(style)
        try:
            found = compare_with_source(source, path, OrtOptions(style=style, cpu=target.conversion.cpu), few)
        except RuntimeRefusal:
            continue
        if found.error > max(found.tolerance, _HALF_TOLERANCE if bundle.manifest.precision == "fp16" else 0.0):
            first = f", first in layer '{found.first_bad}'" if found.first_bad else ""
            words = f"'{path.name}' does not compute what '{source.path.name}' beside it does{first}"
            reason = f"error {found.error:.2g}, at most {found.tolerance:g} is allowed: one of them was changed since"
            yield Alteration(layer=found.first_bad, words=f"{words} ({reason}); build again")
