"""Whether a device got warmer or slower while it was timed, and what it used."""

from collections.abc import Iterator, Mapping

from edgekit.devices.device import DeviceState

# Our own thresholds, for a warning only: governors of phones and boards step the clock down at temperatures that are
# the maker's own.
MAX_WARMING_C = 5.0
MAX_CLOCK_CHANGE = 0.1


def describe_change(before: DeviceState | None, after: DeviceState | None) -> Iterator[str]:
    """Yields a warning for the sensor that rose the most beyond MAX_WARMING_C, and for the clock that changed the most.

    A device that tells neither gives none.
    """
    if before is None or after is None:
        return
    warmer = _changes(before.temperatures_c, after.temperatures_c)
    sensor = max(warmer, key=lambda name: warmer[name], default=None)
    if sensor is not None and warmer[sensor] > MAX_WARMING_C:
        yield f"the device got {warmer[sensor]:.0f} °C warmer ({sensor})"
    clocks = {
        name: change / before.clocks_khz[name] for name, change in _changes(before.clocks_khz, after.clocks_khz).items()
    }
    cpu = max(clocks, key=lambda name: abs(clocks[name]), default=None)
    if cpu is not None and abs(clocks[cpu]) > MAX_CLOCK_CHANGE:
        yield f"the clock of {cpu} changed by {clocks[cpu]:+.0%}"


def find_energy(before: DeviceState | None, after: DeviceState | None) -> float | None:
    """Returns the joules that the processor's packages used in between, None where they are not told or began anew."""
    if before is None or after is None:
        return None
    used = {
        name: after.energy_uj[name] - value
        for name, value in before.energy_uj.items()
        # Other zones, such as the whole board's, hold the packages once more.
        if name.startswith("package") and name in after.energy_uj
    }
    # A counter that ran over is not guessed at: its range differs from one processor to the next.
    return sum(used.values()) / 1e6 if used and min(used.values()) >= 0 else None


def _changes(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {name: after[name] - value for name, value in before.items() if name in after and value}
