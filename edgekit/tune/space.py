"""The search space as data: groups of settings that are compared with each other, and when each makes sense.

Defaults are ONNX Runtime's. Keys are those of onnxruntime_session_options_config_keys.h; provider options are described
on the provider's page at https://onnxruntime.ai/docs/execution-providers/ and in the NOTES.md of its target.
"""

from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from edgekit._ort import Level
from edgekit.bundle.manifest import SessionSetting
from edgekit.target import Session

Goal = Literal["latency", "p99", "throughput", "memory", "load"]


_SPIN, _POOL_SIZE = "session.intra_op.allow_spinning", "intra_op_num_threads"
# Assumed if the number of cores is not known: current phones have eight.
_DEFAULT_CORES = 8
BATCHES = (2, 4, 8)
"""The batch sizes that are tried for throughput."""
PROVIDER_OPTIONS = "provider options"
"""The name of the group with a provider's own options."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A change of a setting: its name, the changed fields, and possibly another file or batch size.

    `config` and `provider_options` are merged into those of the setting.
    """

    name: str
    level: Level | None = None
    threads: int | None = None
    inter_threads: int | None = None
    parallel: bool | None = None
    arena: bool | None = None
    memory_pattern: bool | None = None
    io_binding: bool | None = None
    concurrency: int | None = None
    config: Mapping[str, str] = {}
    provider_options: Mapping[str, str] = {}
    file: str | None = None
    batch: int | None = None

    @property
    def touches(self) -> frozenset[str]:
        """The fields and keys that it changes; of two changes of the same field, only one can be adopted."""
        fields = (name for name in (*_FIELDS, "file", "batch") if getattr(self, name) is not None)
        return frozenset((*fields, *self.config, *self.provider_options))

    def apply(self, setting: SessionSetting) -> SessionSetting:
        """Returns a setting with this change."""
        return msgspec.structs.replace(
            setting,
            config={**setting.config, **self.config},
            provider_options={**setting.provider_options, **self.provider_options},
            **{name: getattr(self, name) for name in _FIELDS if getattr(self, name) is not None},
        )


_FIELDS = ("level", "threads", "inter_threads", "parallel", "arena", "memory_pattern", "io_binding", "concurrency")


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Changes that are compared with each other; if they are `combinable`, several of them may be adopted."""

    name: str
    changes: tuple[Change, ...]
    combinable: bool = False


class Circumstances(msgspec.Struct, frozen=True, kw_only=True):
    """What the search space depends on.

    `files` are alternative files of the model. `cores` and `physical` are the device's logical and physical cores, 0 if
    not known. `branches` says that the graph has nodes that could run concurrently, `dynamic_batch` that the model has
    a dynamic batch axis. `asked` is the session that the target's manifest sets anyway.
    """

    goal: Goal
    provider: str
    files: tuple[str, ...] = ()
    cores: int = 0
    physical: int = 0
    branches: bool = True
    dynamic_batch: bool = False
    asked: Session = Session()


LEVELS = Group(
    name="optimization level",
    changes=tuple(
        Change(name=level.value, level=level) for level in (Level.LAYOUT, Level.EXTENDED, Level.BASIC, Level.DISABLED)
    ),
)
"""The optimization levels below ONNX Runtime's default, `all`."""

SWITCHES = Group(
    name="switches",
    changes=(
        Change(name="IO binding", io_binding=True),
        Change(name="no arena", arena=False),
        Change(name="no memory pattern", memory_pattern=False),
        Change(name="no prepacking", config={"session.disable_prepacking": "1"}),
        Change(name="denormals as zero", config={"session.set_denormal_as_zero": "1"}),
        Change(name="initializers beside the arena", config={"session.use_device_allocator_for_initializers": "1"}),
    ),
    combinable=True,
)

# For these goals, switches that affect only the time of runs, such as IO binding and denormals, are left out.
_RELEVANT_SWITCHES: Mapping[Goal, frozenset[str]] = {
    "load": frozenset({"no arena", "no memory pattern", "no prepacking", "initializers beside the arena"}),
    "memory": frozenset({"no arena", "no memory pattern", "no prepacking", "initializers beside the arena"}),
}

