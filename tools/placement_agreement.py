"""Compares the placement that `edgekit check` predicts with that of a real provider, node by node.

    python tools/placement_agreement.py --target qnn --source real --source quantized --work DIR [--set soc_model=36]
    python tools/placement_agreement.py --target nnapi --source node --known --work DIR --set api_level=31

    python tools/placement_agreement.py --target coreml --source node --work DIR --set model_format=NeuralNetwork
    python tools/placement_agreement.py --target coreml --source generated --work DIR --option MLComputeUnits=CPUOnly

    python tools/placement_agreement.py --target nnapi --shipped BUNDLES --shipped MORE_BUNDLES --work DIR

QNN is asked through the plug-in provider of onnxruntime-qnn, with one child process for each model; XNNPACK and NNAPI
in Android's own library of ONNX Runtime (`edgekit devices install android`), in its build for x86-64, which places
nodes in the same way; Core ML in the library for the iOS simulator (`edgekit devices install ios-sim`); OpenVINO and
WebGPU through their plug-ins on this machine.

With --shipped the tool examines the files that `build` wrote for the target (quantized, fp16, mixed) in all bundles
below a folder, such as those of `make bench GROUP=corpus`, each with its own target's settings. Models and observations
stay in DIR, so that a second run is quick.

Agreement counts the nodes of models for which a session could be created. A DQ is counted apart if the layout change
gave its name to a DQ at another place: the provider then took a DQ of that name, but not the reader of the model's DQ.
Sessions that fail are counted apart too, and compared with the nodes that check calls fatal; so are sessions whose
results check calls wrong. With --known only models with an operator of rules.toml are examined: which models these are
does not depend on a target's settings.
"""

import argparse
import json
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import onnx
from placement_models import SEEDS, write_models

from edgekit._files import work_folder
from edgekit._ort import CPU_PROVIDER
from edgekit._proc import run_process
from edgekit.bundle.folder import Bundle, open_bundle, read_target
from edgekit.check.check import check_model
from edgekit.check.report import CheckReport
from edgekit.devices.device import Device
from edgekit.devices.find import find_device
from edgekit.devices.observe import ObservedPlacement, match_nodes, name_as_model, observe_placement
from edgekit.errors import EdgekitError
from edgekit.graph.graph import Graph, read_graph
from edgekit.model.model import load_model
from edgekit.target import Target, load_target

_TIMEOUT_S = 120.0
# The share of nodes that must agree.
_MIN_AGREEMENT_SHIPPED = 0.999
_MIN_AGREEMENT = {"coreml": 0.998, "nnapi": 0.998, "openvino": 0.995, "qnn": 0.99, "webgpu": 0.995, "xnnpack": 0.998}
# The device that asks the provider of a target in its own child process.
_DEVICES = {"coreml": "ios-sim", "openvino": "openvino", "webgpu": "webgpu"}
_QNN = "QNNExecutionProvider"


class Disagreement(msgspec.Struct, frozen=True, kw_only=True):
    """A node that check and the provider place differently."""

    model: str
    name: str
    op: str
    predicted: bool
    why: str


class Tally(msgspec.Struct, kw_only=True):
    """Sums over all models."""

    models: int = 0
    nodes: Counter[str] = msgspec.field(default_factory=Counter)
    agreed: Counter[str] = msgspec.field(default_factory=Counter)
    disagreements: list[Disagreement] = []
    moved: int = 0
    sessions: Counter[str] = msgspec.field(default_factory=Counter)
    unpredicted_failures: list[str] = []
    verdicts: Counter[str] = msgspec.field(default_factory=Counter)
    false_yes: list[str] = []


def main() -> int:
    """Prints the agreement; returns 0 if enough nodes agree and no model judged "yes" is split or refused."""
    options = _parse_options()
    if options.observe:
        print(json.dumps(_place_on_qnn(options.observe, options.soc)))
        return 0
    target = load_target(options.target, dict(pair.split("=", 1) for pair in options.set))
    target = _give_options(target, dict(pair.split("=", 1) for pair in options.option))
    tally = Tally()
    for path in write_models(options.source, options.work / "models", range(*options.seeds)):
        if not options.known or _has_known_operator(path, target):
            _measure(path, target, options.work, tally)
    for bundle in _find_shipped(options.shipped, options.target):
        model = bundle.folder / bundle.manifest.forms["onnx"][0]
        # Bundles of several builds have the same names.
        name = f"{bundle.folder.parent.name}-{bundle.folder.name}"
        _measure(model, load_target(options.target, read_target(bundle).settings), options.work, tally, name)
    return _print_tally(tally, _MIN_AGREEMENT_SHIPPED if options.shipped else _MIN_AGREEMENT[target.name])


