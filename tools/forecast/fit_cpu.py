"""Fits a sum over kinds of work to the times of the corpus on this machine's CPU: targets/forecast/cpu.json.

    python tools/forecast/fit_cpu.py FILE.jsonl      times the networks that are not in FILE yet, then fits and writes

The networks are those of `tools/corpus/corpus.py make`, in float, with a batch of one, on one thread. A time is the
least CPU time of three, because other programs hardly lengthen CPU time. Machines differ by a factor, which one
measured time on a machine gives.
"""

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import fit
import numpy as np
import onnxruntime as ort

from edgekit._files import work_folder
from edgekit.errors import EdgekitError
from edgekit.forecasts.features import join_graph, list_amounts, measure_work
from edgekit.graph.inference import infer_model
from edgekit.machine import cache_folder
from edgekit.model.external import skim_model
from edgekit.model.model import load_model
from edgekit.prepare.clean import sketch_model

# Below this, a time is only the session's own cost.
_LEAST_MACS = 1e6
_MOST_BYTES = 120e6


def time_network(path: Path) -> dict[str, Any] | None:
    """Returns the milliseconds of a network and its work; None if an input is not an image of one size."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    inputs = session.get_inputs()
    if any(each.type != "tensor(float)" or not all(isinstance(n, int) for n in each.shape[1:]) for each in inputs):
        return None
    rng = np.random.default_rng(0)
    feeds = {each.name: rng.normal(size=[1, *each.shape[1:]]).astype(np.float32) for each in inputs}
    times = list[float]()
    for _ in range(4):
        start = time.process_time()
        session.run(None, feeds)
        times.append(1e3 * (time.process_time() - start))
    batch = {each.shape[0]: 1 for each in inputs if isinstance(each.shape[0], str)}
    with work_folder() as work:
        sketch = sketch_model(load_model(path), work / "sketch.onnx", batch)
        counted = measure_work(join_graph(infer_model(skim_model(sketch.path))))
    return {"ms": min(times[1:]), "macs": counted.macs, "kinds": counted.kinds}


def main() -> None:
    """Measures, evaluates on left-out families, and writes."""
    place = Path(sys.argv[1])
    known = {row["name"]: row for row in map(json.loads, place.read_text().splitlines())} if place.is_file() else {}
    for folder in sorted((cache_folder() / "corpus/nets").iterdir()):
        file = folder / "model.onnx"
        # The graph of another exporter is the same network.
        left = folder.name in known or folder.name.endswith("-dynamo") or "timm-test_" in folder.name
        if left or not file.is_file() or file.stat().st_size > _MOST_BYTES:
            continue
        try:
            row = time_network(file)
        except EdgekitError as error:
            print(f"{folder.name}: {error}")
            continue
        if row is not None:
            known[folder.name] = {"name": folder.name, **row}
            with place.open("a") as out:
                out.write(json.dumps(known[folder.name]) + "\n")
    rows = [row for row in known.values() if row["macs"] >= _LEAST_MACS]
    # "timm-resnet10t-torchscript" is of the family "resnet".
    families = np.array([re.findall("[a-z]+", row["name"].partition("-")[2] or row["name"])[0] for row in rows])
    amounts, logs = np.array([list_amounts(row["kinds"]) for row in rows]), np.log([row["ms"] for row in rows])
    errors = list[float]()
    for family in sorted(set(families)):
        out = families == family
        off = logs - np.log(np.maximum(amounts @ fit.fit(amounts[~out], logs[~out]), 1e-6))
        errors += list((off[out][:, None] - off[~out][None]).ravel())
    low, high = np.quantile(errors, [0.1, 0.9])
    print(
        f"{len(rows)} networks of {len(set(families))} families, each forecast from the time of one of another family: "
        f"median {np.exp(np.median(np.abs(errors))) - 1:.1%}, 80 % between {fit.ratio(low)} and {fit.ratio(high)}"
    )
    written = {
        "coefficients": [float(f"{value:.4g}") for value in fit.fit(amounts, logs)],
        "low": round(float(low), 4),
        "high": round(float(high), 4),
    }
    (fit.FOLDER / "cpu.json").write_text(json.dumps(written) + "\n")


if __name__ == "__main__":
    main()
