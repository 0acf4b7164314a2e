"""A model in half precision for a target, and which of its nodes stay in float32 because half precision loses them."""

from collections.abc import Collection
from pathlib import Path

from edgekit.bundle.golden.golden import Golden
from edgekit.check.report import CheckReport
from edgekit.errors import RuntimeRefusal
from edgekit.model.model import Model
from edgekit.quantize.weight_only.fp16 import convert_to_fp16
from edgekit.target import Target
from edgekit.verify.layers.evidence import spread_golden
from edgekit.verify.layers.lossy import find_lossy
from edgekit.verify.layers.overflows import find_overflows

# As many as make the worst of them known, at the price of running a float model with every optimisation off.
_SAMPLES = 8


def halve_model(
    prepared: Model, check: CheckReport, target: Target, golden: Golden, out: Path, notes: list[str]
) -> Model:
    """Returns the model in half precision, but for what the CPU runs and what overflows or loses too much there.

    What stays in float32 for its values is told in `notes`.

    Raises:
        ModelError: the model cannot be converted.
        RuntimeRefusal: ONNX Runtime does not load the result.
    """
    left = [node.name for node in check.node_list if not node.taken]
    beyond = {name: reach for name, reach in _find_overflows(prepared, golden).items() if name not in left}
    if beyond:
        worst = max(beyond, key=beyond.__getitem__)
        notes.append(
            f"{len(beyond)} nodes stay in float32, because values there come near to 65504, where half precision ends,"
            f" or lie beyond it: {', '.join(list(beyond)[:5])}; the largest is {beyond[worst]:.3g} at '{worst}';"
            " --precision fp32 keeps all of them"
        )
    halved = [node.name for node in check.node_list if node.taken and node.name not in beyond]
    lossy = _find_lossy(prepared, halved, target, golden, notes)
    converted = convert_to_fp16(prepared, [*left, *beyond, *lossy], out)
    if converted.clamped:
        notes.append(f"weights beyond 65504 were clamped to fp16's range in {', '.join(converted.clamped[:5])}")
    return converted.model


def _find_overflows(prepared: Model, golden: Golden) -> dict[str, float]:
    try:
        return find_overflows(prepared, spread_golden(golden))
    except RuntimeRefusal:
        # The layers cannot be compared either, and what they say of it goes into the bundle.
        return {}


def _find_lossy(
    prepared: Model, halved: Collection[str], target: Target, golden: Golden, notes: list[str]
) -> tuple[str, ...]:
    least_db = target.thresholds.min_sqnr_db
    try:
        found = find_lossy(prepared, halved, spread_golden(golden, _SAMPLES), least_db)
    except RuntimeRefusal:
        return ()
    if found is None:
        return ()
    notes.append(
        f"{len(found.nodes)} nodes from '{found.nodes[0]}' to '{found.nodes[-1]}' stay in float32: in half precision"
        f" the outputs keep {found.sqnr_db:.1f} dB of the {least_db:g} that the target asks for, so {found.kept_db:.1f}"
        " dB are expected; --precision fp32 keeps all of them"
    )
    return found.nodes
