"""Runs a model over samples with ONNX Runtime: `python ort_runner.py --pipe` answers each sample of stdin on stdout.

It needs only numpy and onnxruntime, so that it runs wherever Python has these. The messages are those of
`edgekit/devices/process/exchange.py`. It exits with 0 if it could write its report, even if that is a refusal.
"""

import importlib
import itertools
import json
import os
import platform
import runpy
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import onnxruntime

try:
    resource: Any = importlib.import_module("resource")
except ImportError:  # Windows has none
    resource = None

ort: Any = onnxruntime
_CPU = "CPUExecutionProvider"

Json = dict[str, Any]
Array = npt.NDArray[Any]


def main() -> int:
    """Runs the job in the first line of stdin; what libraries print goes to stderr."""
    stdin = sys.stdin.buffer
    with os.fdopen(os.dup(1), "wb") as stdout, tempfile.TemporaryDirectory() as folder:
        # Libraries may print to stdout, which would corrupt the messages: file descriptor 1 is redirected to stderr.
        os.dup2(2, 1)
        job = json.loads(stdin.readline())
        run: Json = {
            "status": "running",
            "message": "",
            "load_ms": 0.0,
            "latency_ms": [],
            "elapsed_ms": [],
            "peak_rss_bytes": 0,
            "memory": {"start": _read_memory()},
            "before": read_state(),
            "versions": {"onnxruntime": ort.__version__, "python": platform.python_version()},
            "placement": [],
            "placement_source": "profile" if job["profile"] else "session",
        }

        def answer(data: bytes) -> None:
            stdout.write(data)
            stdout.flush()

        try:
            run["status"] = _run_samples(Path(folder), job, run, _read_samples(stdin), answer)
        # The process that asked is gone: nobody can receive a report.
        except BrokenPipeError:
            raise
        except Exception as error:  # noqa: BLE001 - ONNX Runtime's exceptions share no base, and each is a refusal
            run["status"] = "refused"
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            run["message"] = (lines or [type(error).__name__])[0][:400]
        trace = run.pop("trace", None)
        run["trace_bytes"] = trace.stat().st_size if trace is not None else 0
        stdout.write(_finish_run(run))
        if trace is not None:
            with trace.open("rb") as source:
                shutil.copyfileobj(source, stdout)
    return 0


def _read_samples(stdin: IO[bytes]) -> Iterator[dict[str, Array]]:
    while line := stdin.readline():
        yield _read_tensors(line, stdin)


def _run_samples(
    folder: Path, job: Json, run: Json, samples: Iterator[dict[str, Array]], answer: Callable[[bytes], None]
) -> str:
    start = time.perf_counter()
    session = _open_session(folder, job)
    run["load_ms"] = (time.perf_counter() - start) * 1e3
    _note_memory(run, "session")
    if not job["profile"]:
        run["placement"] = [
            {"name": node.name, "op": node.op_type, "domain": node.domain, "provider": part.ep_name}
            for part in session.get_provider_graph_assignment_info()
            for node in part.get_nodes()
        ]
    # An early report, in case the process dies with the first sample.
    answer(_finish_run(run))
    names = [output.name for output in session.get_outputs()]
    status, begin = "done", time.perf_counter()
    for index in itertools.count():
        if index >= job["least_samples"] and time.perf_counter() - begin > job["budget_s"]:
            status = "stopped"
            break
        if (inputs := next(samples, None)) is None:
            break
        values = _run_repeatedly(session, inputs, job, run)
        parts = [_flatten(*output) for output in zip(names, values, strict=True)]
        answer(_join_tensors({key: value for part in parts for key, value in part.items()}))
    if job.get("trace"):
        run["trace"] = Path(session.end_profiling())
    return status


def _run_repeatedly(session: Any, inputs: dict[str, Array], job: Json, run: Json) -> list[Any]:
    """Runs a sample as often as the job says, records the times, and returns the outputs."""
    if job.get("queue"):
        values, run["latency_ms"], elapsed_ms = serve_queue(session, inputs, job["queue"], job["repeat"])
        run["elapsed_ms"] = [elapsed_ms]
        return values
    turns = iter(range(job.get("repeat", 1)))
    threads = job.get("concurrency", 1)
    calls = [_prepare_call(session, inputs, job) for _ in range(threads)]

    def work(call: Callable[[], Callable[[], list[Any]]]) -> list[Any]:
        read: Callable[[], list[Any]] = list
        for _ in turns:
            start = time.perf_counter()
            read = call()
            run["latency_ms"].append((time.perf_counter() - start) * 1e3)
            if len(run["latency_ms"]) == 1:
                _note_memory(run, "first run")
            if job["profile"]:
                # The first run tells the placement; then the profiler is stopped, because it slows runs down.
                job["profile"] = False
                run["placement"] = _profiled_nodes(Path(session.end_profiling()))
        return read()

    if threads == 1:
        return work(calls[0])
    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(work, calls))
    run["elapsed_ms"].append((time.perf_counter() - start) * 1e3)
    # A thread that started late may have found no run left.
    return next(values for values in found if values)


