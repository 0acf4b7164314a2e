"""Runs a group of models from its inputs to its result with ONNX Runtime, as `group.json` says.

    python app/edgekit_group.py [--cpu] [--plugin LIBRARY]

It stands beside `edgekit_loader.py`, on numpy and onnxruntime. Run as a program it says how many golden samples give
what the float models gave; the exit code is 0 if at least one did.
"""

import argparse
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

# Nothing is written beside this file: a group with a file too many is refused.
sys.dont_write_bytecode = True
_loader: Any = importlib.import_module("edgekit_loader")

Tensors = dict[str, Any]
_HERE = Path(__file__).resolve().parent
_KEYS = ("provider", "provider_options", "session_config", "minimum_ort", "inputs")


class Group:
    """The sessions of a group, and what feeds what."""

    def __init__(self, folder: Path = _HERE.parent, *, on_cpu: bool = False, plugin: str = "") -> None:
        self._group: dict[str, Any] = json.loads((folder / "group.json").read_bytes())
        self._wiring, self._tokens = self._group["wiring"], self._group["wiring"]["tokens"]
        self._inputs: dict[str, dict[str, Any]] = {}
        self._outputs: dict[str, dict[str, Any]] = {}
        self._sessions: dict[str, Any] = {}
        # How many tokens each stage with text has read.
        self._read: dict[str, int] = {}
        for name, member in self._group["members"].items():
            manifest = json.loads((folder / "members" / name / "manifest.json").read_bytes())
            variant = {key: manifest[key] for key in _KEYS}
            # `edgekit group verify` holds every file against its digest; here those that are loaded are.
            places = [Path(member["model_file"]).parent / file for file in manifest["forms"][manifest["form"]]]
            names = zip(places, manifest["forms"][manifest["form"]], strict=True)
            files = {place.as_posix(): manifest["files"][file] for place, file in names}
            if len(places) == 1:
                files = {member["model_file"]: next(iter(files.values()))}
            variant |= {"name": name, "model": member["model_file"], "files": files}
            self._inputs[name] = {spec["name"]: spec for spec in manifest["inputs"]}
            self._outputs[name] = {spec["name"]: spec for spec in manifest["outputs"]}
            self._sessions[name] = _loader.open_session(variant, folder, on_cpu=on_cpu, plugin=plugin)

    def run(self, inputs: Tensors) -> Tensors:
        """Returns what was chosen, or the outputs of the last stage; `inputs` are those of the group."""
        made: dict[str, Tensors] = {"data": inputs}
        tokens, self._read = self._begin(inputs), {}
        first, chosen = len(tokens), list[int]()
        for stage in self._wiring["stages"]:
            if stage["crop"]:
                chosen += self._run_boxes(stage, made)
            elif stage["repeat"]:
                self._run_loop(stage, made, tokens, first)
            else:
                made[stage["run"]] = self._run(stage, made, tokens, {})
                self._choose(stage, made[stage["run"]], tokens)
        chosen += tokens[first:]
        if not any(stage["text"] or stage["crop"] for stage in self._wiring["stages"]):
            return made[self._wiring["stages"][-1]["run"]]
        end = self._tokens and self._tokens["end"]
        return {"chosen": np.array(chosen[:-1] if chosen and chosen[-1] == end else chosen, np.int64)}

    def _begin(self, inputs: Tensors) -> list[int]:
        if not self._tokens:
            return []
        start = self._tokens["start"]
        return [int(token) for token in inputs[start.partition(".")[2]].flat] if isinstance(start, str) else [*start]

    def _run_loop(self, stage: dict[str, Any], made: dict[str, Tensors], tokens: list[int], first: int) -> None:
        specs, state = self._inputs[stage["run"]], Tensors()
        room = _find_length(specs, stage["text"]["input"], self._feed(stage, made))
        while len(tokens) - first < self._tokens["most"]:
            is_full = stage["text"]["align"] != "right" and room is not None and len(tokens) > room
            if is_full or (len(tokens) > first and tokens[-1] == self._tokens["end"]):
                return
            given = self._fill(stage, made, tokens, state)
            outputs = self._call(stage["run"], given)
            self._choose(stage, outputs, tokens)
            state = {
                name: _feed_back(specs[name]["shape"], given[name], outputs[output])
                for name, output in stage["state"].items()
            }

    def _run(self, stage: dict[str, Any], made: dict[str, Tensors], tokens: list[int], more: Tensors) -> Tensors:
        return self._call(stage["run"], {**self._fill(stage, made, tokens, {}), **more})

    def _call(self, member: str, inputs: Tensors) -> Tensors:
        names = [output.name for output in self._sessions[member].get_outputs()]
        return dict(zip(names, self._sessions[member].run(names, inputs), strict=True))

    def _fill(self, stage: dict[str, Any], made: dict[str, Tensors], tokens: list[int], state: Tensors) -> Tensors:
        inputs = {**self._feed(stage, made), **state}
        return {**inputs, **self._fill_text(stage, tokens, inputs)} if stage["text"] else inputs

    def _feed(self, stage: dict[str, Any], made: dict[str, Tensors]) -> Tensors:
        """Returns the inputs that sources fill, and the state as it begins."""
        specs = self._inputs[stage["run"]]
        inputs = {name: _read(source, made) for name, source in stage["feeds"].items()}
        for name in stage["state"]:
            # One sample, whose open dimensions hold nothing yet.
            sizes = [size if isinstance(size, int) else int(not axis) for axis, size in enumerate(specs[name]["shape"])]
            zeros = np.zeros(sizes, specs[name]["dtype"])
            inputs[name] = _feed_back(specs[name]["shape"], zeros, inputs.get(name, zeros))
        return inputs

    def _fill_text(self, stage: dict[str, Any], tokens: list[int], given: Tensors) -> Tensors:
        text, specs = stage["text"], self._inputs[stage["run"]]
        is_right, length = text["align"] == "right", _find_length(specs, text["input"], given)
        # An open input takes what is new; one of a fixed size is filled up, or takes the newest.
        window = (
            tokens[-length:]
            if length and is_right
            else tokens[:length]
            if length
            else tokens[self._count_read(stage) :]
        )
        size = length or len(window)
        first = len(tokens) - len(window) if is_right else 0
        inputs = {text["input"]: _place(specs[text["input"]], window, size, self._tokens["pad"], is_right=is_right)}
        if text["positions"]:
            counted = [*range(first, first + len(window))]
            inputs[text["positions"]] = _place(specs[text["positions"]], counted, size, 0, is_right=is_right)
        if text["mask"]:
            held = self._count_held(stage, given, len(tokens) - size)
            most = _find_length(specs, text["mask"], given) or held + size
            ones = [1] * min(len(tokens), most)
            inputs[text["mask"]] = _place(specs[text["mask"]], ones, most, 0, is_right=is_right)
        return inputs

    def _count_read(self, stage: dict[str, Any]) -> int:
        """Returns how many tokens the state of a stage holds: those that it read, or that who began its state did."""
        if not stage["state"]:
            return 0
        sources = [stage["feeds"][name].partition(".")[0] for name in stage["state"] if name in stage["feeds"]]
        return self._read.get(stage["run"]) or max((self._read.get(source, 0) for source in sources), default=0)

    def _count_held(self, stage: dict[str, Any], given: Tensors, default: int) -> int:
        """Returns the rows in the state of a stage, on the axis on which it grows."""
        specs, made = self._inputs[stage["run"]], self._outputs[stage["run"]]
        for name, output in stage["state"].items():
            for axis, (size, new) in enumerate(zip(specs[name]["shape"], made[output]["shape"], strict=False)):
                if axis and not isinstance(size, int) and size != new:
                    return int(given[name].shape[axis])
        return default

    def _choose(self, stage: dict[str, Any], outputs: Tensors, tokens: list[int]) -> None:
        if stage["text"]:
            self._read[stage["run"]] = len(tokens)
            scores = outputs[stage["text"]["scores"]]
            rows = scores.reshape(-1, scores.shape[-1])
            is_last = stage["text"]["align"] == "right" or len(rows) == 1
            tokens.append(int(rows[-1 if is_last else min(len(tokens), len(rows)) - 1].argmax()))

    def _run_boxes(self, stage: dict[str, Any], made: dict[str, Tensors]) -> list[int]:
        crop, chosen = stage["crop"], list[int]()
        spec = self._inputs[stage["run"]][crop["input"]]
        image, boxes, scores = (_read(crop[role], made) for role in ("image", "boxes", "scores"))
        for box in _best_boxes(crop, image, boxes, scores):
            picture = _resize(image.astype(np.float64), box, spec["shape"][2:]).astype(spec["dtype"])
            result = self._run(stage, made, [], {crop["input"]: picture})[crop["result"]]
            chosen.append(int(result.reshape(-1, result.shape[-1])[-1].argmax()))
        return chosen


