"""Forecasts of a network's time for devices and precisions, corrected by times that were measured."""

import math
from collections.abc import Mapping, Sequence
from itertools import islice

import msgspec
import numpy as np

from edgekit.check.report import PlacedNodes
from edgekit.errors import UsageError, require_known
from edgekit.evidence import Evidence, Verdict
from edgekit.forecasts import model
from edgekit.forecasts.features import Traffic, Work, list_amounts
from edgekit.forecasts.model import Bits, Fitted
from edgekit.phones import Phone
from edgekit.serialize import NotebookPage, fill

BITS: tuple[Bits, ...] = ("float", "w8a8", "w8a16")
_NEIGHBOURS_SHOWN = 3
# The worst error of a forecast, over families that were left out of the fit, was a factor of 88 (YOLOv9 in w8a8). If a
# given time differs by more than 100, it is probably that of another network.
_MAX_ERROR_FACTOR = 100.0
_NO_FLOAT = "its NPU computes no floats"


class KnownTime(msgspec.Struct, frozen=True, kw_only=True):
    """A measured time in ms, on a device, in a precision; `source` says who measured it."""

    device: str
    precision: Bits
    ms: float
    source: str = "given"


class Neighbour(msgspec.Struct, frozen=True, kw_only=True):
    """A similar measured network, and its time on the same device in the same precision."""

    network: str
    distance: float
    ms: float | None


class Placing(PlacedNodes, frozen=True, kw_only=True):
    """What the provider's rules predict: the nodes it takes, its partitions, and why nodes stay on the CPU."""

    crossing_bytes: int
    cpu_ops: Mapping[str, int] = {}
    reasons: tuple[str, ...] = ()

    @property
    def left(self) -> int:
        """The number of nodes that run on the CPU."""
        return self.nodes - self.taken


class DeviceForecast(msgspec.Struct, frozen=True, kw_only=True):
    """A forecast for a device in a precision; times in ms, memory in MB, None if there is no basis for it.

    80 % of the networks of families that were left out of the fit lie between `low_ms` and `high_ms`. `note` says why
    there is no figure, or what widens the interval. `basis` says where the figure comes from:

    - "networks": the times of other networks;
    - "compiled": those, and a plan of QNN's compiler;
    - "measured": a time given for this very device;
    - "recalibrated": a time that was measured on another device;
    - "scaled": for a CPU, the time of another model there.
    """

    device: str
    chipset: str
    soc_model: int | None
    htp: int | None
    precision: Bits
    ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    basis: str = "networks"
    placing: Placing | None = None
    memory_mb: float | None = None
    low_mb: float | None = None
    high_mb: float | None = None
    nearest: tuple[Neighbour, ...] = ()
    note: str = ""


class ForecastReport(NotebookPage, msgspec.Struct, frozen=True, kw_only=True):
    """A forecast of a model for devices: weaker evidence than any run.

    `distance` is the distance to the nearest measured network, by precision. `faster[p][q]` is the share of measured
    networks that were faster in precision p than in q. `unlike` holds the precisions in which no measured network is
    near. `traffic` holds the bytes that QNN's compiler plans to move in float, if it was run. `ground` names the source
    of the figures.
    """

    model: str
    sha256: str
    evidence: str = Evidence.FORECAST.value
    macs: int
    weights: int
    nodes: int
    work: dict[str, float]
    rows: tuple[DeviceForecast, ...]
    known: tuple[KnownTime, ...] = ()
    distance: dict[Bits, float] = {}
    faster: dict[Bits, dict[Bits, float]] = {}
    unlike: tuple[Bits, ...] = ()
    traffic: Traffic | None = None
    remarks: tuple[str, ...] = ()
    ground: str = ""
    max_ms: float | None = None

    @property
    def verdict(self) -> Verdict:
        """Whether `max_ms` is kept: a device passes only if the whole interval of some precision is below it."""
        return "fail" if self.too_slow else "not proven" if self.unproven else "pass"

    @property
    def too_slow(self) -> tuple[str, ...]:
        """The devices whose fastest forecast exceeds `max_ms`; none if no limit is set."""
        if (limit := self.max_ms) is None:
            return ()
        best: dict[str, float] = {}
        for row in self.rows:
            if row.ms is not None:
                best[row.device] = min(row.ms, best.get(row.device, math.inf))
        return tuple(device for device, ms in best.items() if ms > limit)

    @property
    def unproven(self) -> tuple[str, ...]:
        """The devices that have no forecast, or whose interval includes `max_ms`; none if no limit is set."""
        if (limit := self.max_ms) is None:
            return ()
        proven = {row.device for row in self.rows if row.high_ms is not None and row.high_ms <= limit}
        devices = dict.fromkeys(row.device for row in self.rows)
        return tuple(device for device in devices if device not in proven and device not in self.too_slow)