PROVIDER_CHANGES: Mapping[str, tuple[Change, ...]] = {
    "XnnpackExecutionProvider": tuple(
        Change(name=f"{count} of XNNPACK's threads", provider_options={"intra_op_num_threads": str(count)})
        for count in (1, 2, 3, 4, 6, 8)
    ),
    "QNNExecutionProvider": (
        *(
            Change(name=f"HTP {mode}", provider_options={"htp_performance_mode": mode})
            for mode in ("burst", "sustained_high_performance", "high_performance", "balanced")
        ),
        Change(name="RPC latency 100 us", provider_options={"rpc_control_latency": "100"}),
        *(Change(name=f"VTCM {size} MB", provider_options={"vtcm_mb": str(size)}) for size in (4, 8)),
        Change(name="finalization 3", provider_options={"htp_graph_finalization_optimization_mode": "3"}),
    ),
    "CoreMLExecutionProvider": (
        Change(name="CPU and Neural Engine", provider_options={"MLComputeUnits": "CPUAndNeuralEngine"}),
        Change(name="CPU and GPU", provider_options={"MLComputeUnits": "CPUAndGPU"}),
        Change(name="fast prediction", provider_options={"SpecializationStrategy": "FastPrediction"}),
    ),
    "NnapiExecutionProvider": (
        Change(name="no NNAPI CPU", provider_options={"NNAPI_FLAG_CPU_DISABLED": "1"}),
        Change(name="relaxed to fp16", provider_options={"NNAPI_FLAG_USE_FP16": "1"}),
    ),
    "OpenVINOExecutionProvider": tuple(
        Change(name=name, provider_options={"load_config": f'{{"CPU":{{"INFERENCE_PRECISION_HINT":{words}}}}}'})
        for name, words in (
            ("1 OpenVINO thread", '"f32","INFERENCE_NUM_THREADS":"1"'),
            ("2 streams", '"f32","NUM_STREAMS":"2"'),
            ("OpenVINO for throughput", '"f32","PERFORMANCE_HINT":"THROUGHPUT"'),
            ("bf16", '"bf16"'),
        )
    ),
    "WebGpuExecutionProvider": (
        *(Change(name=layout, provider_options={"preferredLayout": layout}) for layout in ("NHWC", "NCHW")),
        Change(name="no validation", provider_options={"validationMode": "disabled"}),
    ),
    "CUDAExecutionProvider": (
        Change(name="cuDNN by heuristics", provider_options={"cudnn_conv_algo_search": "HEURISTIC"}),
        Change(name="NHWC", provider_options={"prefer_nhwc": "1"}),
    ),
    "TensorrtExecutionProvider": (
        Change(name="TensorRT level 5", provider_options={"trt_builder_optimization_level": "5"}),
    ),
    "DmlExecutionProvider": (Change(name="no metacommands", provider_options={"disable_metacommands": "true"}),),
}


def list_groups(given: Circumstances) -> Iterator[Group]:
    """Yields the groups in the order in which they are tried, which follows ONNX Runtime's tuning guide.

    Changes that the target already makes are left out.
    """
    have = {**given.asked.config, **given.asked.provider_options}
    for group in _list_candidates(given):
        kept: list[Change] = []
        for change in group.changes:
            want = {**change.config, **change.provider_options}
            # The target may already set everything that the change would set.
            if change.touches != want.keys() or not want.items() <= have.items():
                kept.append(change)
        if kept:
            yield msgspec.structs.replace(group, changes=tuple(kept))


def _list_candidates(given: Circumstances) -> Iterator[Group]:
    cores = given.cores or _DEFAULT_CORES
    physical = given.physical or cores
    fractions = [physical >> shift for shift in range(1, physical.bit_length())]
    # Thread counts: all logical cores, and 1/2, 1/4, ... of the physical cores, whose number is the default.
    threads = [Change(name="no spinning", config={_SPIN: "0"})]
    for count in ([cores] if cores > physical else []) + fractions:
        threads.append(Change(name=f"{count} thread{'s' if count > 1 else ''}", threads=count))
        if count > 1:
            threads.append(Change(name=f"{count} threads, no spinning", threads=count, config={_SPIN: "0"}))
    yield Group(name="threads", changes=tuple(threads))
    if given.branches and given.goal not in {"load", "memory"}:
        # Parallel execution with default threads, and with the physical cores divided among concurrent nodes.
        parallel = [Change(name="parallel", parallel=True)]
        for nodes in (1 << shift for shift in range(1, physical.bit_length())):
            name, each = f"parallel, {nodes} by {physical // nodes} threads", physical // nodes
            parallel.append(Change(name=name, parallel=True, inter_threads=nodes, threads=each))
        yield Group(name="execution", changes=tuple(parallel))
    if given.files:
        yield Group(name="file", changes=tuple(Change(name=f"file {name}", file=name) for name in given.files))
    yield LEVELS
    # A pool of more threads than the device has cores is left out.
    known = PROVIDER_CHANGES.get(given.provider, ())
    options = (change for change in known if int(change.provider_options.get(_POOL_SIZE, "0")) <= cores)
    yield Group(name=PROVIDER_OPTIONS, changes=tuple(options), combinable=True)
    relevant = _RELEVANT_SWITCHES.get(given.goal)
    switches = tuple(change for change in SWITCHES.changes if relevant is None or change.name in relevant)
    yield msgspec.structs.replace(SWITCHES, changes=switches)
    if given.goal == "throughput":
        changes: list[Change] = []
        for count in (2, 4):
            changes.append(Change(name=f"{count} runs at once", concurrency=count))
            changes.append(Change(name=f"{count} runs at once, 1 thread each", concurrency=count, threads=1))
        batches = (Change(name=f"batch {count}", batch=count) for count in BATCHES if given.dynamic_batch)
        yield Group(name="calls", changes=(*changes, *batches))