def _read(source: str, made: dict[str, Tensors]) -> Any:
    member, _, tensor = source.partition(".")
    return made[member][tensor]


def _feed_back(shape: list[Any], held: Any, output: Any) -> Any:
    """Returns the input of the next run; on an open axis the output counts as it is."""
    pairs = zip(shape, output.shape, strict=True)
    return _loader.feed_back([size if isinstance(size, int) else made for size, made in pairs], held, output)


def _find_length(specs: dict[str, Any], name: str, given: Tensors) -> int | None:
    """Returns how many tokens an input takes, None where any number: its own size, or that of its name elsewhere."""
    size = specs[name]["shape"][-1]
    if not isinstance(size, str):
        return size if size is None else int(size)
    for other, value in given.items():
        if size in specs[other]["shape"]:
            return int(value.shape[specs[other]["shape"].index(size)])
    return None


def _place(spec: dict[str, Any], values: list[int], length: int, pad: int, *, is_right: bool) -> Any:
    sizes = [size if isinstance(size, int) else 1 for size in spec["shape"][:-1]]
    array = np.full([*sizes, length], pad, spec["dtype"])
    array[..., slice(length - len(values), length) if is_right else slice(0, len(values))] = values
    return array


def _best_boxes(crop: dict[str, Any], image: Any, boxes: Any, scores: Any) -> list[Any]:
    """Returns the best boxes in pixels, from left to right."""
    height, width = image.shape[2:]
    corners, ranked = boxes.reshape(-1, 4), scores.reshape(-1)
    if crop["units"] == "shares":
        corners = corners * np.array([width, height, width, height])
    order = [place for place in np.argsort(-ranked, kind="stable") if ranked[place] >= crop["least"]]
    found = [corners[place].astype(np.float64) for place in order]
    whole = [box for box in found if np.isfinite(box).all() and box[2] > box[0] and box[3] > box[1]]
    return sorted(whole[: crop["most"]], key=tuple)


