"""The limits that a judgement may be given, beside those of the target."""

from typing import Annotated

import click
import msgspec

from edgekit.bundle.checks import bundled_task
from edgekit.bundle.manifest import Manifest
from edgekit.cli.declare import Option, number
from edgekit.cli.options import Metric, MetricDrop
from edgekit.recipe import load_metric
from edgekit.target import TaskLimit, Thresholds


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits by the names that they have in `Thresholds`; None where the option was not given.

    `metric` names a metric of the task; `max_metric_drop` and `min_metric_share` are its limits.
    """

    min_cosine: Annotated[float | None, number("Least cosine of an output.", click.FloatRange(-1, 1))]
    min_sqnr_db: Annotated[
        float | None, number("Least signal-to-noise ratio in dB.", click.FloatRange(-200, 200), "--min-sqnr")
    ]
    min_top1_agreement: Annotated[
        float | None,
        number("Least share of samples (of integers: of elements) that agree.", click.FloatRange(0, 1), "--min-top1"),
    ]
    gate: Annotated[
        str | None,
        Option("Judge the figures, or their intervals; of the metric too.", type=click.Choice(["estimate", "bound"])),
    ]
    max_cpu_nodes: Annotated[int | None, Option("Most nodes left to the CPU.", "N", type=click.IntRange(min=0))]
    max_lost_share: Annotated[
        float | None, number("Most work on the CPU that was predicted taken.", click.FloatRange(0, 1), "--max-lost")
    ]
    needs_placement: Annotated[
        bool | None, Option("Fail where no run observed what the provider takes.", is_flag=True, default=None)
    ]
    max_latency_ratio: Annotated[
        float | None, number("Most times the reference run's latency.", click.FloatRange(min=0))
    ]
    max_memory_ratio: Annotated[float | None, number("Most times the reference run's memory.", click.FloatRange(min=0))]
    max_size_bytes: Annotated[int | None, Option("Largest model.", "BYTES", "--max-size", type=click.IntRange(min=0))]
    metric: Metric
    max_metric_drop: MetricDrop
    min_metric_share: Annotated[
        float | None, number("Least share of the float model's metric.", click.FloatRange(0, 1))
    ]

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
