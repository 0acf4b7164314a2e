"""Opens the bundles of this package with ONNX Runtime, checks every file, and compares them with the float model.

    python edgekit_loader.py [--only NAME] [--cpu] [--plugin LIBRARY]

It needs only numpy and onnxruntime. `edgekit_bundles.json` beside it holds the facts of the manifests. The exit code is
0 if a bundle opened and its self-test passed.
"""

import argparse
import hashlib
import importlib
import json
import math
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

ort: Any = onnxruntime
Variant = dict[str, Any]

_HERE = Path(__file__).resolve().parent
_NO_CPU = "session.disable_cpu_ep_fallback"
# The module of the wheel that contains a provider's library.
_PLUGINS = {
    "OpenVINOExecutionProvider": "onnxruntime_ep_openvino",
    "QNNExecutionProvider": "onnxruntime_qnn",
    "WebGpuExecutionProvider": "onnxruntime_ep_webgpu",
}
# Equal outputs have an infinite SQNR: the limit keeps the figure finite.
_MAX_DB = 200.0


class LoaderError(Exception):
    """A bundle is damaged, or cannot be opened here; the message says which and why."""


def read_variants(file: Path = _HERE / "edgekit_bundles.json") -> list[Variant]:
    """Returns the facts of each bundle's manifest, in the order in which an app should try them."""
    variants: list[Variant] = json.loads(file.read_bytes())
    return variants


def find_folder(variant: Variant) -> Path:
    """Returns the folder of a bundle in this package."""
    return _HERE.parent / "bundles" / str(variant["name"])


def check_files(variant: Variant, folder: Path) -> None:
    """Checks that every file of the bundle exists and has its sha256.

    Raises:
        LoaderError: a file is missing or altered.
    """
    for name, entry in variant["files"].items():
        digest = hashlib.sha256()
        try:
            with (folder / name).open("rb") as stream:
                while chunk := stream.read(1 << 20):
                    digest.update(chunk)
        except OSError as error:
            raise LoaderError(f"'{name}' of bundle '{variant['name']}' cannot be read: {error.strerror}") from error
        if digest.hexdigest() != entry["sha256"]:
            raise LoaderError(f"'{name}' of bundle '{variant['name']}' was altered: its sha256 is another")


