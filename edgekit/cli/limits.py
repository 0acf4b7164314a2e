"""The limits of `edgekit verify` on the command line, which replace those of the target."""

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
        number(
            "Least share of samples whose top-1 agrees (of integer outputs: of equal elements).",
            click.FloatRange(0, 1),
            "--min-top1",
        ),
    ]
    gate: Annotated[
        str | None,
        Option(
            "Judge by the measured figures (estimate) or by their 95 % intervals (bound), also of the metric.",
            type=click.Choice(["estimate", "bound"]),
        ),
    ]
    max_cpu_nodes: Annotated[
        int | None, Option("Largest number of nodes left to the CPU.", "N", type=click.IntRange(min=0))
    ]
    max_lost_share: Annotated[
        float | None,
        number(
            "Largest share of work that ran on the CPU although the rules predicted the provider.",
            click.FloatRange(0, 1),
            "--max-lost",
        ),
    ]
    needs_placement: Annotated[
        bool | None, Option("Fail if no run observed which nodes the provider takes.", is_flag=True, default=None)
    ]
    max_latency_ratio: Annotated[
        float | None, number("Largest ratio of the latency to that of the earlier run.", click.FloatRange(min=0))
    ]
    max_memory_ratio: Annotated[
        float | None, number("Largest ratio of the memory to that of the earlier run.", click.FloatRange(min=0))
    ]
    max_size_bytes: Annotated[
        int | None, Option("Largest size of the model file.", "BYTES", "--max-size", type=click.IntRange(min=0))
    ]
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
