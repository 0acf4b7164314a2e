"""Models of a network's time that were tried, each on families left out: `python tools/forecast/trials.py`.

It prints, for float, w8a8 and w8a16, the median error and what 80 % of all rows keep. Needs scikit-learn.
"""

from collections.abc import Callable
from typing import Any

import fit
import numpy as np
from scipy.optimize import nnls
from sklearn.ensemble import ExtraTreesRegressor, GradientBoostingRegressor
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

KNOWN = fit.read_networks(fit.FOLDER / "networks.json")
ROWS = {precision: fit.Rows(precision, KNOWN) for precision in fit.PRECISIONS}
POLISHED = {name: fit.polish(rows.logs, rows.devices.index(fit.REFERENCE)) for name, rows in ROWS.items()}
Coefficients = Callable[[str, set[str]], Any]
Predict = Callable[[str, Any, set[str]], Any]


def keep(precision: str, left: set[str]) -> Any:
    """Returns which networks are of no family that is left out."""
    return ~np.isin(ROWS[precision].families, sorted(left))


def alone(precision: str, left: set[str]) -> Any:
    """Returns the coefficients of a precision fitted by itself."""
    at = keep(precision, left)
    return fit.fit(ROWS[precision].amounts[at], POLISHED[precision][0][at])


def scaled(precision: str, left: set[str]) -> Any:
    """Returns float's coefficients times a factor."""
    base, at = alone("float", left), keep(precision, left)
    return base * np.exp(np.median(POLISHED[precision][0][at] - np.log(ROWS[precision].amounts[at] @ base)))


def drawn(pull: float) -> Coefficients:
    """Returns a fit whose coefficients are drawn to float's times a factor; that of float is not."""

    def run(precision: str, left: set[str]) -> Any:
        if precision == "float":
            return alone(precision, left)
        at = keep(precision, left)
        amounts, ms = ROWS[precision].amounts[at], np.exp(POLISHED[precision][0][at])
        scale = np.where(amounts.mean(0) == 0, 1, amounts.mean(0))
        goal, rows, weights = scaled(precision, left) * scale, amounts / scale, np.ones(len(ms))
        share = np.sqrt(pull * len(ms) / len(goal)) / np.maximum(goal, goal.max() / 50)
        found = goal
        for _ in range(15):
            columns = np.vstack([rows / ms[:, None] * weights[:, None], np.diag(share)])
            found, _ = nnls(columns, np.concatenate([weights, share * goal]))
            ratio = np.maximum(rows @ found, 1e-9) / ms
            weights = np.sqrt(np.maximum(np.abs(np.log(ratio)), 0.1) ** 0.5 / np.maximum((ratio - 1) ** 2, 0.01))
        return found / scale

    return run


def add(coefficients: Coefficients) -> Predict:
    """Returns the forecast of a sum."""
    return lambda precision, out, left: np.log(ROWS[precision].amounts[out] @ coefficients(precision, left))


def learn(make: Callable[[], Any], base: Coefficients | None) -> Predict:
    """Returns the forecast of a regression on what a sum leaves over, or without one on the work itself."""

    def run(precision: str, out: Any, left: set[str]) -> Any:
        rows, logs, at = ROWS[precision], POLISHED[precision][0], keep(precision, left)
        if base is None:
            work = np.log(rows.amounts[:, :9] + 1)
            return make().fit(work[at], logs[at]).predict(work[out])
        guess = np.zeros(len(logs))
        for family in set(rows.families[at]):
            own = rows.families == family
            guess[own] = add(base)(precision, own, left | {family})
        guess[out] = add(base)(precision, out, left)
        parts = rows.amounts * base(precision, left)
        total = parts.sum(1, keepdims=True)
        told = np.hstack([np.log(total), parts / total, np.log(rows.amounts[:, [8, 7, 5]] + 1)])
        return guess[out] + make().fit(told[at], np.clip((logs - guess)[at], -1.5, 1.5)).predict(told[out])

    return run


def scale_nearest(count: int) -> Predict:
    """Returns the times of the nearest networks, scaled by the sum."""

    def run(precision: str, out: Any, left: set[str]) -> Any:
        base = scaled(precision, left) if precision == "w8a8" else alone(precision, left)
        rows, at = ROWS[precision], keep(precision, left)
        over = POLISHED[precision][0][at] - np.log(rows.amounts[at] @ base)
        made = list[float]()
        for row in rows.amounts[out]:
            far = np.array([fit.measure_distance(base * row, base * other) for other in rows.amounts[at]])
            near = np.argsort(far)[:count]
            made.append(float(np.log(row @ base) + np.average(over[near], weights=1 / (far[near] + 0.05))))
        return np.array(made)

    return run


def judge(precision: str, predict: Predict) -> str:
    """Returns the error on families left out."""
    rows, (_, devices) = ROWS[precision], POLISHED[precision]
    made = np.zeros(len(rows.names))
    for family in sorted(set(rows.families)):
        out = rows.families == family
        made[out] = predict(precision, out, {family})
    told = [at for at, name in enumerate(rows.devices) if name not in fit.TWINS]
    errors = np.abs(rows.logs[:, told] - devices[told] - made[:, None])
    errors = errors[~np.isnan(errors)]
    return f"{np.exp(np.median(errors)) - 1:6.1%} {fit.ratio(float(np.quantile(errors, 0.8)))}"


def boost(depth: int, trees: int) -> GradientBoostingRegressor:
    """Returns boosted trees."""
    return GradientBoostingRegressor(
        n_estimators=trees, max_depth=depth, learning_rate=0.05, subsample=0.7, loss="absolute_error", random_state=0
    )


TRIALS: dict[str, Predict] = {
    "drawn to float's": add(drawn(1)),
    "alone": add(alone),
    "float's times a factor": add(scaled),
    **{f"drawn {pull:g} times as much": add(drawn(pull)) for pull in (0.3, 3, 10)},
    "the nearest, scaled": scale_nearest(1),
    "the three nearest, scaled": scale_nearest(3),
    "trees on the work": learn(lambda: boost(3, 200), None),
    "trees on what is left over": learn(lambda: boost(2, 100), drawn(1)),
    "extra trees on it": learn(
        lambda: ExtraTreesRegressor(n_estimators=200, min_samples_leaf=3, random_state=0), drawn(1)
    ),
    "ridge regression on it": learn(lambda: make_pipeline(StandardScaler(), Ridge(10)), drawn(1)),
}

if __name__ == "__main__":
    for name, trial in TRIALS.items():
        print(f"{name:30s}", " | ".join(judge(precision, trial) for precision in ROWS), flush=True)
