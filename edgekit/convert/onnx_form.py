"""The ONNX form: the model as it goes into a bundle, stamped, with its external data in one file beside it."""

from pathlib import Path

import onnx

from edgekit.model.model import Model, read_proto
from edgekit.prepare.weights.external import write_beside

ONNX_FILE = "model.onnx"
STAMP = "edgekit.source_sha256"
"""The entry of a file's metadata that holds the sha256 of the model whose graph it has."""


def write_stamped(model: Model, folder: Path) -> Model:
    """Writes a model, stamped, into a folder and returns it.

    Its metadata names the file it came from by sha256, also as Core ML's cache key: that provider keeps compiled models
    under the key and never compares them with the file (ORT's `coreml_execution_provider`, `ModelCacheDirectory`).
    """
    proto = read_proto(model, weights=False)
    stamps = {entry.key: entry.value for entry in proto.metadata_props}
    stamps |= {STAMP: model.sha256, "COREML_CACHE_KEY": model.sha256[:32]}
    onnx.helper.set_model_props(proto, dict(sorted(stamps.items())))
    return write_beside(proto, model, folder / ONNX_FILE)
