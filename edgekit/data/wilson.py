"""How certain a share is that was counted on few samples."""

import math

Z95 = 1.959963984540054
"""95 % of a normal distribution lie within this many standard deviations of the mean."""


def wilson_interval(hits: int, total: int) -> tuple[float, float]:
    """Returns the interval of a share of hits by Wilson's score method (E. B. Wilson, JASA 22, 1927).

    Unlike the normal approximation it stays within 0 and 1, and is not empty when all samples hit.
    """
    if total == 0:
        return 0.0, 1.0
    share, z2 = hits / total, Z95 * Z95
    centre = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = Z95 * math.sqrt(share * (1 - share) / total + z2 / (4 * total * total)) / (1 + z2 / total)
    return max(0.0, centre - half), min(1.0, centre + half)
