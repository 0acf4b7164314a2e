"""What was found of a run's layers and of its placement, and what it is judged by."""

from typing import Literal

import msgspec

from edgekit.check.report import Placed
from edgekit.evidence import Evidence
from edgekit.verify.layers.comparison import LayerReport
from edgekit.verify.metrics.outputs import OutputReport
from edgekit.verify.tasks.scores import TaskReport

OBSERVING = (Evidence.DEVICE, Evidence.SIMULATOR, Evidence.SAME_BINARY, Evidence.SAME_EP)
"""What runs the target's own provider, and so can tell what it takes."""


class Located(msgspec.Struct, frozen=True, kw_only=True):
    """The first layer after which a device leaves the model, None if it does not; and how many runs that took.

    `found_by` tells whether the device gave the tensors inside, which `layers` then measures, or the model was cut at
    one of `cuts` places. `notes` say what was done otherwise, and why. `operations` names for each layer what it is in
    the ML Program that Core ML's provider wrote, "conv 'stem__0' (half)", where that provider runs.
    """

    layer: str | None
    runs: int
    cuts: int
    found_by: Literal["tensors", "cuts"] = "cuts"
    layers: tuple[LayerReport, ...] = ()
    notes: tuple[str, ...] = ()
    operations: dict[str, tuple[str, ...]] = {}


class PlacementGap(msgspec.Struct, frozen=True, kw_only=True):
    """How many nodes a provider was predicted to take, and what of them ran on the CPU instead.

    `lost_macs` is their share of the model's multiply-accumulates, or of the predicted nodes where nothing multiplies;
    `nodes` names the first of them. `hidden` counts the nodes that were predicted for the CPU and are nowhere in what
    the device reports: ONNX Runtime merged them into others, or the device left them out.
    """

    predicted: int
    lost: int
    lost_macs: float
    nodes: tuple[str, ...]
    hidden: int = 0


class FileReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a model file that a run did not open, opened on the same device as an app would.

    `provider_nodes` counts the nodes that each provider took, `placed` says which, None where that is not known,
    `outputs` tell how far a few samples lay from the float model, and `failure` says why there are none; with `crashed`
    an emulator's program died.
    """

    file: str
    form: str
    provider_nodes: dict[str, int] = {}
    placed: Placed | None = None
    load_ms: float = 0.0
    outputs: tuple[OutputReport, ...] = ()
    failure: str | None = None
    crashed: bool = False


class BucketReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of samples that were filled up to one size: `outputs` are held against those of the samples alone.

    `lengths` are those of the samples that ran, none where none did; `failure` says why there are no figures;
    with `crashed` an emulator's program died.
    """

    size: int
    file: str
    lengths: tuple[int, ...] = ()
    provider_nodes: dict[str, int] = {}
    outputs: tuple[OutputReport, ...] = ()
    failure: str | None = None
    crashed: bool = False


class SizesReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of samples in each size of a dimension that a bundle has a model for.

    `filled` tells how far the float model itself is, with samples filled up to the largest, from what it makes of them
    as they are.
    """

    dim: str
    filled: tuple[OutputReport, ...]
    sizes: tuple[BucketReport, ...]


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a run is judged by, every reason why it does not pass there, and why that cannot be told.

    `name` is "run", "output", "metric", "placement", "costs", "session", "state", "size" or "file"; `subject` names the
    output, the metric, the size or the file.
    """

    name: Literal["run", "output", "metric", "placement", "costs", "session", "state", "size", "file"]
    subject: str = ""
    failures: tuple[str, ...] = ()
    unproven: tuple[str, ...] = ()


class StandIn(msgspec.Struct, frozen=True, kw_only=True):
    """A metric over all labelled samples, measured on a faster device that computes the same.

    `device` measured it. Of the `compared` samples that both ran, `agreeing` got the same score; `task` holds what the
    device found, less what the other one lost on those.
    """

    device: str
    task: TaskReport
    compared: int
    agreeing: int

    @property
    def agrees(self) -> bool:
        """True if every sample that both ran got the same score: then the metric is the other device's too."""
        return self.compared > 0 and self.agreeing == self.compared
