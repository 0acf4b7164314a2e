"""Why a bundle differs: the step, a known trap, or a device that is not honest."""
