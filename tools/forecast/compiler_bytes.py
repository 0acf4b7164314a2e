"""Do the bytes that Qualcomm's compiler counts forecast better than the work of the graph alone? In float they do.

    python tools/forecast/compiler_bytes.py make FILE.jsonl [NAME...]    compiles exported networks for SoC 69
    python tools/forecast/compiler_bytes.py judge FILE.jsonl             leaves families out, with the bytes and without

Compiling is enough, nothing runs: with `profiling_level=optrace` the plug-in writes the plan of its graph as text.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import features
import fit
import numpy as np
from scipy.stats import spearmanr

from edgekit._files import work_folder
from edgekit.forecasts.model import read_networks
from edgekit.model.model import load_model
from edgekit.model.tensors import Array
from edgekit.prepare.clean import prepare_model

COUNTS = ("dram_read", "dram_write", "vtcm_read", "vtcm_write")
# One process for each network: QNN keeps state between sessions.
_COMPILE = """
import onnxruntime as ort, onnxruntime_qnn as qnn, os, sys
ort.register_execution_provider_library("QNNExecutionProvider", qnn.get_library_path())
device = [each for each in ort.get_ep_devices() if each.ep_name == "QNNExecutionProvider"][:1]
options = ort.SessionOptions()
options.add_provider_for_devices(device, {"backend_path": qnn.get_qnn_htp_path(), "soc_model": "69",
    "profiling_level": "optrace", "profiling_file_path": sys.argv[2]})
session = ort.InferenceSession(sys.argv[1], options, enable_fallback=False)
del session  # it writes the plan as it goes
os._exit(0)  # the library's threads would keep the process
"""


def count_bytes(name: str) -> dict[str, Any] | None:
    """Returns the bytes that the compiler plans to move in a network, and how many operations it makes of it."""
    with work_folder() as work:
        here = [
            str(features.PYTHON),
            str(features.HERE / "far/export_nets.py"),
            str(features.HERE / "nets.toml"),
            str(work),
        ]
        subprocess.run([*here, name], stdout=subprocess.DEVNULL, check=True)
        exported = work / f"{name.replace('/', '+')}.onnx"
        if not exported.is_file():
            return None
        prepared = prepare_model(load_model(exported), work / "prepared.onnx", {})
        command = [sys.executable, "-c", _COMPILE, str(prepared.path), str(work / "profile.csv")]
        subprocess.run(command, cwd=work, timeout=600, check=False)
        found = [path.read_text(errors="replace") for path in work.rglob("*_schematic.bin")]
    moves = [move for text in found for move in re.findall(r'\{"opid"[^{}]*\}', text)]
    if not moves:
        return None
    sums = {key: sum(int(n) for move in moves for n in re.findall(rf'"{key}"\s*:\s*(\d+)', move)) for key in COUNTS}
    return {"name": name, "ops": len(moves), **sums}


def judge(counted: dict[str, dict[str, Any]]) -> None:
    """Prints what each way reaches on families left out, in float, over all devices' medians."""
    rows = fit.Rows("float", read_networks(fit.FOLDER / "networks.json"))
    effects, _ = fit.polish(rows.logs, rows.devices.index(fit.REFERENCE))
    at = [index for index, name in enumerate(rows.names) if name in counted]
    amounts, wanted, families = rows.amounts[at], effects[at], rows.families[at]
    moved = np.array([[counted[rows.names[index]][key] for key in COUNTS] for index in at], float)
    dram, vtcm = moved[:, :2].sum(1, keepdims=True), moved[:, 2:].sum(1, keepdims=True)
    print(f"{len(at)} networks of {len(set(families))} families")
    ways = {
        "work by kind, as shipped": amounts,
        "work by kind, DRAM and VTCM bytes": np.hstack([amounts, dram, vtcm]),
        "DRAM bytes in place of weights and spill": np.hstack([amounts[:, [0, 1, 2, 3, 4, 7, 8, 9]], dram]),
        "bytes alone": np.hstack([dram, vtcm, amounts[:, [9]]]),
    }
    errors = dict[str, Array]()
    for way, columns in ways.items():
        predicted = np.zeros(len(at))
        for family in set(families):
            out = families == family
            predicted[out] = np.log(np.maximum(columns[out] @ fit.fit(columns[~out], wanted[~out]), 1e-3))
        errors[way] = np.abs(predicted - wanted)
        print(
            f"{way:42s} median {np.exp(np.median(errors[way])) - 1:.1%}, 80 % within "
            f"{fit.ratio(float(np.quantile(errors[way], 0.8)))}, rank {spearmanr(predicted, wanted)[0]:.3f}"
        )
    one, two = (errors[way] for way in list(ways)[:2])
    rng, gains = np.random.default_rng(0), list[float]()
    for _ in range(2000):
        drawn = rng.choice(sorted(set(families)), len(set(families)))
        picked = np.concatenate([np.flatnonzero(families == family) for family in drawn])
        gains.append(float(np.median(one[picked]) - np.median(two[picked])))
    print(f"bytes are the better in {np.mean(np.array(gains) > 0):.0%} of 2,000 draws of families")


def main() -> None:
    """Compiles or judges."""
    place = Path(sys.argv[2])
    known = [json.loads(line) for line in place.read_text().splitlines()] if place.is_file() else []
    if sys.argv[1] == "judge":
        judge({row["name"].replace("+", "/"): row for row in known})
        return
    for name in sys.argv[3:] or read_networks(fit.FOLDER / "networks.json"):
        row = count_bytes(name)
        print(row or f"{name}: the compiler wrote no plan", flush=True)
        if row is not None:
            with place.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