def serve_queue(
    session: Any, inputs: dict[str, Array], queue: Json, count: int
) -> tuple[list[Any], list[float], float]:
    """Serves requests that arrive at random in batches: dynamic batching, as in a server.

    Returns the outputs of one request, the milliseconds from each request to its answer, and those of all together. A
    batch starts when it is full, or when its oldest request has waited for `wait_ms`, with the requests present then.
    Inputs without a batch axis are the same for each batch.
    """
    most: int = queue["most"]
    wait_s: float | None = None if queue["wait_ms"] is None else queue["wait_ms"] / 1e3
    batches = [
        {name: np.concatenate([value] * size) if name in queue["rows"] else value for name, value in inputs.items()}
        for size in range(1, most + 1)
    ]
    # One run for each batch size first, because memory is planned anew for each size: that must not be timed.
    warm = [session.run(None, batch) for batch in batches]
    # A Poisson process with a fixed seed, so that only the machine varies from run to run.
    pauses: list[float] = np.random.default_rng(0).exponential(1 / queue["rate_per_s"], count).tolist()
    due: list[float] = np.cumsum(np.asarray(pauses)).tolist()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < count:
        done = len(times)
        full = due[min(done + most, count) - 1]
        ready = full if wait_s is None else min(full, due[done] + wait_s)
        time.sleep(max(0.0, begin + ready - time.perf_counter()))
        now, size = max(ready, time.perf_counter() - begin), 1
        while size < min(most, count - done) and due[done + size] <= now:
            size += 1
        session.run(None, batches[size - 1])
        end = time.perf_counter() - begin
        times += [(end - at) * 1e3 for at in due[done : done + size]]
    return list(warm[0]), times, (time.perf_counter() - begin) * 1e3


def _prepare_call(session: Any, inputs: dict[str, Array], job: Json) -> Callable[[], Callable[[], list[Any]]]:
    """Returns a function that runs a sample, and returns one that reads the outputs, which is not timed."""
    if not job.get("io_binding"):

        def call() -> Callable[[], list[Any]]:
            values = session.run(None, inputs)
            return lambda: values

        return call
    binding, names = session.io_binding(), [output.name for output in session.get_outputs()]
    for name, value in inputs.items():
        binding.bind_cpu_input(name, value)
    for name in names:
        binding.bind_output(name)
    kept: list[Any] = []

    def call_bound() -> Callable[[], list[Any]]:
        session.run_with_iobinding(binding)
        if not kept:
            # Later runs write their outputs into the buffers of the first run.
            kept.extend(binding.get_outputs())
            for name, value in zip(names, kept, strict=True):
                binding.bind_ortvalue_output(name, value)
        return lambda: list(binding.copy_outputs_to_cpu())

    return call_bound


def _open_session(folder: Path, job: Json) -> Any:
    options = ort.SessionOptions()
    level = "DISABLE_ALL" if job["level"] == "disabled" else f"ENABLE_{job['level'].upper()}"
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_{level}")
    options.intra_op_num_threads = job["threads"]
    options.inter_op_num_threads = job.get("inter_threads", 0)
    if job.get("parallel"):
        options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    options.enable_cpu_mem_arena = job.get("arena", True)
    options.enable_mem_pattern = job.get("memory_pattern", True)
    options.log_severity_level = 3
    options.enable_profiling = job["profile"] or job.get("trace", False)
    options.profile_file_prefix = str(folder / "profile")
    for key, value in job["session_config"].items():
        options.add_session_config_entry(key, value)
    for library in job.get("custom_ops", ()):
        options.register_custom_ops_library(library)
    if not job["profile"]:
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    provider = job["provider"]
    chain = [(each["provider"], each["provider_options"]) for each in (job, *job.get("chain", ()))]
    providers: Any = [_CPU] if provider == _CPU else [*chain, _CPU]
    if job["library"] or job.get("preload"):
        # In the folder of this file; loaded only if needed, because other machines get only the runner.
        prepare = runpy.run_path(str(Path(__file__).with_name("ort_provider.py")))["prepare_provider"]
        providers = prepare(options, job, providers)
    # With the fallback, a session that cannot be made on the provider would silently be made on the CPU.
    session = ort.InferenceSession(job["model"], options, providers, enable_fallback=False)
    if provider not in session.get_providers():
        raise RuntimeError(f"asked for {provider}, and the session has {', '.join(session.get_providers())} alone")
    return session


def _profiled_nodes(file: Path) -> list[Json]:
    """Returns the executed nodes of a profile, which does not tell their domains."""
    nodes: dict[str, Json] = {}
    for event in json.loads(file.read_bytes()):
        # Of a node's events, only this one names the provider that ran it.
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            name = event["name"].removesuffix("_kernel_time")
            arguments = event["args"]
            op, provider = arguments["op_name"], arguments["provider"]
            nodes[name] = {"name": name, "op": op, "domain": "", "provider": provider}
    file.unlink()
    return list(nodes.values())


