"""Forecasts of a network for devices and precisions, corrected by known times, and what follows from them."""

import math
from collections.abc import Mapping, Sequence
from itertools import islice

import msgspec
import numpy as np

from edgekit.errors import UsageError, suggest_name
from edgekit.evidence import Evidence, Verdict
from edgekit.forecasts import model
from edgekit.forecasts.features import Traffic, Work, list_amounts
from edgekit.forecasts.model import Bits, Fitted
from edgekit.phones import Phone
from edgekit.serialize import NotebookPage

BITS: tuple[Bits, ...] = ("float", "w8a8", "w8a16")
_NEAREST = 3
# Over families left out of the fit, the worst error was a factor of 88 (YOLOv9 in w8a8): beyond 100, a given time is
# that of another network.
_FARTHEST_OFF = 100.0
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


class Placing(msgspec.Struct, frozen=True, kw_only=True):
    """What the provider's rules predict: the nodes it takes, its partitions, and why nodes stay on the CPU."""

    nodes: int
    taken: int
    partitions: int
    crossing_bytes: int
    cpu_ops: dict[str, int] = {}
    reasons: tuple[str, ...] = ()

    @property
    def left(self) -> int:
        """The number of nodes that run on the CPU."""
        return self.nodes - self.taken


class DeviceForecast(msgspec.Struct, frozen=True, kw_only=True):
    """A forecast for a device in a precision; times in ms, memory in MB, None if there is no basis for it.

    80 % of the networks of families that were left out of the fit lie between `low_ms` and `high_ms`. `basis` is
    "networks" if the figure comes from the times of other networks, "compiled" if it also comes from a plan of QNN's
    compiler, "measured" for a time given for this very device, "recalibrated" for a time transferred from another
    device, "scaled" for a CPU, from the time of another model there. `note` says why there is no figure, or what widens
    the interval.
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

    `distance` is that of the nearest measured network, by precision; `faster` the share of measured pairs in which a
    precision was faster than another; `unlike` holds the precisions in which no measured network is near. `traffic`
    holds the bytes that QNN's compiler plans to move in float, if it was run. `ground` names the source of the figures.
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
        """Whether `max_ms` is kept: a forecast passes only if the whole interval is below it."""
        return "fail" if self.too_slow else "not proven" if self.unproven else "pass"

    @property
    def too_slow(self) -> tuple[str, ...]:
        """The devices with a forecast on which no precision is forecast to keep `max_ms`."""
        limit = self.max_ms
        if limit is None:
            return ()
        best: dict[str, float] = {}
        for row in self.rows:
            if row.ms is not None:
                best[row.device] = min(row.ms, best.get(row.device, math.inf))
        return tuple(device for device, ms in best.items() if ms > limit)

    @property
    def unproven(self) -> tuple[str, ...]:
        """If a limit is set: the devices that have no forecast, or whose interval includes the limit."""
        limit = self.max_ms
        if limit is None:
            return ()
        sure = {row.device for row in self.rows if row.high_ms is not None and row.high_ms <= limit}
        every = dict.fromkeys(row.device for row in self.rows)
        return tuple(device for device in every if device not in sure and device not in self.too_slow)


def read_precisions(text: str) -> tuple[Bits, ...]:
    """Returns the precisions of a comma-separated list; int8 and int16 are other names of w8a8 and w8a16.

    Raises:
        UsageError: there is no such precision, or none was measured.
    """
    names: dict[str, Bits] = {**{word: word for word in BITS}, "fp16": "float", "int8": "w8a8", "int16": "w8a16"}
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in names:
            raise UsageError(f"no times were measured in the precision '{word}'", hint=suggest_name(word, names))
    if not words:
        raise UsageError("no precision is named", hint=f"valid: {', '.join(BITS)}")
    return tuple(dict.fromkeys(names[word] for word in words))


def choose_phones() -> tuple[Phone, ...]:
    """Returns one measured device for each chip that was measured in some precision, by name."""
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
    """Returns the forecasts for devices, and the distance of the nearest measured network, by precision.

    `placings` holds the predicted placement for each device, `traffic` what QNN's compiler plans in float.

    Raises:
        UsageError: a known time cannot be of this network.
    """
    rows: list[DeviceForecast] = []
    distances: dict[Bits, float] = {}
    for precision in precisions:
        estimate = _Estimate(work, precision, known, traffic)
        distances[precision] = estimate.distance
        rows += [estimate.forecast(phone, placings.get(phone.name)) for phone in phones]
    # The precisions of a device follow each other.
    order = {phone.name: at for at, phone in enumerate(phones)}
    return tuple(sorted(rows, key=lambda row: order[row.device])), distances


def forecast_cpu(work: Work, other: Work, machine: str, ms: float) -> DeviceForecast:
    """Returns the forecast for the CPU of a machine on which another network took `ms`, in float.

    Raises:
        UsageError: the other network does nothing that takes time.
    """
    fitted = model.load_cpu_fit()
    took, own = (fitted.sum(list_amounts(each.kinds)) for each in (other, work))
    if not took > 0:
        raise UsageError(f"{machine}: that model does no work to scale by", hint="give one that multiplies")
    middle, low, high = (_round(ms * own / took * math.exp(value)) for value in (0.0, fitted.low, fitted.high))
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
        far = {name: model.measure_distance(own, other) for name, other in split.items()}
        # The distance of each known network, the nearest first.
        self.ranked = dict(sorted(far.items(), key=lambda pair: pair[1]))
        self.distance = next(iter(self.ranked.values()))
        self.log_ms = math.log(float(own.sum()))
        self.compiled = self.fitted.compiled if traffic is not None else None
        if self.compiled is not None and traffic is not None:
            # The errors of graph and plan are different, so that the mean of both errs less than either.
            self.log_ms = (self.log_ms + math.log(self.compiled.sum(model.list_planned(work.kinds, traffic)))) / 2
            # Only networks with a plan were used in the fit.
            self.distance = next(far for name, far in self.ranked.items() if "float" in networks[name].traffic)
        self.moved, self.left = self._calibrate()

    def _calibrate(self) -> tuple[float | None, float]:
        """Returns log ms on the reference device according to known times, and the remaining uncertainty."""
        found: list[tuple[float, float]] = []
        for time in self.known:
            own = self.model.precisions[time.precision]
            if (device := find_measured(time.device, own)) is None:
                raise UsageError(
                    f"no network was measured on '{time.device}' in {time.precision}",
                    hint=f"a time on one of these moves the forecast: {', '.join(sorted(own.devices)[:6])}, ...",
                )
            effect = math.log(time.ms) - own.devices[device]
            guess = own.sum(list_amounts(self.work.kinds))
            if abs(effect - math.log(guess)) > math.log(_FARTHEST_OFF):
                forecast = guess * math.exp(own.devices[device])
                raise UsageError(
                    f"{time.ms:g} ms on {time.device} cannot be of this network: {forecast:.3g} ms are forecast, and no"
                    f" network is further off than {_FARTHEST_OFF:g} times",
                    hint="give the time of one inference, with its unit: 1.9ms",
                )
            shift, spread = (0.0, 0.0) if time.precision == self.precision else self.fitted.over[time.precision]
            found.append((effect + shift, spread))
        if not found:
            return None, 0.0
        # Times in the same precision only, if there are any: between precisions the uncertainty is larger.
        least = min(spread for _, spread in found)
        best = [effect for effect, spread in found if spread == least]
        return float(np.mean(best)), least

    def forecast(self, phone: Phone, placing: Placing | None) -> DeviceForecast:
        """Returns the forecast for a device."""
        row = DeviceForecast(
            device=phone.name, chipset=phone.chipset, soc_model=phone.soc_model, htp=phone.htp,
            precision=self.precision, placing=placing,
        )  # fmt: skip
        if (device := find_measured(phone.name, self.fitted)) is None:
            lacks = self.precision == "float" and not phone.fp16
            return msgspec.structs.replace(row, note=_NO_FLOAT if lacks else "no network was measured on its chip so")
        own = next((t for t in self.known if t.device == phone.name and t.precision == self.precision), None)
        if own is not None:
            # The spread between runs of that phone is not known.
            row = msgspec.structs.replace(row, ms=own.ms, low_ms=own.ms, high_ms=own.ms, basis="measured")
        else:
            row = self._add_time(row, device, placing)
        table = model.load_table()
        near = (
            Neighbour(network=name, distance=round(distance, 3), ms=measured[device].ms)
            for name, distance in self.ranked.items()
            if device in (measured := table.find_rows(table.find_key(name), self.precision))
        )
        row = msgspec.structs.replace(row, nearest=tuple(islice(near, _NEAREST)))
        if (fit := self.model.memory[self.precision].get(device)) is None:
            return row
        mb = max(1.0, fit.sum([*(self.work.kinds.get(kind, 0.0) for kind in model.MEMORY_KINDS), 1.0]))
        low, high = (round(mb * math.exp(value), 1) for value in (fit.low, fit.high))
        return msgspec.structs.replace(row, memory_mb=round(mb, 1), low_mb=low, high_mb=high)

    def _add_time(self, row: DeviceForecast, device: str, placing: Placing | None) -> DeviceForecast:
        fitted = self.fitted
        middle = (self.log_ms if self.moved is None else self.moved) + fitted.devices[device]
        if self.moved is None:
            ends = self.compiled or fitted
            low, high = ends.low * (1 + self.distance), ends.high * (1 + self.distance)
        else:
            # The uncertainties between devices and between precisions add up as independent errors.
            high = math.hypot(fitted.spread[device], self.left)
            low = -high
        left = 0 if placing is None else placing.left
        cpu = next((each for each in reversed(self.model.cpu_layers) if left >= each.least), None)
        if cpu is not None and self.moved is None:
            middle, low, high = (
                middle + cpu.middle, -math.hypot(low, cpu.low - cpu.middle), math.hypot(high, cpu.high - cpu.middle)
            )  # fmt: skip
        basis = "recalibrated" if self.moved is not None else "networks" if self.compiled is None else "compiled"
        ms, low_ms, high_ms = (_round(math.exp(value)) for value in (middle, middle + low, middle + high))
        note = f"{placing.left} of {placing.nodes} nodes on the CPU" if cpu is not None and placing is not None else ""
        return msgspec.structs.replace(row, ms=ms, low_ms=low_ms, high_ms=high_ms, basis=basis, note=note)


def find_measured(name: str, fitted: Fitted) -> str | None:
    """Returns the measured device with the same chip as a device, itself if it was measured; None if there is none.

    Devices with the same SoC number have the same times, whatever the names of their chips.
    """
    if name in fitted.devices:
        return name
    numbers = {phone.name: phone.soc_model for phone in model.load_phones()}
    return next((each for each in fitted.devices if numbers[each] == numbers[name]), None)