def find_tuned(variant: Variant) -> Variant | None:
    """Returns the settings that `edgekit tune` found for machines like this one, None if there are none."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    this_machine = (platform.system().lower(), platform.machine().lower())
    levels = {int(level) for level in ort.GraphOptimizationLevel.__members__.values()}
    settings: list[Variant] = variant.get("tuned", [])
    matching = (it for it in settings if (it["system"], it["machine"]) == this_machine and it["cores"] in {0, cores})
    setting = next(matching, None)
    # If an older ONNX Runtime lacks the level, the setting is not used at all: it was measured as a whole.
    return setting if setting is not None and setting["level"] in levels else None


def open_session(
    variant: Variant, folder: Path, *, on_cpu: bool = False, plugin: str = "", model: str = "", tuned: bool = True
) -> Any:
    """Returns an InferenceSession with every session key and provider option of the bundle, after checking its files.

    `model` is the file of one size, for a bundle with several sizes; "" is the largest one. `on_cpu` leaves out the
    provider, and the key that forbids the CPU provider. `plugin` is the library of a provider that ONNX Runtime loads
    at run time; by default it is that of the provider's wheel. With `tuned`, the settings are used that were tuned for
    machines like this one; they apply to the largest size only.

    Raises:
        LoaderError: a file was altered, ONNX Runtime is too old, or it cannot open the bundle here.
    """
    check_files(variant, folder)
    if _version(ort.__version__) < _version(variant["minimum_ort"]):
        raise LoaderError(f"'{variant['name']}' needs ONNX Runtime {variant['minimum_ort']}, this is {ort.__version__}")
    options = ort.SessionOptions()
    applies = tuned and not on_cpu and model in {"", variant["model"]}
    setting = find_tuned(variant) if applies else None
    variant = {**variant, **(setting or {})}
    try:
        for key, value in variant["session_config"].items():
            if not (on_cpu and key == _NO_CPU):
                options.add_session_config_entry(key, value)
        providers = _choose_providers(variant, options, on_cpu=on_cpu, plugin=plugin)
        if setting is not None:
            options.graph_optimization_level = ort.GraphOptimizationLevel(setting["level"])
            # 0 keeps the number that was set for the provider.
            options.intra_op_num_threads = setting["threads"] or options.intra_op_num_threads
            options.inter_op_num_threads = setting["inter_threads"]
            if setting["parallel"]:
                options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
            options.enable_cpu_mem_arena = setting["arena"]
            options.enable_mem_pattern = setting["memory_pattern"]
        return ort.InferenceSession(
            str(folder / (model or variant["model"])), options, **providers, enable_fallback=False
        )
    except LoaderError:
        raise
    except Exception as error:  # ONNX Runtime's exceptions share no base
        raise LoaderError(f"'{variant['name']}' cannot be opened here: {' '.join(str(error).split())}") from error


def _choose_providers(variant: Variant, options: Any, *, on_cpu: bool, plugin: str) -> dict[str, Any]:
    name, given = variant["provider"], variant["provider_options"]
    if on_cpu or name == "CPUExecutionProvider":
        return {"providers": [("CPUExecutionProvider", {} if on_cpu else given)]}
    if name in _PLUGINS:
        if name not in {device.ep_name for device in ort.get_ep_devices()}:
            ort.register_execution_provider_library(name, plugin or _find_plugin(_PLUGINS[name]))
        if not (devices := [device for device in ort.get_ep_devices() if device.ep_name == name]):
            raise LoaderError(f"this machine has no device that {name} can use")
        options.add_provider_for_devices(devices[:1], given)
        return {}
    if name not in ort.get_available_providers():
        raise LoaderError(f"this onnxruntime was built without {name}, which '{variant['name']}' is for")
    if name == "XnnpackExecutionProvider":
        options.intra_op_num_threads = 1  # XNNPACK has its own threads
    chain = [(each["provider"], each["provider_options"]) for each in variant["chain"]]
    return {"providers": [(name, given), *chain, "CPUExecutionProvider"]}


def _find_plugin(module: str) -> str:
    try:
        wheel: Any = importlib.import_module(module)
    except ImportError as error:
        package = module.replace("_", "-")
        raise LoaderError(f"the provider's library is missing: give --plugin, or install {package}") from error
    return str(wheel.get_library_path())


class Sizes:
    """Runs samples of any length with a bundle that has models of several sizes: each in the smallest that fits.

    Inputs are padded at their end to that size, and outputs are cut back. A session is opened when it is first needed;
    all models share one file of weights. The options are those of `open_session`.
    """

    def __init__(self, variant: Variant, folder: Path, **options: Any) -> None:
        self._variant, self._folder, self._options = variant, folder, options
        self._buckets: dict[str, Any] = variant["buckets"]
        self._sessions: dict[int, Any] = {}

    def run(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Returns the outputs for a sample, cut to its length.

        Raises:
            LoaderError: it is empty or longer than the largest size, or its inputs have different lengths.
        """
        dim, filled = self._buckets["dim"], self._buckets["inputs"]
        lengths = {inputs[each["name"]].shape[axis] for each in filled for axis in each["axes"]}
        if len(lengths) != 1:
            raise LoaderError(f"the inputs have several sizes of '{dim}': {sorted(lengths)}")
        length = lengths.pop()
        bucket = next((each for each in self._buckets["sizes"] if each["size"] >= length > 0), None)
        if bucket is None:
            raise LoaderError(f"'{self._variant['name']}' takes no sample of {length} in '{dim}'")
        size, session = bucket["size"], self._open(bucket)
        given = {**inputs, **{each["name"]: _pad(inputs[each["name"]], size, each) for each in filled}}
        names = [output.name for output in session.get_outputs()]
        outputs = dict(zip(names, session.run(names, given), strict=True))
        cut = {each["name"]: _cut(outputs[each["name"]], length, size, each) for each in self._buckets["outputs"]}
        return {**outputs, **cut}

    def _open(self, bucket: dict[str, Any]) -> Any:
        if (size := bucket["size"]) not in self._sessions:
            self._sessions[size] = open_session(self._variant, self._folder, model=bucket["file"], **self._options)
        return self._sessions[size]


def _pad(value: Any, size: int, padded: dict[str, Any]) -> Any:
    widths = [(0, size - length if axis in padded["axes"] else 0) for axis, length in enumerate(value.shape)]
    element = np.frombuffer(np.array(padded["element"], np.int8).tobytes(), value.dtype)
    return np.pad(value, widths, constant_values=element[0])


