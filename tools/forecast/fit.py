"""Fits the forecast to the table, evaluates it on left-out families, and writes targets/forecast/model.json.

    python tools/forecast/fit.py [--dry]

Prints the figures of docs/reference/measured.md; with --dry it writes nothing.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls
from scipy.stats import spearmanr

from edgekit.forecasts.features import list_amounts
from edgekit.forecasts.model import (
    MEMORY_KINDS,
    Bits,
    KnownNetwork,
    list_planned,
    load_table,
    measure_distance,
    read_networks,
)
from edgekit.model.tensors import Array

FOLDER = Path(__file__).parent.parent.parent / "targets" / "forecast"
REFERENCE = "Samsung Galaxy S25"
PRECISIONS: tuple[Bits, ...] = ("float", "w8a8", "w8a16")
SHORT = "S25"
# These are names of the same chip, with the same figures, so only one of each counts.
TWINS = frozenset({"Dragonwing Q-8750", "Snapdragon XR2 Gen 2", "Dragonwing IQ-X7181", "Dragonwing Q-7790",
                   "SA8650P ADP", "SA8775P ADP"})  # fmt: skip
_ROUNDS = 15
LEAST_NETWORKS = 10
# The table has few networks with 3 to 6 layers on the CPU, so the effect of few layers is hard to tell from none.
FEW_LAYERS = 5
# The number of layers in the table lies between the operators that remain to run and all nodes of the graph, except for
# those that a provider adds at its inputs and outputs. If it does not, another graph was measured.
_FEWEST, _MOST, _ADDED = 0.9, 1.1, 10
# Folding during the export can only make the weights fewer than the parameters.
_MORE_WEIGHTS = 1.05


def is_measured_graph(name: str, network: KnownNetwork) -> bool:
    """Returns True if a graph has about as many layers as the table counts in float, and no more weights."""
    table = load_table()
    stated = re.match(r"~?([\d.]+)\s*([KM])", table.networks[name.partition("/")[0]].parameters)
    # For a part of a network the table does not state the parameters.
    if stated and "/" not in name:
        parameters = float(stated[1]) * {"K": 1e3, "M": 1e6}[stated[2]]
        if network.kinds["weights"] > _MORE_WEIGHTS * parameters:
            return False
    rows = table.find_rows(table.find_key(name), "float").values()
    layers = [row.layers for row in rows if row.unit == "NPU" and not row.cpu_layers]
    if not layers or not network.operators:
        return True
    return _FEWEST * network.kinds["nodes"] <= min(layers) <= _MOST * network.operators + _ADDED


class Rows:
    """The measurements in one precision of the networks with graphs, entirely on the NPU: log ms by network, device.

    `amounts` is the work by kind, `planned` the sum over the plan of the float network, NaN if there is none.
    """

    def __init__(self, precision: Bits, networks: Mapping[str, KnownNetwork]) -> None:
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
        # From fewer no interval of 80 % can be estimated.
        self.devices = sorted(device for device, count in counts.items() if count >= LEAST_NETWORKS)
        self.logs = np.array([[found[name].get(device, np.nan) for device in self.devices] for name in self.names])
        self.families = np.array([networks[name].family for name in self.names])
        self.amounts = np.array([list_amounts(networks[name].kinds) for name in self.names])
        plans = [(networks[name].kinds, networks[name].traffic.get("float")) for name in self.names]
        width = next((len(list_planned(kinds, plan)) for kinds, plan in plans if plan is not None), 1)
        self.compiled = np.array([plan is not None for _, plan in plans])
        self.planned = np.array(
            [[np.nan] * width if plan is None else list_planned(kinds, plan) for kinds, plan in plans]
        )


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
    """Returns non-negative coefficients with the least sum of roots of errors, so that most networks count."""
    ms = np.exp(logs)
    scale = amounts.mean(0)
    scale[scale == 0] = 1
    scaled = amounts / scale
    weights = np.ones(len(ms))
    found = np.zeros(amounts.shape[1])
    for _ in range(_ROUNDS):
        found, _ = nnls(scaled / ms[:, None] * weights[:, None], weights)
        ratio = np.maximum(scaled @ found, 1e-9) / ms
        # Iteratively reweighted least squares: with these weights the squared error is the root of the logarithm's
        # error.
        weights = np.sqrt(np.maximum(np.abs(np.log(ratio)), 0.1) ** 0.5 / np.maximum((ratio - 1) ** 2, 0.01))
    return np.asarray(found / scale)


def find_distance(coefficients: Array, row: Array, others: Array) -> float:
    """Returns the distance of a network to the nearest of some others."""
    return min(measure_distance(coefficients * row, coefficients * other) for other in others)


def ratio(value: float) -> str:
    """Returns a logarithm as a factor."""
    return f"x{np.exp(value):.2f}"


def leave_out(one: Rows, networks: Array) -> tuple[Array, Array]:
    """Returns the forecast of each network by a fit to other families, and the distance of the nearest of these."""
    predicted, far = np.zeros(len(one.names)), np.zeros(len(one.names))
    for family in sorted(set(one.families)):
        out = one.families == family
        coefficients = fit(one.amounts[~out], networks[~out])
        predicted[out] = np.log(one.amounts[out] @ coefficients)
        far[out] = [find_distance(coefficients, row, one.amounts[~out]) for row in one.amounts[out]]
    return predicted, far


def leave_plans_out(one: Rows, networks: Array) -> tuple[Array, Array]:
    """Returns the result of `leave_out` for the networks with a plan, fitted to other families; NaN for the others."""
    predicted, far = np.full(len(one.names), np.nan), np.full(len(one.names), np.nan)
    for family in sorted(set(one.families[one.compiled])):
        out, rest = one.compiled & (one.families == family), one.compiled & (one.families != family)
        predicted[out] = np.log(one.planned[out] @ fit(one.planned[rest], networks[rest]))
        coefficients = fit(one.amounts[one.families != family], networks[one.families != family])
        far[out] = [find_distance(coefficients, row, one.amounts[rest]) for row in one.amounts[out]]
    return predicted, far


def is_nearer(networks: Array, from_plans: Array, from_graphs: Array) -> bool:
    """Returns True if plans forecast the networks that have one better than their graphs do."""
    told = ~np.isnan(from_plans)
    plans, graphs = (np.abs(networks - each)[told] for each in (from_plans, from_graphs))
    print(
        f"  the same networks from their graphs alone: median {np.exp(np.median(graphs)) - 1:.1%}, "
        f"80 % within {ratio(float(np.quantile(graphs, 0.8)))}; from plans {np.exp(np.median(plans)) - 1:.1%}, "
        f"{ratio(float(np.quantile(plans, 0.8)))}; mean logarithm {graphs.mean():.3f} and {plans.mean():.3f}"
    )
    return bool(plans.mean() < graphs.mean())


def main() -> None:
    """Fits, leaves out, prints, writes."""
    known = read_networks(FOLDER / "networks.json")
    others = [name for name, network in known.items() if not is_measured_graph(name, network)]
    known = {name: network for name, network in known.items() if name not in others}
    print(f"left out, because the table measured another graph: {', '.join(others)}")
    rows = {precision: Rows(precision, known) for precision in PRECISIONS}
    effects, devices = dict[Bits, Array](), dict[Bits, Array]()
    for precision, one in rows.items():
        effects[precision], devices[precision] = polish(one.logs, one.devices.index(REFERENCE))
    written: dict[str, Any] = {"reference": REFERENCE, "precisions": {}, "memory": {}}
    left_out, from_plans = dict[Bits, Array](), dict[Bits, Array]()
    for precision, one in rows.items():
        left_out[precision], far = leave_out(one, effects[precision])
        shown = report(precision, one, left_out[precision], far, devices[precision])
        written["precisions"][precision] = {
            "coefficients": list_numbers(fit(one.amounts, effects[precision])),
            "devices": {
                name: round(float(value), 4) for name, value in zip(one.devices, devices[precision], strict=True)
            },
            **shown,
        }
        # The errors of the two are different, so the error of their mean is smaller than either.
        predicted, far = leave_plans_out(one, effects[precision])
        from_plans[precision] = (left_out[precision] + predicted) / 2
        if one.compiled.sum() < LEAST_NETWORKS:
            continue
        shown = report(f"{precision}, compiled", one, from_plans[precision], far, devices[precision])
        if is_nearer(effects[precision], from_plans[precision], left_out[precision]):
            coefficients = fit(one.planned[one.compiled], effects[precision][one.compiled])
            written["precisions"][precision]["compiled"] = {
                "coefficients": list_numbers(coefficients), "low": shown["low"], "high": shown["high"],
            }  # fmt: skip
    for precision, one in rows.items():
        written["precisions"][precision]["over"] = {
            other: bridge(precision, one, other, rows[other], effects) for other in PRECISIONS if other != precision
        }
    written["cpu_layers"] = fit_cpu_layers()
    print()
    guesses = {precision: left_out[precision][:, None] + devices[precision] for precision in PRECISIONS}
    planned = {precision: from_plans[precision][:, None] + devices[precision] for precision in PRECISIONS}
    pairs: tuple[tuple[Bits, Bits], ...] = (("w8a8", "float"), ("w8a16", "float"), ("w8a8", "w8a16"))
    for fast, slow in pairs:
        share = find_faster(fast, slow, rows, guesses)
        written["precisions"][fast].setdefault("faster", {})[slow] = share
        written["precisions"][slow].setdefault("faster", {})[fast] = round(1 - share, 4)
        find_faster(fast, slow, rows, planned, " from plans")
    written["memory"] = fit_memory(rows, known)
    if "--dry" not in sys.argv:
        (FOLDER / "model.json").write_text(json.dumps(written, indent=1) + "\n")


def list_numbers(values: Array) -> list[float]:
    """Returns numbers with six digits."""
    return [float(f"{value:.6g}") for value in values]


def report(title: str, one: Rows, predicted: Array, far: Array, devices: Array) -> dict[str, Any]:
    """Prints the accuracy of the forecast for left-out families, of networks that have one; returns its interval."""
    there = ~np.isnan(predicted)
    chosen_families = set(one.families[there])
    errors = one.logs - (predicted[:, None] + devices)
    scores = errors / (1 + far[:, None])
    chosen = [at for at, name in enumerate(one.devices) if name not in TWINS]
    low, high = (float(np.nanquantile(scores[:, chosen], q)) for q in (0.1, 0.9))
    held = list[float]()
    for family in sorted(chosen_families):
        out = one.families == family
        bounds = [np.nanquantile(scores[~out][:, chosen], q) for q in (0.1, 0.9)]
        own = scores[out][:, chosen]
        own = own[~np.isnan(own)]
        held += [float(bounds[0] <= score <= bounds[1]) for score in own]
    print(f"\n{title}: {there.sum()} networks of {len(chosen_families)} families, left out whole")
    print(
        f"  intervals: {ratio(low)} to {ratio(high)} at distance 0; they hold {np.mean(held):.0%}; "
        f"distance and error go together by {spearmanr(far[there], np.abs(np.nanmedian(errors[there], axis=1)))[0]:.2f}"
    )
    spread = dict[str, float]()
    for at, name in enumerate(one.devices):
        error = np.abs(errors[:, at])
        told = ~np.isnan(error)
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
            f"  {name:36s} {told.sum():3d} networks, median {np.exp(np.median(error[told])) - 1:5.1%}, 80 % within "
            f"{ratio(float(np.quantile(error[told], 0.8)))}, "
            f"rank {spearmanr(predicted[told], one.logs[told, at])[0]:.2f}; "
            f"with one time elsewhere {np.exp(np.median(pooled)) - 1:5.1%}, from the {SHORT} "
            f"{np.exp(best.get(REFERENCE, 0)) - 1:5.1%}"
        )
    all_errors = np.abs(errors[:, chosen])
    flat = all_errors[~np.isnan(all_errors)]
    print(f"  all: median {np.exp(np.median(flat)) - 1:.1%}, 80 % within {ratio(float(np.quantile(flat, 0.8)))}")
    median = np.array([np.nanmedian(each) if is_told else 0.0 for each, is_told in zip(errors, there, strict=True)])
    worst = np.argsort(-np.abs(median))[:6]
    print("  farthest off:", ", ".join(f"{one.names[at]} {ratio(float(median[at]))}" for at in worst))
    return {"low": round(low, 4), "high": round(high, 4), "farthest": round(float(np.nanmax(far)), 4), "spread": spread}


def bridge(precision: Bits, one: Rows, other: Bits, two: Rows, effects: Mapping[Bits, Array]) -> tuple[float, float]:
    """Returns the median logarithm of the ratio of one precision's time to another's, and its 80 % interval."""
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
    """Returns the factors by which a few and many layers on the CPU lengthen a run, as logarithms.

    The time of ONNX Runtime with such layers is compared with that of QNN without any, on the same device.
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