def read_precisions(text: str) -> tuple[Bits, ...]:
    """Returns the precisions of a comma-separated list; int8 and int16 are other names of w8a8 and w8a16.

    Raises:
        UsageError: a precision does not exist, or the list is empty.
    """
    names: dict[str, Bits] = {**{word: word for word in BITS}, "fp16": "float", "int8": "w8a8", "int16": "w8a16"}
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        require_known(word, names, f"no times were measured in the precision '{word}'")
    if not words:
        raise UsageError("no precision is named", hint=f"valid: {', '.join(BITS)}")
    return tuple(dict.fromkeys(names[word] for word in words))


def choose_phones() -> tuple[Phone, ...]:
    """Returns one measured device, a phone if possible, for each chip that was measured; sorted by name."""
    fitted, _ = model.load_fitted()
    measured = {name for each in fitted.precisions.values() for name in each.devices}
    found: dict[int, Phone] = {}
    for phone in sorted(model.load_phones(), key=lambda phone: (phone.form != "Phone", phone.name)):
        if phone.name in measured:
            found.setdefault(phone.soc_model, phone)
    return tuple(sorted(found.values(), key=lambda phone: phone.name))


def forecast_work(
    work: Work,
    phones: Sequence[Phone],
    precisions: Sequence[Bits],
    known: Sequence[KnownTime],
    placings: Mapping[str, Placing],
    traffic: Traffic | None,
) -> tuple[tuple[DeviceForecast, ...], dict[Bits, float]]:
    """Returns the forecasts for devices, and by precision the distance to the nearest measured network.

    `placings` holds the predicted placement by device, `traffic` what QNN's compiler plans for the float network.

    Raises:
        UsageError: a known time cannot be of this network.
    """
    rows: list[DeviceForecast] = []
    distances: dict[Bits, float] = {}
    for precision in precisions:
        estimate = _Estimate(work, precision, known, traffic)
        distances[precision] = estimate.distance
        rows += [estimate.forecast(phone, placings.get(phone.name)) for phone in phones]
    # Rows of one device are adjacent.
    order = {phone.name: index for index, phone in enumerate(phones)}
    return tuple(sorted(rows, key=lambda row: order[row.device])), distances


def forecast_cpu(work: Work, other: Work, machine: str, ms: float) -> DeviceForecast:
    """Returns the forecast for the CPU of a machine on which another network took `ms`, in float.

    Raises:
        UsageError: the other network has no work that takes time.
    """
    fitted = model.load_cpu_fit()
    other_work, own_work = (fitted.sum(list_amounts(each.kinds)) for each in (other, work))
    if not other_work > 0:
        raise UsageError(f"{machine}: that model does no work to scale by", hint="give one that multiplies")
    scaled_ms = ms * own_work / other_work
    middle, low, high = (_round(scaled_ms * math.exp(value)) for value in (0.0, fitted.low, fitted.high))
    return DeviceForecast(
        device=machine, chipset="CPU", soc_model=None, htp=None, precision="float", basis="scaled",
        ms=middle, low_ms=low, high_ms=high, note=f"scaled by the work from {ms:g} ms of another model there",
    )  # fmt: skip


def _round(value: float) -> float:
    return float(f"{value:.4g}")