def _cut(value: Any, length: int, size: int, cut: dict[str, Any]) -> Any:
    for axis in cut["axes"]:
        value = value.take(range(-(-length * value.shape[axis] // size)), axis)
    return np.asarray(value, order="C")


class Warm:
    """Runs a session as a server should: one session for all requests, warmed up before the first, outputs bound.

    While the shapes of the inputs stay the same, each run overwrites the outputs of the run before: copy what must
    outlive the next run. Threads may share the session, each with a Warm of its own. Tensors of text cannot be bound,
    and outputs whose shape depends on the values need `session.run`.
    """

    def __init__(self, session: Any, inputs: dict[str, Any]) -> None:
        """`inputs` is a sample for the warm-up run, which chooses kernels and plans memory."""
        self._session, self._binding = session, session.io_binding()
        self._names = [output.name for output in session.get_outputs()]
        self._shapes: dict[str, Any] = {}
        self.run(inputs)

    def run(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Returns the outputs for inputs, which may be a batch if the bundle's first axis is dynamic."""
        shapes = {name: value.shape for name, value in inputs.items()}
        for name, value in inputs.items():
            self._binding.bind_cpu_input(name, np.asarray(value, order="C"))
        if shapes != self._shapes:
            for name in self._names:
                self._binding.bind_output(name)
        self._session.run_with_iobinding(self._binding)
        made = self._binding.get_outputs()
        if shapes != self._shapes:
            for name, value in zip(self._names, made, strict=True):
                self._binding.bind_ortvalue_output(name, value)
            self._shapes = shapes
        return {name: value.numpy() for name, value in zip(self._names, made, strict=True)}


class Stepper:
    """Runs a model with state, such as a KV cache, step by step: the state that a step outputs is an input of the next.

    If an output is longer than the input that it feeds, its last rows are used; if it is shorter, it is appended to the
    input, whose oldest rows are dropped.
    """

    def __init__(self, variant: Variant, session: Any) -> None:
        self._feeds: dict[str, str] = variant["feeds"]
        self._specs = {spec["name"]: spec for spec in variant["inputs"]}
        self._session = session
        self._names = [output.name for output in session.get_outputs()]
        self._state: dict[str, Any] = {}
        self.reset()

    def reset(self, state: dict[str, Any] | None = None) -> None:
        """Begins a sequence; inputs that `state` does not contain are zero."""
        zeros = {name: np.zeros(self._specs[name]["shape"], self._specs[name]["dtype"]) for name in self._feeds}
        self._state = {**zeros, **(state or {})}

    def run(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Returns the outputs of the next step; `inputs` are all inputs that hold no state."""
        outputs = dict(zip(self._names, self._session.run(self._names, {**self._state, **inputs}), strict=True))
        for name, output in self._feeds.items():
            self._state[name] = feed_back(self._specs[name]["shape"], self._state[name], outputs[output])
        return outputs


def feed_back(shape: list[int], held: Any, output: Any) -> Any:
    """Returns the input of the next step: the last rows of the input `held` followed by the output, in `shape`.

    If the output alone is long enough, `held` is not used.
    """
    for axis, size in enumerate(shape):
        if output.shape[axis] < size:
            output = np.concatenate([held, output], axis)
        if output.shape[axis] > size:
            output = output.take(range(output.shape[axis] - size, output.shape[axis]), axis)
    return np.asarray(output, order="C")


def run_self_test(variant: Variant, folder: Path, session: Any) -> list[str]:
    """Runs the golden samples and returns every reason why the outputs fail; an empty list is a pass."""
    sums: dict[str, dict[str, float]] = {}
    names = [output["name"] for output in variant["outputs"]]
    shared, against_float = folder / variant["golden"], variant["reference"] == "outputs"
    chosen = _rows(variant["outputs"], folder / "golden" / "expected.npz", len(variant["chosen"]))
    expected = dict(zip(variant["chosen"], chosen, strict=True))
    reference = _rows(variant["outputs"], shared / "outputs.npz", variant["samples"] if against_float else 0)
    failures: list[str] = []
    for index, inputs in enumerate(_rows(variant["inputs"], shared / "inputs.npz", variant["samples"])):
        if not against_float and index not in expected:
            continue  # this row belongs to the self-test of another bundle
        reference_row = next(reference) if against_float else expected[index]
        for name, got in zip(names, session.run(names, inputs), strict=True):
            if got.shape != reference_row[name].shape or (
                got.dtype != reference_row[name].dtype and got.dtype != object
            ):
                return [f"output '{name}' is {got.dtype}{list(got.shape)}"]
            _add(sums.setdefault(name, dict.fromkeys(_SUMS, 0.0)), reference_row[name], got)
            if index in expected:
                failures += _compare(name, expected[index][name], got, variant["tolerance"].get(name))
    return [*failures, *(line for name in names for line in _judge(name, sums[name], variant))]


_SUMS = ("samples", "elements", "matches", "faulty", "dot", "wanted", "got", "error", "ranked", "agreed", "numeric")


def _rows(tensors: list[Any], file: Path, count: int) -> Iterator[dict[str, Any]]:
    if not count:
        return
    with np.load(file, allow_pickle=False) as archive:
        arrays = {spec["name"]: archive[spec["name"]] for spec in tensors}
    for index in range(count):
        # The ellipsis keeps a scalar an array, as a session wants it.
        yield {name: array[index, ...] for name, array in arrays.items()}


def _compare(name: str, expected: Any, got: Any, limit: float | None) -> list[str]:
    """Compares an output of one sample with that of this model on the machine where the bundle was built."""
    if limit is None:
        return []
    distance = float(np.abs(expected.astype(np.float64) - got.astype(np.float64)).max(initial=0.0))
    return [] if distance <= limit else [f"output '{name}' is off by {distance:.6g}, at most {limit:.6g}"]


def _add(sums: dict[str, float], wanted: Any, got: Any) -> None:
    sums["samples"] += 1
    sums["elements"] += wanted.size
    sums["matches"] += int(np.count_nonzero(wanted == got))
    if wanted.dtype.kind != "f" and not (wanted.dtype.kind in "iu" and wanted.dtype.itemsize <= 2):
        return
    # In float64: sums of squares of half precision overflow at 65504.
    first, second = wanted.astype(np.float64).ravel(), got.astype(np.float64).ravel()
    sums["numeric"] = 1
    sums["faulty"] += int(np.count_nonzero(~(np.isfinite(first) & np.isfinite(second))))
    sums["dot"] += float(first @ second)
    sums["wanted"] += float(first @ first)
    sums["got"] += float(second @ second)
    sums["error"] += float((second - first) @ (second - first))
    if first.size > 1 and max(wanted.shape) == first.size:
        sums["ranked"] += 1
        sums["agreed"] += first[second.argmax()] >= first.max()


def _judge(name: str, sums: dict[str, float], variant: Variant) -> list[str]:
    limits = variant["thresholds"]
    if not sums["elements"] or sums["faulty"]:
        return [f"output '{name}' has {sums['faulty']:.0f} values that are NaN or infinite, of {sums['elements']:.0f}"]
    if not sums["numeric"]:
        figures = [("exact match", sums["matches"] / sums["elements"], limits["min_top1_agreement"])]
    else:
        norm = math.sqrt(sums["wanted"]) * math.sqrt(sums["got"])
        cosine = sums["dot"] / norm if norm else float(sums["wanted"] == sums["got"])
        ratio = _decibels(sums["wanted"], sums["error"])
        figures = [("cosine", cosine, limits["min_cosine"]), ("SQNR in dB", ratio, limits["min_sqnr_db"])]
    if sums["ranked"]:
        # With few samples, a single one that differs would be a larger share than the limit allows.
        limit = limits["min_top1_agreement"] - limits["granted_samples"] / sums["samples"]
        figures.append(("top-1 agreement", sums["agreed"] / sums["ranked"], limit))
    low = ((what, value, limit) for what, value, limit in figures if value < limit)
    return [f"output '{name}': {what} {value:.4f}, least {limit:.4f}" for what, value, limit in low]


def _decibels(signal: float, noise: float) -> float:
    if noise <= 0:
        return _MAX_DB
    return max(-_MAX_DB, min(_MAX_DB, 10 * math.log10(signal / noise))) if signal > 0 else -_MAX_DB


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:3] if part.isdigit())


def main() -> int:
    """Tests the first bundle that opens, and prints why those before it did not open."""
    parser = argparse.ArgumentParser(description="Open and self-test the bundles of this package.")
    parser.add_argument("--only", help="the name of one bundle")
    parser.add_argument("--cpu", action="store_true", help="without the provider")
    parser.add_argument("--plugin", default="", help="the library of the provider, where it is a plug-in")
    arguments = parser.parse_args()
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    for variant in read_variants():
        if arguments.only not in {None, variant["name"]}:
            continue
        folder = find_folder(variant)
        try:
            session = open_session(variant, folder, on_cpu=arguments.cpu, plugin=arguments.plugin)
        except LoaderError as error:
            sys.stdout.write(f"{variant['name']}: not opened: {error}\n")
            continue
        failures = run_self_test(variant, folder, session)
        if failures and variant["precision"] == "int8" and platform.machine().lower() in {"x86_64", "amd64"}:
            failures.append("an x64 CPU without VNNI saturates products of u8 and s8, a phone does not: test there")
        count = variant["samples"] if variant["reference"] == "outputs" else len(variant["chosen"])
        for line in failures or [f"self-test passed with {count} samples"]:
            sys.stdout.write(f"{variant['name']}: {line}\n")
        return 1 if failures else 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
