"""Fits the forecast to the table, leaves families out to see what it is worth, and writes targets/forecast/model.json.

    python tools/forecast/fit.py [--dry]

Prints the tables of docs/reference/measured.md; with --dry it writes nothing.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls
from scipy.stats import spearmanr

from edgekit.forecasts.features import list_amounts
from edgekit.forecasts.model import MEMORY_KINDS, KnownNetwork, measure_distance, read_networks
from edgekit.forecasts.table import load_table
from edgekit.model.tensors import Array

FOLDER = Path(__file__).parent.parent.parent / "targets" / "forecast"
REFERENCE = "Samsung Galaxy S25"
PRECISIONS = ("float", "w8a8", "w8a16")
SHORT = "S25"
# Names of one chip, whose figures are the same: one of each counts.
TWINS = frozenset({"Dragonwing Q-8750", "Snapdragon XR2 Gen 2", "Dragonwing IQ-X7181", "Dragonwing Q-7790",
                   "SA8650P ADP", "SA8775P ADP"})  # fmt: skip
_ROUNDS = 15
LEAST_NETWORKS = 10
# The table has little between 3 and 6 layers on the CPU: what few cost is hard to tell from nothing.
FEW_LAYERS = 5


class Rows:
    """What was measured in one precision of the networks with graphs, on the NPU alone: log ms by network, device."""

    def __init__(self, precision: str, networks: Mapping[str, KnownNetwork]) -> None:
        table = load_table()
        self.names: list[str] = []
        found = dict[str, dict[str, float]]()
        self.memory = dict[str, dict[str, float]]()
        for name in networks:
            rows = table.find_rows(table.find_key(name), precision)
            taken = {device: row for device, row in rows.items() if row.unit == "NPU" and not row.cpu_layers}
            if taken:
                found[name] = {device: float(np.log(row.ms)) for device, row in taken.items()}
                self.memory[name] = {device: float(row.memory_high) for device, row in taken.items()}
        self.names = sorted(found)
        counts = Counter(device for each in found.values() for device in each)
        # Of fewer no interval of 80 % can be told.
        self.devices = sorted(device for device, count in counts.items() if count >= LEAST_NETWORKS)
        self.logs = np.array([[found[name].get(device, np.nan) for device in self.devices] for name in self.names])
        self.families = np.array([networks[name].family for name in self.names])
        self.amounts = np.array([list_amounts(networks[name].kinds) for name in self.names])


def polish(logs: Array, reference: int) -> tuple[Array, Array]:
    """Returns the effect of each network and of each device, by medians (Tukey's median polish)."""
    devices = np.zeros(logs.shape[1])
    networks = np.zeros(logs.shape[0])
    for _ in range(30):
        networks = np.nanmedian(logs - devices, axis=1)
        devices = np.nanmedian(logs - networks[:, None], axis=0)
        devices -= devices[reference]
    return networks, devices


def fit(amounts: Array, logs: Array) -> Array:
    """Returns coefficients that are not negative, for the least sum of roots of errors: most networks count."""
    ms = np.exp(logs)
    scale = amounts.mean(0)
    scale[scale == 0] = 1
    scaled = amounts / scale
    weights = np.ones(len(ms))
    found = np.zeros(amounts.shape[1])
    for _ in range(_ROUNDS):
        found, _ = nnls(scaled / ms[:, None] * weights[:, None], weights)
        ratio = np.maximum(scaled @ found, 1e-9) / ms
        # Iterative weights: so weighted, the square of the error is the root of its logarithm.
        weights = np.sqrt(np.maximum(np.abs(np.log(ratio)), 0.1) ** 0.5 / np.maximum((ratio - 1) ** 2, 0.01))
    return np.asarray(found / scale)


Fit = Callable[[set[str]], Array]


def make_fits(rows: Mapping[str, Rows], networks: Mapping[str, Array]) -> dict[str, Fit]:
    """Returns for each precision a function that fits without some families.

    In w8a8 a sum of its own does no better than float's times one factor, and that is the simpler.
    """

    def fit_alone(precision: str) -> Fit:
        def run(left: set[str]) -> Array:
            one = rows[precision]
            keep = ~np.isin(one.families, sorted(left))
            return fit(one.amounts[keep], networks[precision][keep])

        return run

    def fit_scaled(left: set[str]) -> Array:
        one, base = rows["w8a8"], fits["float"](left)
        keep = ~np.isin(one.families, sorted(left))
        return np.asarray(base * np.exp(np.median(networks["w8a8"][keep] - np.log(one.amounts[keep] @ base))))

    fits = {"float": fit_alone("float"), "w8a8": fit_scaled, "w8a16": fit_alone("w8a16")}
    return fits


def find_distance(coefficients: Array, row: Array, others: Array) -> float:
    """Returns the distance of a network to the nearest of others."""
    return min(measure_distance(coefficients * row, coefficients * other) for other in others)


def ratio(value: float) -> str:
    """Returns a logarithm as a factor."""
    return f"x{np.exp(value):.2f}"


def main() -> None:
    """Fits, leaves out, prints, writes."""
    known = read_networks(FOLDER / "networks.json")
    rows = {precision: Rows(precision, known) for precision in PRECISIONS}
    effects, devices = dict[str, Array](), dict[str, Array]()
    for precision, one in rows.items():
        effects[precision], devices[precision] = polish(one.logs, one.devices.index(REFERENCE))
    fits = make_fits(rows, effects)
    written: dict[str, Any] = {"reference": REFERENCE, "precisions": {}, "memory": {}}
    left_out = dict[str, Array]()
    for precision, one in rows.items():
        predicted, far = np.zeros(len(one.names)), np.zeros(len(one.names))
        for family in sorted(set(one.families)):
            out = one.families == family
            coefficients = fits[precision]({family})
            predicted[out] = np.log(one.amounts[out] @ coefficients)
            far[out] = [find_distance(coefficients, row, one.amounts[~out]) for row in one.amounts[out]]
        left_out[precision] = predicted
        shown = report(precision, one, predicted, far, devices[precision])
        written["precisions"][precision] = {
            "coefficients": [float(f"{value:.6g}") for value in fits[precision](set())],
            "devices": {
                name: round(float(value), 4) for name, value in zip(one.devices, devices[precision], strict=True)
            },
            **shown,
        }
    for precision, one in rows.items():
        written["precisions"][precision]["over"] = {
            other: bridge(precision, one, other, rows[other], effects) for other in PRECISIONS if other != precision
        }
    written["cpu_layers"] = fit_cpu_layers()
    print()
    guesses = {precision: left_out[precision][:, None] + devices[precision] for precision in PRECISIONS}
    for fast, slow in (("w8a8", "float"), ("w8a16", "float"), ("w8a8", "w8a16")):
        share = find_faster(fast, slow, rows, guesses)
        written["precisions"][fast].setdefault("faster", {})[slow] = share
        written["precisions"][slow].setdefault("faster", {})[fast] = round(1 - share, 4)
    written["memory"] = fit_memory(rows, known)
    if "--dry" not in sys.argv:
        (FOLDER / "model.json").write_text(json.dumps(written, indent=1) + "\n")


def report(precision: str, one: Rows, predicted: Array, far: Array, devices: Array) -> dict[str, Any]:
    """Prints what the forecast of families left out is worth, and returns its interval."""
    errors = one.logs - (predicted[:, None] + devices)
    scores = errors / (1 + far[:, None])
    chosen = [at for at, name in enumerate(one.devices) if name not in TWINS]
    low, high = (float(np.nanquantile(scores[:, chosen], q)) for q in (0.1, 0.9))
    held = list[float]()
    for family in set(one.families):
        out = one.families == family
        bounds = [np.nanquantile(scores[~out][:, chosen], q) for q in (0.1, 0.9)]
        own = scores[out][:, chosen]
        own = own[~np.isnan(own)]
        held += [float(bounds[0] <= score <= bounds[1]) for score in own]
    print(f"\n{precision}: {len(one.names)} networks of {len(set(one.families))} families, left out whole")
    print(
        f"  intervals: {ratio(low)} to {ratio(high)} at distance 0; they hold {np.mean(held):.0%}; "
        f"distance and error go together by {spearmanr(far, np.abs(np.nanmedian(errors, axis=1)))[0]:.2f}"
    )
    spread = dict[str, float]()
    for at, name in enumerate(one.devices):
        error = np.abs(errors[:, at])
        there = ~np.isnan(error)
        # From a time that is known on one other device.
        moved = [
            np.abs((one.logs[:, at] - devices[at]) - (one.logs[:, other] - devices[other]))
            for other in chosen
            if other != at and one.devices[other] not in TWINS
        ]
        best = {
            one.devices[other]: float(np.nanmedian(m))
            for other, m in zip([c for c in chosen if c != at], moved, strict=True)
        }
        pooled = np.concatenate([each[~np.isnan(each)] for each in moved])
        spread[name] = round(float(np.quantile(pooled, 0.8)), 4)
        if name in TWINS:
            continue
        print(
            f"  {name:36s} {there.sum():3d} networks, median {np.exp(np.median(error[there])) - 1:5.1%}, 80 % within "
            f"{ratio(float(np.quantile(error[there], 0.8)))}, "
            f"rank {spearmanr(predicted[there], one.logs[there, at])[0]:.2f}; "
            f"with one time elsewhere {np.exp(np.median(pooled)) - 1:5.1%}, from the {SHORT} "
            f"{np.exp(best.get(REFERENCE, 0)) - 1:5.1%}"
        )
    all_errors = np.abs(errors[:, chosen])
    flat = all_errors[~np.isnan(all_errors)]
    print(f"  all: median {np.exp(np.median(flat)) - 1:.1%}, 80 % within {ratio(float(np.quantile(flat, 0.8)))}")
    worst = np.argsort(-np.abs(np.nanmedian(errors, axis=1)))[:6]
    print("  farthest off:", ", ".join(f"{one.names[at]} {ratio(float(np.nanmedian(errors[at])))}" for at in worst))
    return {"low": round(low, 4), "high": round(high, 4), "farthest": round(float(far.max()), 4), "spread": spread}


def bridge(precision: str, one: Rows, other: str, two: Rows, effects: Mapping[str, Array]) -> tuple[float, float]:
    """Returns the median of the logarithm of one precision's time over another's, and what 80 % keep around it."""
    both = sorted(set(one.names) & set(two.names))
    logs = np.array(
        [effects[precision][one.names.index(name)] - effects[other][two.names.index(name)] for name in both]
    )
    middle = float(np.median(logs))
    error = np.abs(logs - middle)
    print(
        f"{precision} from a time in {other}: median {np.exp(np.median(error)) - 1:.1%}, 80 % within "
        f"{ratio(float(np.quantile(error, 0.8)))}, {len(both)} networks"
    )
    return round(middle, 4), round(float(np.quantile(error, 0.8)), 4)


def fit_cpu_layers() -> list[dict[str, float]]:
    """Returns by what layers on the CPU lengthen a run, for few and for many of them, as logarithms.

    The time of ONNX Runtime with such layers is held against that of QNN alone, without any, on the same device.
    """
    table = load_table()
    found = list[tuple[int, float, str]]()
    for name, precisions in table.rows.items():
        for runtimes in precisions.values():
            alone = {
                row.device: row.ms for row in runtimes.get("qnn_dlc", ()) if row.unit == "NPU" and not row.cpu_layers
            }
            found += [
                (row.cpu_layers, float(np.log(row.ms / alone[row.device])), name)
                for row in runtimes.get("onnx", ())
                if row.unit == "NPU" and row.cpu_layers and row.device in alone
            ]
    fitted = list[dict[str, float]]()
    for least, below in ((1, FEW_LAYERS), (FEW_LAYERS, 10**9)):
        own = [(factor, name) for layers, factor, name in found if least <= layers < below]
        low, middle, high = (round(float(q), 4) for q in np.quantile([factor for factor, _ in own], [0.1, 0.5, 0.9]))
        fitted.append({"least": least, "low": low, "middle": middle, "high": high})
        print(
            f"from {least} layers on the CPU: {ratio(middle)} (80 %: {ratio(low)} to {ratio(high)}), {len(own)} rows "
            f"of {len({name for _, name in own})} networks"
        )
    return fitted


def find_faster(one: str, other: str, rows: Mapping[str, Rows], guesses: Mapping[str, Array]) -> float:
    """Returns in which share of pairs, where they differ by more than 10 %, the first precision is the faster.

    Prints how often a comparison of the forecasts would name it rightly.
    """
    a, b = rows[one], rows[other]
    right, first = list[bool](), list[bool]()
    for name in sorted(set(a.names) & set(b.names)):
        for device in sorted(set(a.devices) & set(b.devices) - TWINS):
            i, j = (a.names.index(name), a.devices.index(device)), (b.names.index(name), b.devices.index(device))
            apart = a.logs[i] - b.logs[j]
            if np.abs(apart) > np.log(1.1):
                first.append(bool(apart < 0))
                right.append((guesses[one][i] < guesses[other][j]) == first[-1])
    print(
        f"{one} is faster than {other} in {np.mean(first):.1%} of {len(first)} pairs; "
        f"comparing the forecasts names {np.mean(right):.1%} rightly"
    )
    return round(float(np.mean(first)), 4)


def fit_memory(rows: Mapping[str, Rows], known: Mapping[str, KnownNetwork]) -> dict[str, Any]:
    """Prints and returns the fit of peak memory: a sum over `MEMORY_KINDS`, and 1."""
    found = dict[str, Any]()
    print()
    for precision, one in rows.items():
        found[precision] = {}
        every = list[float]()
        for device in one.devices:
            names = [name for name in one.names if device in one.memory[name]]
            at = [one.names.index(name) for name in names]
            amounts = np.array([[*(known[name].kinds[kind] for kind in MEMORY_KINDS), 1.0] for name in names])
            memory = np.log(np.maximum([one.memory[name][device] for name in names], 1.0))
            families = one.families[at]
            scores = np.zeros(len(names))
            for family in set(families):
                out = families == family
                scores[out] = memory[out] - np.log(np.maximum(amounts[out] @ fit(amounts[~out], memory[~out]), 1.0))
            if device not in TWINS:
                every += list(np.abs(scores))
            low, high = np.quantile(scores, [0.1, 0.9])
            found[precision][device] = {
                "coefficients": [float(f"{value:.6g}") for value in fit(amounts, memory)],
                "low": round(float(low), 4), "high": round(float(high), 4),
            }  # fmt: skip
        print(
            f"peak memory, {precision}: median error {np.exp(np.median(every)) - 1:.0%}, 80 % within "
            f"{ratio(float(np.quantile(every, 0.8)))}"
        )
    return found


if __name__ == "__main__":
    main()