def _resize(image: Any, box: Any, size: list[int]) -> Any:
    """Returns a box resized: bilinear, half-pixel centres."""
    for axis, low, high in ((2, box[1], box[3]), (3, box[0], box[2])):
        count, last = size[axis - 2], image.shape[axis] - 1
        places = np.clip(low + (np.arange(count) + 0.5) * (high - low) / count - 0.5, 0, last)
        below = np.floor(places).astype(np.int64)
        share = (places - below).reshape([-1 if each == axis else 1 for each in range(4)])
        image = image.take(below, axis) * (1 - share) + image.take(np.minimum(below + 1, last), axis) * share
    return image


def main() -> int:
    """Runs the golden samples, and says how many give what the float models gave."""
    parser = argparse.ArgumentParser(description="Run the golden samples of this group.")
    parser.add_argument("--cpu", action="store_true", help="without the provider")
    parser.add_argument("--plugin", default="", help="the library of the provider, where it is a plug-in")
    given = parser.parse_args()
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        group, golden = Group(on_cpu=given.cpu, plugin=given.plugin), _HERE.parent / "golden"
    except _loader.LoaderError as error:
        sys.stdout.write(f"not opened: {error}\n")
        return 1
    equal, count = 0, 0
    wanted = _rows(golden / "outputs.npz")
    for inputs, outputs in zip(_rows(golden / "inputs.npz"), wanted, strict=True):
        results, count = group.run(inputs), count + 1
        equal += all(np.array_equal(results[name], value) for name, value in outputs.items())
    sys.stdout.write(f"{equal} of {count} golden samples give exactly what the float models gave\n")
    return 0 if equal else 1


def _rows(file: Path) -> list[Tensors]:
    """Returns the samples in a golden file; an array whose rows differ in shape has them one after another."""
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
