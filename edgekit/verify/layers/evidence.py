"""What the layers of a bundle's model were found to compute when it was built: measured once, digested with the rest.

The float model is gone when a bundle is verified, so that its layers cannot be compared again. What was found lies
under the manifest's digests. It explains what the outputs show, and is no part of the verdict.
"""

import msgspec

from edgekit.bundle.folder import LAYERS, Bundle
from edgekit.bundle.golden.golden import Golden, read_inputs
from edgekit.bundle.manifest.manifest import encode_json
from edgekit.data.samples import Samples, select_samples, spread_indices
from edgekit.errors import BundleError, ModelError, RuntimeRefusal
from edgekit.model.model import Model
from edgekit.verify.layers.comparison import LayerReport, compare_layers

# As many as tools/bench/seeded_faults.py looks at for its figures.
_SAMPLES = 4


class LayerEvidence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The layers of a bundle's model against the float model's; `note` says why they were not compared."""

    layers: tuple[LayerReport, ...] = ()
    note: str = ""


def compare_with_float(prepared: Model, deployed: Model | None, golden: Golden) -> LayerEvidence:
    """Returns how the layers of the model that goes into a bundle compare with those of the float model.

    `deployed` is None for a bundle without an ONNX file.
    """
    if deployed is None:
        return LayerEvidence(note="the layers were not compared: the bundle holds no ONNX file")
    try:
        return LayerEvidence(layers=compare_layers(prepared, deployed, spread_golden(golden)))
    except (ModelError, RuntimeRefusal) as error:
        reason = error.message
        for model in (prepared, deployed):
            reason = reason.replace(f"{model.path.parent}/", "")
        return LayerEvidence(note=f"the layers were not compared with the float model's: {reason}")


def spread_golden(golden: Golden, count: int = _SAMPLES) -> Samples:
    """Returns the few samples, spread over all, on which the tensors inside a model are looked at."""
    return select_samples(read_inputs(golden), spread_indices(golden.samples, count))


def encode_evidence(evidence: LayerEvidence) -> bytes:
    """Returns what goes into a bundle."""
    return encode_json(evidence)


def read_evidence(bundle: Bundle) -> LayerEvidence:
    """Returns what was found when the bundle was built, and a note where nothing was kept of it.

    Raises:
        BundleError: the file is malformed.
    """
    if LAYERS not in bundle.manifest.files:
        return LayerEvidence(note=f"no layer was held against the float model's: the bundle has no {LAYERS}")
    path = bundle.folder / LAYERS
    try:
        return msgspec.json.decode(path.read_bytes(), type=LayerEvidence)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BundleError(f"'{path}' is malformed: {error}", hint="build the bundle again") from error
