"""Runs a model over samples with ONNX Runtime, and writes what came out: `python ort_runner.py FOLDER`.

It stands alone, on numpy and onnxruntime only, so that it runs wherever Python has these. FOLDER and its files are
those of `edgekit/devices/exchange.py`. It exits with 0 when it could write `run.json`, even if that holds a refusal.
"""

import json
import platform
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

ort: Any = onnxruntime
_CPU = "CPUExecutionProvider"
_LEVELS = {
    "disabled": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "layout": ort.GraphOptimizationLevel.ORT_ENABLE_LAYOUT,
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}

Json = dict[str, Any]
Array = npt.NDArray[Any]


def main() -> int:
    """Runs the job in the folder given as the only argument."""
    folder = Path(sys.argv[1])
    job = json.loads((folder / "job.json").read_bytes())
    run: Json = {
        "status": "running",
        "message": "",
        "load_ms": 0.0,
        "latency_ms": [],
        "peak_rss_bytes": 0,
        "versions": {"onnxruntime": ort.__version__, "python": platform.python_version()},
        "placement": [],
        "placement_source": "profile" if job["profile"] else "session",
    }
    try:
        run["status"] = _run_samples(folder, job, run)
    except Exception as error:  # noqa: BLE001 - ONNX Runtime's exceptions share no base, and each is a refusal to report
        run["status"] = "refused"
        run["message"] = _one_line(error)
    _write_run(folder, run)
    return 0


def _run_samples(folder: Path, job: Json, run: Json) -> str:
    start = time.perf_counter()
    session = _open_session(folder, job)
    run["load_ms"] = (time.perf_counter() - start) * 1e3
    if not job["profile"]:
        run["placement"] = _assigned_nodes(session)
    _write_run(folder, run)
    (folder / "out").mkdir()
    begin = time.perf_counter()
    for index in range(job["samples"]):
        if index >= job["least_samples"] and time.perf_counter() - begin > job["budget_s"]:
            return "stopped"
        name = f"{index:05d}.tensors"
        inputs = _read_tensors(folder / "in" / name)
        start = time.perf_counter()
        values = session.run(None, inputs)
        run["latency_ms"].append((time.perf_counter() - start) * 1e3)
        names = [output.name for output in session.get_outputs()]
        _write_tensors(folder / "out" / name, dict(zip(names, values, strict=True)))
        if job["profile"] and index == 0:
            run["placement"] = _profiled_nodes(Path(session.end_profiling()))
    return "done"


def _open_session(folder: Path, job: Json) -> Any:
    options = ort.SessionOptions()
    options.graph_optimization_level = _LEVELS[job["level"]]
    options.intra_op_num_threads = job["threads"]
    options.log_severity_level = 3
    options.enable_profiling = job["profile"]
    options.profile_file_prefix = str(folder / "profile")
    for key, value in job["session_config"].items():
        options.add_session_config_entry(key, value)
    if not job["profile"]:
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    provider = job["provider"]
    if job["library"]:
        ort.register_execution_provider_library(provider, job["library"])
        devices = [device for device in ort.get_ep_devices() if device.ep_name == provider]
        options.add_provider_for_devices(devices[:1], job["provider_options"])
        return ort.InferenceSession(job["model"], options, enable_fallback=False)
    providers = [(provider, job["provider_options"])] if provider != _CPU else []
    return ort.InferenceSession(job["model"], options, providers=[*providers, _CPU], enable_fallback=False)


def _assigned_nodes(session: Any) -> list[Json]:
    return [
        {"name": node.name, "op": node.op_type, "domain": node.domain, "provider": part.ep_name}
        for part in session.get_provider_graph_assignment_info()
        for node in part.get_nodes()
    ]


def _profiled_nodes(file: Path) -> list[Json]:
    """Reads the executed nodes; a profile has no domain."""
    nodes: dict[str, Json] = {}
    for event in json.loads(file.read_bytes()):
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            name = event["name"].removesuffix("_kernel_time")
            arguments = event["args"]
            op, provider = arguments["op_name"], arguments["provider"]
            nodes[name] = {"name": name, "op": op, "domain": "", "provider": provider}
    file.unlink()
    return list(nodes.values())


def _read_tensors(path: Path) -> dict[str, Array]:
    tensors: dict[str, Array] = {}
    with path.open("rb") as stream:
        for entry in json.loads(stream.readline()):
            data = stream.read(entry["size_bytes"])
            tensors[entry["name"]] = _decode(data, entry["dtype"]).reshape(entry["shape"])
    return tensors


def _decode(data: bytes, dtype: str) -> Array:
    if dtype == "string":
        return np.array(json.loads(data), dtype=object)
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).astype(dtype, copy=False)


def _write_tensors(path: Path, tensors: dict[str, Any]) -> None:
    entries: list[Json] = []
    payloads: list[bytes] = []
    for name, value in tensors.items():
        dtype, payload = _encode(name, value)
        entries.append({"name": name, "dtype": dtype, "shape": value.shape, "size_bytes": len(payload)})
        payloads.append(payload)
    _write_whole(path, b"".join((json.dumps(entries).encode(), b"\n", *payloads)))


def _encode(name: str, value: Any) -> tuple[str, bytes]:
    if not hasattr(value, "dtype"):
        raise TypeError(f"output '{name}' is no tensor: remove it from the outputs")
    if value.dtype.kind in "OU":
        return "string", json.dumps([str(item) for item in value.flat]).encode()
    return value.dtype.name, value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes()


def _write_run(folder: Path, run: Json) -> None:
    _write_whole(folder / "run.json", json.dumps({**run, "peak_rss_bytes": _peak_rss_bytes()}).encode())


def _write_whole(path: Path, data: bytes) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(data)
    part.replace(path)


def _peak_rss_bytes() -> int:
    """Reads VmHWM where there is a /proc: ru_maxrss also counts the parent before the exec."""
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:400]


if __name__ == "__main__":
    sys.exit(main())