def _read_tensors(line: bytes, stream: IO[bytes]) -> dict[str, Array]:
    tensors: dict[str, Array] = {}
    for entry in json.loads(line):
        data = stream.read(entry["size_bytes"])
        if len(data) != entry["size_bytes"]:
            raise EOFError(f"the samples end in the middle of '{entry['name']}'")
        if entry["dtype"] == "string":
            value: Array = np.array(json.loads(data), dtype=object)
        else:
            dtype = np.dtype(entry["dtype"])
            value = np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype, copy=False)
        tensors[entry["name"]] = value.reshape(entry["shape"])
    return tensors


def _flatten(name: str, value: Any) -> dict[str, Any]:
    """Flattens maps and sequences to tensors, as `edgekit/model/tensors.py` does."""
    kind: str = type(value).__name__
    if kind == "dict":
        items: dict[Any, Any] = value
        return {f"{name}.keys": _as_array(list(items)), f"{name}.values": _as_array(list(items.values()))}
    if kind == "list":
        entries: list[Any] = value
        maps: list[dict[Any, Any]] = [entry for entry in entries if isinstance(entry, dict)]
        if maps and len(maps) == len(entries) and all(list(entry) == list(maps[0]) for entry in maps):
            rows = [list(entry.values()) for entry in maps]
            return {f"{name}.keys": _as_array(list(maps[0])), f"{name}.values": _as_array(rows)}
        flat: dict[str, Any] = {f"{name}.length": np.array(len(entries), np.int64)}
        for index, entry in enumerate(entries):
            flat |= _flatten(f"{name}[{index}]", entry)
        return flat
    return {name: value}


def _as_array(items: list[Any]) -> Array:
    value = np.asarray(items)
    # As in edgekit: ONNX Runtime's maps hold float32, which Python's floats widened to float64.
    return value.astype(np.float32) if value.dtype == np.float64 else value


def _join_tensors(tensors: dict[str, Any]) -> bytes:
    entries: list[Json] = []
    payloads: list[bytes] = []
    for name, value in tensors.items():
        if not hasattr(value, "dtype"):
            raise TypeError(f"output '{name}' is no tensor: remove it from the outputs")
        dtype = "string" if value.dtype.kind in "OU" else value.dtype.name
        if dtype == "string":
            payload = json.dumps([str(item) for item in value.flat]).encode()
        else:
            payload = value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes()
        entries.append({"name": name, "dtype": dtype, "shape": value.shape, "size_bytes": len(payload)})
        payloads.append(payload)
    return b"".join((json.dumps(entries).encode(), b"\n", *payloads))


def _finish_run(run: Json) -> bytes:
    _note_memory(run, "all runs")
    return json.dumps({**run, "after": read_state(), "peak_rss_bytes": run["memory"]["all runs"][1]}).encode() + b"\n"


def read_state(system: Path = Path("/sys")) -> Json:
    """Reads sensors and clocks, as far as the system has them, like the C++ runner."""
    zones, clocks = system.glob("class/thermal/thermal_zone*"), system.glob("devices/system/cpu/cpu[0-9]*")
    degrees = {f"{zone.name[12:]} {_first_line(zone / 'type')}": _first_line(zone / "temp") for zone in zones}
    speeds = {cpu.name: _first_line(cpu / "cpufreq" / "scaling_cur_freq") for cpu in clocks}
    return {
        "temperatures_c": {name: int(line) / 1e3 for name, line in degrees.items() if line.isdecimal()},
        "clocks_khz": {name: int(line) for name, line in speeds.items() if line.isdecimal()},
    }


def _first_line(path: Path) -> str:
    try:
        return path.read_text(errors="replace").partition("\n")[0].strip()
    except OSError:  # missing, or readable only by root
        return ""


def _note_memory(run: Json, phase: str) -> None:
    """Adds the memory after a phase to a run's report; the peak never falls from one phase to the next."""
    resident, peak = _read_memory()
    # Linux counts pages for each CPU and sums them up now and then, so that a later peak may read some pages lower.
    run["memory"][phase] = resident, max(peak, *(before for _, before in run["memory"].values()))


def _read_memory() -> tuple[int, int]:
    """Returns the resident bytes and their peak, if possible from /proc: ru_maxrss may include the parent's peak."""
    if (status := Path("/proc/self/status")).is_file():
        lines = (line.split() for line in status.read_text().splitlines())
        found = {words[0]: int(words[1]) * 1024 for words in lines if words and words[0] in {"VmRSS:", "VmHWM:"}}
        return found.get("VmRSS:", 0), found.get("VmHWM:", 0)
    if resource is None:
        return 0, 0
    unit = 1 if sys.platform == "darwin" else 1024
    peak: int = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return 0, peak * unit


if __name__ == "__main__":
    sys.exit(main())