def find_faster(
    one: Bits, other: Bits, rows: Mapping[Bits, Rows], guesses: Mapping[Bits, Array], words: str = ""
) -> float:
    """Returns the share of pairs in which the first precision is faster, if they differ by more than 10 %.

    Prints how often a comparison of the forecasts would predict this.
    """
    a, b = rows[one], rows[other]
    right, first = list[bool](), list[bool]()
    for name in sorted(set(a.names) & set(b.names)):
        for device in sorted(set(a.devices) & set(b.devices) - TWINS):
            i, j = (a.names.index(name), a.devices.index(device)), (b.names.index(name), b.devices.index(device))
            apart, guess = a.logs[i] - b.logs[j], guesses[one][i] - guesses[other][j]
            if np.abs(apart) > np.log(1.1) and not np.isnan(guess):
                first.append(bool(apart < 0))
                right.append(bool(guess < 0) == first[-1])
    if not first:
        return 0.5
    print(
        f"{one} is faster than {other} in {np.mean(first):.1%} of {len(first)} pairs; "
        f"comparing the forecasts{words} names {np.mean(right):.1%} rightly"
    )
    return round(float(np.mean(first)), 4)


def fit_memory(rows: Mapping[Bits, Rows], known: Mapping[str, KnownNetwork]) -> dict[str, Any]:
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
