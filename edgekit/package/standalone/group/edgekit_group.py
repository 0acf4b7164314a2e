"""Runs a group of models from its inputs to its result with ONNX Runtime, as `group.json` says.

    python app/edgekit_group.py [--cpu] [--plugin LIBRARY]

It imports `edgekit_loader.py` and `edgekit_pipeline.py` beside it, numpy and onnxruntime. Run as a program, it says for
how many golden samples the result equals that of the float models; the exit code is 0 if there is at least one.
"""

import argparse
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

# No bytecode may be written beside this file: `edgekit group verify` refuses a group with additional files.
sys.dont_write_bytecode = True
_loader: Any = importlib.import_module("edgekit_loader")
_pipeline: Any = importlib.import_module("edgekit_pipeline")

Tensors = dict[str, Any]
_HERE = Path(__file__).resolve().parent
_KEYS = ("provider", "provider_options", "session_config", "minimum_ort", "inputs")


class Group:
    """The sessions of a group, and its wiring: which output feeds which input."""

    def __init__(self, folder: Path = _HERE.parent, *, on_cpu: bool = False, plugin: str = "") -> None:
        group: dict[str, Any] = json.loads((folder / "group.json").read_bytes())
        self._wiring: dict[str, Any] = group["wiring"]
        self._specs: dict[str, Any] = {}
        self._sessions: dict[str, Any] = {}
        for name, member in group["members"].items():
            manifest = json.loads((folder / "members" / name / "manifest.json").read_bytes())
            variant = {key: manifest[key] for key in _KEYS}
            # `edgekit group verify` checks the digest of every file; only those that are loaded are checked here.
            places = [Path(member["model_file"]).parent / file for file in manifest["forms"][manifest["form"]]]
            names = zip(places, manifest["forms"][manifest["form"]], strict=True)
            files = {place.as_posix(): manifest["files"][file] for place, file in names}
            if len(places) == 1:
                files = {member["model_file"]: next(iter(files.values()))}
            variant |= {"name": name, "model": member["model_file"], "files": files}
            self._specs[name] = {side: {it["name"]: it for it in manifest[side]} for side in ("inputs", "outputs")}
            self._sessions[name] = _loader.open_session(variant, folder, on_cpu=on_cpu, plugin=plugin)

    def run(self, inputs: Tensors) -> Tensors:
        """Returns the result that the wiring chooses, or the outputs of the last stage, for the group's `inputs`."""
        pipeline, outputs = _pipeline.run_sample(self._wiring, self._specs, inputs), None
        while True:
            try:
                member, given = pipeline.send(outputs)
            except StopIteration as end:
                return dict(end.value)
            session = self._sessions[member]
            names = [output.name for output in session.get_outputs()]
            outputs = [dict(zip(names, session.run(names, each), strict=True)) for each in given]


def main() -> int:
    """Runs the golden samples, and says for how many the result equals that of the float models."""
    parser = argparse.ArgumentParser(description="Run the golden samples of this group.")
    parser.add_argument("--cpu", action="store_true", help="without the provider")
    parser.add_argument("--plugin", default="", help="the library of the provider, where it is a plug-in")
    arguments = parser.parse_args()
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        group, golden = Group(on_cpu=arguments.cpu, plugin=arguments.plugin), _HERE.parent / "golden"
    except _loader.LoaderError as error:
        sys.stdout.write(f"not opened: {error}\n")
        return 1
    equal, count = 0, 0
    for inputs, outputs in zip(_rows(golden / "inputs.npz"), _rows(golden / "outputs.npz"), strict=True):
        results, count = group.run(inputs), count + 1
        equal += all(np.array_equal(results[name], value) for name, value in outputs.items())
    sys.stdout.write(f"{equal} of {count} golden samples give exactly what the float models gave\n")
    return 0 if equal else 1


def _rows(file: Path) -> list[Tensors]:
    """Returns the samples in a golden file.

    If the samples of a tensor differ in shape, they are stored flat, one after another, with their shapes in
    `NAME.shapes`.
    """
    with np.load(file, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    columns: dict[str, list[Any]] = {}
    for name, array in arrays.items():
        if f"{name}.shapes" in arrays:
            shapes = arrays[f"{name}.shapes"]
            ends = np.cumsum(shapes.prod(axis=1))
            parts = np.split(array, ends[:-1])
            columns[name] = [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
        elif not name.endswith(".shapes"):
            columns[name] = list(array)
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


if __name__ == "__main__":
    sys.exit(main())
