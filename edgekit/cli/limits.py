"""The limits that a judgement may be given, beside those of the target."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import click
import msgspec

from edgekit.bundle.checks import bundled_task
from edgekit.bundle.manifest import Manifest
from edgekit.cli.options import Option
from edgekit.recipe import load_metric
from edgekit.target import TaskLimit, Thresholds

_F = TypeVar("_F", bound=Callable[..., Any])


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits by the names that they have in `Thresholds`; None where the option was not given.

    `metric` names a metric of the task; `max_metric_drop` and `min_metric_share` are its limits.
    """

    min_cosine: float | None
    min_sqnr_db: float | None
    min_top1_agreement: float | None
    gate: str | None
    max_cpu_nodes: int | None
    max_lost_share: float | None
    needs_placement: bool | None
    max_latency_ratio: float | None
    max_memory_ratio: float | None
    max_size_bytes: int | None
    metric: str | None
    max_metric_drop: float | None
    min_metric_share: float | None

    def find_task(self, manifest: Manifest) -> TaskLimit | None:
        """Returns the metric to measure: the one that was named, else that of the bundle, with the limits given.

        Raises:
            UsageError: the bundle asks for a function of somebody's own.
        """
        return self._limit(bundled_task(manifest) if self.metric is None else load_metric(self.metric))

    def apply(self, thresholds: Thresholds) -> Thresholds:
        """Returns the thresholds with the limits that were given; a share that the user names grants no sample more."""
        given = {
            name: getattr(self, name) for name in Thresholds.__struct_fields__ if getattr(self, name, None) is not None
        }
        if self.min_top1_agreement is not None:
            # The samples that may differ were granted for the target's own share.
            given["granted_samples"] = 0
        task = thresholds.task if self.metric is None else load_metric(self.metric)
        named = tuple(dict.fromkeys((*thresholds.named, *given)))
        return msgspec.structs.replace(thresholds, task=self._limit(task), **given, named=named)

    def _limit(self, task: TaskLimit | None) -> TaskLimit | None:
        given = {"max_drop": self.max_metric_drop, "min_share": self.min_metric_share, "gate": self.gate}
        set_ones = {name: value for name, value in given.items() if value is not None}
        return None if task is None else msgspec.structs.replace(task, **set_ones)


def taking_limits(function: _F) -> _F:
    """Adds the options of `Limits`."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def limit(option: str, name: str, kind: click.FloatRange, help_text: str) -> Option[Any]:
    """Returns an option that takes a number, and refuses NaN."""

    def refuse_nan(_context: click.Context, _parameter: click.Parameter, value: float | None) -> float | None:
        # Every comparison with NaN is false, so that a range lets it pass and no figure would ever miss it.
        if value is not None and math.isnan(value):
            raise click.BadParameter("'nan' is no number")
        return value

    return click.option(option, name, type=kind, callback=refuse_nan, metavar="X", help=help_text)


METRIC = click.option(
    "--metric", metavar="NAME", help="A metric that needs labels: top1, miou, wer, ..., module:function, or a .toml."
)
DROP = limit("--max-metric-drop", "max_metric_drop", click.FloatRange(min=0), "Most points below the float model.")
_OPTIONS: tuple[Option[Any], ...] = (
    limit("--min-cosine", "min_cosine", click.FloatRange(-1, 1), "Least cosine of an output."),
    limit("--min-sqnr", "min_sqnr_db", click.FloatRange(-200, 200), "Least signal-to-noise ratio in dB."),
    limit(
        "--min-top1",
        "min_top1_agreement",
        click.FloatRange(0, 1),
        "Least share of samples (of integers: of elements) that agree.",
    ),
    click.option(
        "--gate",
        type=click.Choice(["estimate", "bound"]),
        help="Judge the figures, or their intervals; of the metric too.",
    ),
    click.option("--max-cpu-nodes", type=click.IntRange(min=0), metavar="N", help="Most nodes left to the CPU."),
    limit("--max-lost", "max_lost_share", click.FloatRange(0, 1), "Most work on the CPU that was predicted taken."),
    click.option(
        "--needs-placement", is_flag=True, default=None, help="Fail where no run observed what the provider takes."
    ),
    limit(
        "--max-latency-ratio", "max_latency_ratio", click.FloatRange(min=0), "Most times the reference run's latency."
    ),
    limit("--max-memory-ratio", "max_memory_ratio", click.FloatRange(min=0), "Most times the reference run's memory."),
    click.option("--max-size", "max_size_bytes", type=click.IntRange(min=0), metavar="BYTES", help="Largest model."),
    METRIC,
    DROP,
    limit("--min-metric-share", "min_metric_share", click.FloatRange(0, 1), "Least share of the float model's metric."),
)
