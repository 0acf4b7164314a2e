"""Exports the networks of nets.toml and keeps their work by kind, in targets/forecast/networks.json.

    python tools/forecast/features.py [NAME...]

Needs the Python of the corpus (`tools/corpus/corpus.py make`). An export is deleted as soon as its work is counted; of
the graphs, without weights, those stay that lie in ~/.cache/edgekit/forecast.
"""

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import onnx

from edgekit._files import work_folder
from edgekit.devices.process.files import cache_folder
from edgekit.errors import EdgekitError
from edgekit.forecasts.features import join_graph, measure_work
from edgekit.graph.inference import infer_model
from edgekit.model.external import skim_model
from edgekit.model.model import load_model
from edgekit.prepare.clean import sketch_model

HERE = Path(__file__).parent
OUT = HERE.parent.parent / "targets" / "forecast" / "networks.json"
PYTHON = Path.home() / ".cache/edgekit/corpus/venv/bin/python"
KEPT = cache_folder() / "forecast"


def find_graph(name: str) -> Path | None:
    """Returns the file of a network's prepared graph without weights: as it was kept, or exported now."""
    file = f"{name.replace('/', '+')}.onnx"
    if (KEPT / file).is_file():
        return KEPT / file
    KEPT.mkdir(parents=True, exist_ok=True)
    with work_folder() as work:
        command = [str(PYTHON), str(HERE / "far" / "export_nets.py"), str(HERE / "nets.toml"), str(work), name]
        said = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)
        if "failure" in said:
            print(f"{name}: {said['failure']}")
            return None
        try:
            sketch = sketch_model(load_model(work / file), work / "sketch.onnx", {})
        except EdgekitError as error:
            print(f"{name}: {error}")
            return None
        (KEPT / file).write_bytes(infer_model(skim_model(sketch.path)).SerializeToString())
    return KEPT / file


def main() -> None:
    """Counts the networks that are named, or all."""
    specs = tomllib.loads((HERE / "nets.toml").read_text())
    known: dict[str, Any] = json.loads(OUT.read_text()) if OUT.is_file() else {}
    for name in sys.argv[1:] or specs:
        graph = find_graph(name)
        if graph is None:
            continue
        work = measure_work(join_graph(onnx.load(graph, load_external_data=False)))
        kinds = {kind: round(amount) for kind, amount in work.kinds.items()}
        known[name] = {"family": specs[name]["family"], "macs": work.macs, "kinds": kinds}
        print(f"{name}: {work.macs / 1e9:.2f} GMAC, {kinds['nodes']} nodes", flush=True)
    lines = (f'  "{name}": {json.dumps(known[name])}' for name in sorted(known) if name in specs)
    OUT.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