def _find_shipped(folders: list[Path], target: str) -> Iterator[Bundle]:
    """Yields the bundles of a target, below some folders, that contain an ONNX file of the model."""
    for folder in folders:
        for file in sorted(folder.rglob(f"*-{target}/manifest.json")):
            bundle = open_bundle(file.parent)
            if "onnx" in bundle.manifest.forms:
                yield bundle


def _measure(path: Path, target: Target, work: Path, tally: Tally, name: str = "") -> None:
    seen = _observe(path, target, work, name or path.stem)
    model = load_model(path)
    report = check_model(model, target if target.name == "qnn" else _find_device(target).as_seen(target))
    _compare(msgspec.structs.replace(report, model=name or report.model), seen, tally, read_graph(model))


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=sorted(_MIN_AGREEMENT), default="qnn")
    parser.add_argument("--source", action="append", choices=["generated", "node", "quantized", "real"], default=[])
    parser.add_argument("--shipped", action="append", type=Path, default=[], metavar="DIR", help="bundles lie below it")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="of the provider")
    parser.add_argument("--seeds", nargs=2, type=int, default=(SEEDS.start, SEEDS.stop), metavar=("FROM", "TO"))
    parser.add_argument("--work", type=Path, default=Path("placement"))
    parser.add_argument("--known", action="store_true", help="only models with an operator that the rules know")
    parser.add_argument("--observe", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--soc", help=argparse.SUPPRESS)
    return parser.parse_args()


def _give_options(target: Target, options: dict[str, str]) -> Target:
    """Returns the target with other options of its provider, for the rules and for the session."""
    session = target.session
    platforms = {
        name: msgspec.structs.replace(platform, provider_options={**platform.provider_options, **options})
        for name, platform in session.platforms.items()
    }
    changed = {**session.provider_options, **options}
    return msgspec.structs.replace(
        target, session=msgspec.structs.replace(session, provider_options=changed, platforms=platforms)
    )


def _has_known_operator(path: Path, target: Target) -> bool:
    rules = tomllib.loads((target.folder / "rules.toml").read_text())
    known = {kind for entry in rules["op"] for kind in entry["types"]} - {"QuantizeLinear", "DequantizeLinear"}
    return any(node.op_type in known for node in onnx.load(str(path), load_external_data=False).graph.node)


def _observe(path: Path, target: Target, work: Path, name: str) -> ObservedPlacement:
    settings = "-".join((*target.settings.values(), *target.session.provider_options.values())) or "default"
    kept = work / "observed" / f"{target.name}-{settings}" / path.parent.name / f"{name}.json"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        seen = observe_qnn(path, target) if target.name == "qnn" else observe_release(path, target)
        kept.write_bytes(msgspec.json.encode(seen))
    return msgspec.json.decode(kept.read_bytes(), type=ObservedPlacement)


def observe_qnn(path: Path, target: Target) -> ObservedPlacement:
    """Returns the placement of each node by the plug-in provider, asked in a child process."""
    argv = [sys.executable, __file__, "--observe", str(path), "--soc", target.settings["soc_model"]]
    finished = run_process(argv, timeout_s=_TIMEOUT_S)
    if not finished.succeeded:
        return ObservedPlacement(providers={}, failure=finished.ending)
    return msgspec.json.decode(finished.stdout.strip().splitlines()[-1], type=ObservedPlacement)


def _place_on_qnn(path: Path, soc: str) -> dict[str, Any]:
    import onnxruntime  # noqa: PLC0415 - only the child process loads the provider
    import onnxruntime_qnn  # noqa: PLC0415 - an optional extra

    ort: Any = onnxruntime
    ort.register_execution_provider_library(_QNN, onnxruntime_qnn.get_library_path())
    device = next(device for device in ort.get_ep_devices() if device.ep_name == _QNN)
    names = {node.name for node in read_graph(load_model(path)).nodes}
    with work_folder() as trace:
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        settings = {
            "backend_path": onnxruntime_qnn.get_qnn_htp_path(),
            "soc_model": soc,
            "offload_graph_io_quantization": "0",
            "enable_framework_op_trace": "1",
            "framework_op_trace_dir": str(trace),
        }
        options.add_provider_for_devices([device], settings)
        try:
            session = ort.InferenceSession(str(path), options, enable_fallback=False)
        except Exception as error:  # noqa: BLE001 - ONNX Runtime's exceptions share no base, and each is a finding
            return {"providers": {}, "failure": str(error).strip().splitlines()[0][:300]}
        graphs = session.get_provider_graph_assignment_info()
        assigned = {node.name: graph.ep_name for graph in graphs for node in graph.get_nodes()}
        file = trace / "qnn_op_trace.json"
        refused = json.loads(file.read_bytes())["unsupported_nodes"] if file.exists() else []
    return {
        "providers": name_as_model(assigned, names),
        "reasons": {node["node_name"]: node["reason"] for node in refused},
        "partitions": sum(graph.ep_name == _QNN for graph in graphs),
    }


def _find_device(target: Target) -> Device:
    return find_device(_DEVICES.get(target.name, "android:x86_64"), target)


def observe_release(path: Path, target: Target) -> ObservedPlacement:
    """Returns the placement of each node by the provider in a library for phones, or in a wheel for this machine."""
    device = _find_device(target)
    try:
        return observe_placement(load_model(path), target, device, samples=0)
    except EdgekitError as error:
        return ObservedPlacement(providers={}, failure=error.message)


def _compare(report: CheckReport, seen: ObservedPlacement, tally: Tally, graph: Graph) -> None:
    tally.models += 1
    tally.verdicts[report.verdict] += 1
    if report.verdict == "yes" and (what := _find_false_yes(report, seen)):
        tally.false_yes.append(f"{report.model}: {what}")
    if seen.failure is not None and not seen.providers:
        kind = "failed as predicted" if report.is_refused else "failed at a named risk" if report.risks else "failed"
        tally.sessions[kind] += 1
        if kind == "failed":
            tally.unpredicted_failures.append(f"{report.model}: {seen.failure}")
        return
    # Such a model must not ship, though the provider takes its nodes.
    if any(node.fatal and "results are wrong" in "; ".join(node.reasons) for node in report.node_list):
        tally.sessions["made, with results that check calls wrong"] += 1
        return
    tally.sessions["refused in prediction only" if report.is_refused else "made"] += 1
    for node, taken in match_nodes(report, seen.providers):
        if taken and not node.taken and node.op == "DequantizeLinear" and _is_moved(node.name, graph, seen):
            tally.moved += 1
            continue
        tally.nodes[node.op] += 1
        tally.agreed[node.op] += taken == node.taken
        if taken != node.taken:
            why = seen.reasons.get(node.name, "") if node.taken else "; ".join(node.reasons)
            tally.disagreements.append(
                Disagreement(model=report.model, name=node.name, op=node.op, predicted=node.taken, why=why)
            )


def _is_moved(name: str, graph: Graph, seen: ObservedPlacement) -> bool:
    """Returns True for a DQ that feeds only nodes on the CPU: it has another name in the session."""
    node = next(node for node in graph.nodes if node.name == name)
    readers = graph.consumers.get(node.output[0], ())
    return bool(readers) and all(seen.providers.get(reader.name) == CPU_PROVIDER for reader in readers)


def _find_false_yes(report: CheckReport, seen: ObservedPlacement) -> str:
    """Returns how the provider splits or refuses a model; empty if it does neither."""
    if seen.failure is not None:
        return f"refused: {seen.failure}"
    if report.wants_whole and (seen.partitions or 1) > 1:
        return f"split in {seen.partitions}"
    left = [node.name for node, taken in match_nodes(report, seen.providers) if not taken]
    return f"{len(left)} nodes left, such as {left[0]}" if report.wants_whole and left else ""


def _print_tally(tally: Tally, minimum: float) -> int:
    for line in _lines(tally):
        print(line)
    return 0 if tally.agreed.total() >= minimum * tally.nodes.total() and not tally.false_yes else 1


def _lines(tally: Tally) -> Iterator[str]:
    for op, nodes in sorted(tally.nodes.items()):
        yield f"{op:28} {tally.agreed[op]:6} of {nodes:6}  {tally.agreed[op] / nodes:8.2%}"
    yield ""
    for found in tally.disagreements:
        side = "predicted taken, was not" if found.predicted else "predicted not taken, was"
        yield f"{found.model}: {found.op} '{found.name[:60]}' {side}: {found.why[:160]}"
    for failure in tally.unpredicted_failures:
        yield f"session failed, not predicted: {failure[:200]}"
    for false_yes in tally.false_yes:
        yield f"judged yes, but {false_yes[:200]}"
    total, agreed = tally.nodes.total(), tally.agreed.total()
    yield f"\n{tally.models} models; sessions: " + ", ".join(
        f"{count} {kind}" for kind, count in tally.sessions.items()
    )
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(tally.verdicts.items()))
    yield f"verdicts: {verdicts}; {len(tally.false_yes)} judged yes are split or refused"
    yield f"{agreed} of {total} nodes agree: {agreed / max(total, 1):.2%}" + (
        f"; {tally.moved} DQ nodes elsewhere under their name" * bool(tally.moved)
    )


if __name__ == "__main__":
    sys.exit(main())
