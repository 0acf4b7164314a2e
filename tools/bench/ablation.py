"""Quantizes networks with some of edgekit replaced in memory, and scores the plans on samples that they have not seen.

    python tools/bench/ablation.py NETWORK... --target qnn [--precision w4a16] [--replace MODULE.NAME=LITERAL]...

NETWORK is one of `held_out_models.py` (`unet`, or `unet:31` with other weights), or a model of ../shared/zoo with
labels. A replacement is a constant, such as `mixed_precision.relief._RANKED=(160,)`, or what a function returns, such
as `equalize.choose_factors()={}`; MODULE is below edgekit.quantize. Each network is planned with and
without all replacements, and two lines say: digest and bytes of the file, the ratio of its outputs to those of the
float model, the score of the task if there are labels, the drop that is told, and the CPU seconds of planning.
"""

import argparse
import ast
import hashlib
import importlib
import sys
import tempfile
from collections.abc import Iterable
from multiprocessing import Process
from pathlib import Path
from time import process_time
from types import ModuleType
from typing import Any
from unittest.mock import patch

import held_out_models
import msgspec
import numpy as np
from quantize_zoo import read_scored, score
from zoo_tasks import TASKS, ZooTask, load_task, require_zoo, write_calibration

import edgekit.jobs.quantize as job
from edgekit._ort import CpuSession, SessionSettings
from edgekit.data.samples import Samples
from edgekit.model.model import Model, load_model
from edgekit.model.tensors import Tensors
from edgekit.prepare import prepare_model
from edgekit.quantize.accuracy.loss import join_ratios, measure_powers, ratio_db
from edgekit.recipe import Data, Recipe

_PLANNED, _SCORED = 64, 300


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """A float model with fixed sizes, the file of samples for its plan, other samples, and its task in the zoo."""

    model: Model
    data: Path
    others: list[Tensors]
    task: ZooTask | None = None


def open_subject(name: str, work: Path) -> Subject:
    """Returns a network by its name, written into the folder `work`."""
    data = work / "data.npz"
    if name in TASKS:
        require_zoo()
        task = load_task(name)
        write_calibration(task, data)
        model = prepare_model(load_model(task.model), work / "model.onnx", task.dims)
        return Subject(model=model, data=data, others=list(read_scored(task, model)), task=task)
    kind, _, seed = name.partition(":")
    plain: Any = vars(held_out_models)["_Net"]
    with patch.object(held_out_models, "_Net", lambda own: plain(int(seed) if seed else own)):
        model = held_out_models.MODELS[kind](work / "model.onnx")
    planned: Samples = held_out_models.draw_inputs(model, _PLANNED, 1)
    rows = list(planned)
    arrays: dict[str, Any] = {key: np.stack([row[key] for row in rows]) for key in rows[0]}
    np.savez(data, **arrays)
    return Subject(model=model, data=data, others=list(held_out_models.draw_inputs(model, _SCORED, 2)))


def list_places(replacement: str) -> tuple[list[tuple[ModuleType, str]], object]:
    """Returns every module of edgekit that holds a name, and the new value."""
    place, _, literal = replacement.partition("=")
    module, _, name = place.removesuffix("()").rpartition(".")
    old, value = getattr(importlib.import_module(f"edgekit.quantize.{module}"), name), ast.literal_eval(literal)
    new = (lambda *_args, **_options: value) if place.endswith("()") else value
    holders = [each for key, each in list(sys.modules.items()) if key.split(".", 1)[0] == "edgekit"]
    return [(each, name) for each in holders if getattr(each, name, None) is old], new


def describe_plan(subject: Subject, recipe: Recipe, out: Path) -> str:
    """Returns in a line what the written plan gives."""
    began = process_time()
    report = job.quantize_for(subject.model.path, Data(source=str(subject.data)), out, recipe)
    seconds = process_time() - began
    one, two = (CpuSession(path, SessionSettings()) for path in (subject.model.path, out))
    powers: dict[str, list[Any]] = {}
    rows: list[Tensors] = []
    for sample in subject.others:
        expected, found = one.run(sample), two.run(sample)
        for key, value in expected.items():
            powers.setdefault(key, []).append(measure_powers(value, found[key]))
        rows.append(subject.task.decode(found) if subject.task and subject.task.decode else found)
    ratio = join_ratios([ratio_db(*np.sum(each, axis=0)) for each in powers.values()])
    digest, told = hashlib.sha256(out.read_bytes()).hexdigest()[:12], report.predicted.drop_estimate
    figures = f"{digest} {out.stat().st_size} bytes, {ratio:.2f} dB"
    figures += f", score {100 * score(subject.task, rows):.2f}" if subject.task and not subject.task.stream else ""
    figures += "" if told is None else f", told {100 * told:.2f}"
    return f"{figures}, {seconds:.1f} CPU s; {', '.join(trial.step for trial in report.trials)}"


def compare(name: str, recipe: Recipe, replacements: Iterable[str]) -> None:
    """Prints both lines of a network."""
    with tempfile.TemporaryDirectory() as folder:
        subject = open_subject(name, Path(folder))
        print(f"{name} {recipe.targets[0]}: {describe_plan(subject, recipe, Path(folder) / 'as_is.onnx')}", flush=True)
        for replacement in replacements:
            places, new = list_places(replacement)
            for module, attribute in places:
                setattr(module, attribute, new)
        print(f"  replaced: {describe_plan(subject, recipe, Path(folder) / 'replaced.onnx')}", flush=True)


def main() -> int:
    """Compares the networks that are named, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="+")
    parser.add_argument("--target", default="qnn")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--replace", action="append", default=[], metavar="MODULE.NAME=EXPRESSION")
    args = parser.parse_args()
    recipe = Recipe(targets=(args.target,), precision=args.precision)
    for name in args.networks:
        # Replaced attributes stay replaced.
        process = Process(target=compare, args=(name, recipe, args.replace))
        process.start()
        process.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
