"""How much is lost of what truths drawn from the float model would lose."""

import numpy as np

from edgekit.model.tensors import Array


def soften(share: float | Array) -> Array:
    """Returns the share of a figure that is lost, of the one that truths drawn from the float model alone would lose.

    Half of it counts as long as it is small, and all where all is lost: what moves a little does so towards the truth
    as often as away from it. The law of raw heads (`loss`), found again by 46 plans of six detectors, which lost 0.06
    where 0.10 was drawn, 0.2 for 0.25, 0.32 for 0.44, 0.6 for 0.65; and by 13 of an embedding where little is lost,
    0.03 for 0.05 and 0.10 for 0.17; much was 0.50 for 0.44 there, of which this says 0.32.
    """
    share = np.clip(share, -1.0, 1.0)
    return np.asarray(share * (1 + np.abs(share)) / 2)
