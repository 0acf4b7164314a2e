"""Times that a forecast starts from: of this network on phones, typed or recorded, and of others on a CPU at hand."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from edgekit.bench.history import list_benches
from edgekit.bundle.folder import open_bundle
from edgekit.errors import UsageError
from edgekit.evidence import Evidence
from edgekit.forecasts.forecast import KnownTime, read_precisions
from edgekit.forecasts.model import Bits, load_phones
from edgekit.phones import find_phone
from edgekit.target import Precision, load_target
from edgekit.verify.history import list_runs

BITS_OF: Mapping[Precision, Bits] = {"int8": "w8a8", "int16": "w8a16", "fp16": "float", "fp32": "float"}
"""What the table calls a precision of a bundle."""
_UNITS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
_NPU = "QNNExecutionProvider"
_CPUS = {"CPUExecutionProvider": "cpu", "XnnpackExecutionProvider": "xnnpack"}


class CpuTime(msgspec.Struct, frozen=True, kw_only=True):
    """What another model took on the CPU of a machine: `machine` is what to call that."""

    model: Path
    machine: str
    ms: float


class _Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded time of one sample at a time."""

    device: str
    evidence: Evidence
    provider: str
    soc: str
    ms: float
    source: str


def parse_measured(text: str, precisions: Sequence[Bits]) -> KnownTime:
    """Returns what `DEVICE[:PRECISION]=TIME` says, such as `Galaxy S25:w8a8=1.9ms`; without a precision it is float's.

    Raises:
        UsageError: it is malformed, the device is unknown, or the time is no time.
    """
    name, _, time = text.rpartition("=")
    device, _, word = name.partition(":")
    ms = _read_ms(time)
    if not device or ms is None:
        raise UsageError(f"--measured {text} is no time on a device", hint='as in --measured "Galaxy S25=1.9ms"')
    alone = precisions[0] if len(precisions) == 1 else "float"
    return KnownTime(
        device=find_phone(device, load_phones()).name, precision=read_precisions(word)[0] if word else alone, ms=ms
    )


def read_history(path: Path, subject: Path) -> tuple[KnownTime, ...]:
    """Returns what bench and verify recorded of a model or bundle on the NPUs of phones, the last time of each.

    A model runs there in float, a bundle in its own precision.

    Raises:
        BundleError: the bundle is incomplete or altered.
        DataError: there is no such file, or it is no history.
        UsageError: it holds no such time, or of a chip that has no name.
    """
    name = subject.resolve().name
    precision = BITS_OF.get(open_bundle(subject).manifest.precision, "float") if subject.is_dir() else "float"
    numbers = {soc.casefold(): int(number) for number, soc in load_target("qnn").socs.items()}
    found: dict[str, KnownTime] = {}
    # What an emulator took says nothing of a phone.
    for time in _list_recorded(path, name):
        if time.provider == _NPU and time.evidence is Evidence.DEVICE:
            number = numbers.get(time.soc.casefold())
            known = (phone for phone in load_phones() if phone.soc_model == number and phone.form == "Phone")
            phone = next(known, None)
            if phone is None:
                raise UsageError(
                    f"{time.source}: '{time.device}' says that its chip is '{time.soc}', which edgekit has no name for",
                    hint=f'give the time by hand: --measured "DEVICE={time.ms:.4g}ms"',
                )
            found[phone.name] = KnownTime(device=phone.name, precision=precision, ms=time.ms, source=time.source)
    if not found:
        raise UsageError(
            f"'{path}' holds no time of '{name}' on the NPU of a phone",
            hint=f"edgekit bench {subject} --on adb:SERIAL --history {path}",
        )
    return tuple(found.values())


def parse_cpu_times(text: str) -> tuple[CpuTime, ...]:
    """Returns what `MODEL=TIME` or `MODEL=HISTORY` says of another model on the CPUs of machines at hand.

    Raises:
        UsageError: it is malformed, or the history has no time of the model on a CPU.
        DataError: there is no such history.
    """
    name, _, time = text.rpartition("=")
    if not name or not time:
        raise UsageError(
            f"--on-cpu {text} is not MODEL=TIME", hint="as in --on-cpu other.onnx=12ms, or other.onnx=bench.sqlite"
        )
    model, ms = Path(name), _read_ms(time)
    if ms is not None:
        return (CpuTime(model=model, machine=f"the CPU that ran {model.name}", ms=ms),)
    if re.match(r"\s*([-+.0-9]|nan|inf)", time) and not Path(time).exists():
        raise UsageError(f"--on-cpu {text}: '{time}' is no time", hint="a positive number with us, ms or s: 12ms")
    found = {
        f"{time.device} ({_CPUS[time.provider]})": time.ms
        for time in _list_recorded(Path(time), model.resolve().name)
        if time.provider in _CPUS
    }
    if not found:
        raise UsageError(
            f"'{time}' holds no time of '{model.name}' on a CPU", hint=f"edgekit bench {model} --history {time}"
        )
    return tuple(CpuTime(model=model, machine=machine, ms=ms) for machine, ms in found.items())


def _list_recorded(path: Path, subject: str) -> Iterator[_Recorded]:
    """Yields what a history holds of a subject, oldest first, but for batches, queues and runs side by side."""
    for bench in list_benches(path, subject=subject):
        for timed in bench.report.runs:
            if (
                timed.failure is None
                and timed.median_ms > 0
                and timed.batch == timed.concurrency == 1
                and not timed.queue
            ):
                yield _Recorded(
                    device=timed.device, evidence=timed.evidence, provider=timed.provider,
                    soc=timed.versions.get("soc", ""), ms=timed.median_ms, source=f"bench {bench.id} of {path.name}",
                )  # fmt: skip
    for past in list_runs(path, bundle=subject):
        for run in past.report.runs:
            taken = run.failure is None and run.provider_nodes.get(run.provider, 0)
            if taken and run.latency_ms is not None and run.latency_ms.median > 0:
                yield _Recorded(
                    device=run.device, evidence=run.evidence, provider=run.provider,
                    soc=run.versions.get("soc", ""), ms=run.latency_ms.median, source=f"run {past.id} of {path.name}",
                )  # fmt: skip


def _read_ms(text: str) -> float | None:
    """Returns the milliseconds of a time with its unit, None for what is none."""
    found = re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(us|ms|s)\s*", text)
    ms = float(found[1]) * _UNITS[found[2]] if found else math.nan
    return ms if ms > 0 else None