class _Estimate:
    """The forecast of a network in one precision, for any device."""

    def __init__(self, work: Work, precision: Bits, known: Sequence[KnownTime], traffic: Traffic | None) -> None:
        self.model, networks = model.load_fitted()
        self.work, self.known = work, known
        self.precision: Bits = precision
        self.fitted: Fitted = self.model.precisions[precision]
        split = {name: self.fitted.split(list_amounts(known.kinds)) for name, known in networks.items()}
        own = self.fitted.split(list_amounts(work.kinds))
        distances = {name: model.measure_distance(own, other) for name, other in split.items()}
        # The distance to each measured network, the nearest first.
        self.ranked = dict(sorted(distances.items(), key=lambda pair: pair[1]))
        self.distance = next(iter(self.ranked.values()))
        self.log_ms = math.log(float(own.sum()))
        self.compiled = self.fitted.compiled if traffic is not None else None
        if self.compiled is not None and traffic is not None:
            # The errors of the forecasts from graph and from plan differ, so their mean has less error than either.
            self.log_ms = (self.log_ms + math.log(self.compiled.sum(model.list_planned(work.kinds, traffic)))) / 2
            # Only networks with a plan were used in the fit.
            self.distance = next(value for name, value in self.ranked.items() if "float" in networks[name].traffic)
        self.known_log_ms, self.known_error = self._calibrate()

    def _calibrate(self) -> tuple[float | None, float]:
        """Returns log ms on the reference device according to known times (None without any), and its uncertainty."""
        estimates: list[tuple[float, float]] = []
        for time in self.known:
            fit = self.model.precisions[time.precision]
            if (device := find_measured(time.device, fit)) is None:
                hint = f"a time on one of these moves the forecast: {', '.join(sorted(fit.devices)[:6])}, ..."
                raise UsageError(f"no network was measured on '{time.device}' in {time.precision}", hint=hint)
            device_free_log_ms = math.log(time.ms) - fit.devices[device]
            guess = fit.sum(list_amounts(self.work.kinds))
            if abs(device_free_log_ms - math.log(guess)) > math.log(_MAX_ERROR_FACTOR):
                forecast = guess * math.exp(fit.devices[device])
                words = f"{time.ms:g} ms on {time.device} cannot be of this network: {forecast:.3g} ms are forecast"
                words += f", and no network is further off than {_MAX_ERROR_FACTOR:g} times"
                raise UsageError(words, hint="give the time of one inference, with its unit: 1.9ms")
            shift, spread = (0.0, 0.0) if time.precision == self.precision else self.fitted.over[time.precision]
            estimates.append((device_free_log_ms + shift, spread))
        if not estimates:
            return None, 0.0
        # Only the times with the least uncertainty count: those in the same precision, if there are any.
        smallest = min(spread for _, spread in estimates)
        closest = [device_free_log_ms for device_free_log_ms, spread in estimates if spread == smallest]
        return float(np.mean(closest)), smallest

    def forecast(self, phone: Phone, placing: Placing | None) -> DeviceForecast:
        """Returns the forecast for a device."""
        row = fill(DeviceForecast, phone, device=phone.name, precision=self.precision, placing=placing)
        if (device := find_measured(phone.name, self.fitted)) is None:
            no_float_unit = self.precision == "float" and not phone.fp16
            note = _NO_FLOAT if no_float_unit else "no network was measured on its chip in this precision"
            return msgspec.structs.replace(row, note=note)
        own = next((t for t in self.known if t.device == phone.name and t.precision == self.precision), None)
        if own is not None:
            # The spread between runs of that phone is not known.
            row = msgspec.structs.replace(row, ms=own.ms, low_ms=own.ms, high_ms=own.ms, basis="measured")
        else:
            fitted, known = self.fitted, self.known_log_ms
            middle = (self.log_ms if known is None else known) + fitted.devices[device]
            if known is None:
                ends = self.compiled or fitted
                low, high = ends.low * (1 + self.distance), ends.high * (1 + self.distance)
            else:
                # The uncertainties between devices and between precisions add up as independent errors.
                high = math.hypot(fitted.spread[device], self.known_error)
                low = -high
            on_cpu = 0 if placing is None else placing.left
            cpu = next((each for each in reversed(self.model.cpu_layers) if on_cpu >= each.least), None)
            if cpu is not None and known is None:
                middle, low, high = (
                    middle + cpu.middle, -math.hypot(low, cpu.low - cpu.middle), math.hypot(high, cpu.high - cpu.middle)
                )  # fmt: skip
            basis = "recalibrated" if known is not None else "networks" if self.compiled is None else "compiled"
            ms, low_ms, high_ms = (_round(math.exp(value)) for value in (middle, middle + low, middle + high))
            note = "" if cpu is None or placing is None else f"{placing.left} of {placing.nodes} nodes on the CPU"
            row = msgspec.structs.replace(row, ms=ms, low_ms=low_ms, high_ms=high_ms, basis=basis, note=note)
        table = model.load_table()
        neighbours = (
            Neighbour(network=name, distance=round(distance, 3), ms=measured[device].ms)
            for name, distance in self.ranked.items()
            if device in (measured := table.find_rows(table.find_key(name), self.precision))
        )
        row = msgspec.structs.replace(row, nearest=tuple(islice(neighbours, _NEIGHBOURS_SHOWN)))
        if (fit := self.model.memory[self.precision].get(device)) is None:
            return row
        mb = max(1.0, fit.sum([*(self.work.kinds.get(kind, 0.0) for kind in model.MEMORY_KINDS), 1.0]))
        low, high = (round(mb * math.exp(value), 1) for value in (fit.low, fit.high))
        return msgspec.structs.replace(row, memory_mb=round(mb, 1), low_mb=low, high_mb=high)


def find_measured(name: str, fitted: Fitted) -> str | None:
    """Returns the measured device with the same chip as a device, itself if it was measured; None if there is none.

    Devices with the same SoC number have the same times, whatever the names of their chips.
    """
    if name in fitted.devices:
        return name
    numbers = {phone.name: phone.soc_model for phone in model.load_phones()}
    return next((each for each in fitted.devices if numbers[each] == numbers[name]), None)
