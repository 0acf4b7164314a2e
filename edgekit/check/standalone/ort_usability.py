# ruff: noqa: INP001 - a program, not part of the package
"""Asks ONNX Runtime's own mobile usability checker about a model: `python ort_usability.py MODEL`.

It runs in a child process because the checker dies of some valid models. The last line on stdout is a JSON list: the
verdict for each provider as the model is, and what it counted.
"""

import importlib
import json
import logging
import sys
from pathlib import Path
from typing import Any

Json = dict[str, Any]
_CORE_ML = {
    "coreml_supported_neuralnetwork_ops.md": "CoreML NeuralNetwork",
    "coreml_supported_mlprogram_ops.md": "CoreML MLProgram",
}


def main() -> int:
    """Prints what the checker says of the model given as the only argument."""
    checker: Any = importlib.import_module("onnxruntime.tools.mobile_helpers.usability_checker")
    found: dict[str, Json] = {}
    ask_nnapi, ask_core_ml = checker.check_nnapi_partitions, checker.check_coreml_partitions

    # The checker only logs what it counted; the two functions that count are wrapped to keep their results.
    checker.check_nnapi_partitions = lambda model, fixed: _keep(found, "NNAPI", ask_nnapi(model, fixed), fixed=fixed)
    checker.check_coreml_partitions = lambda model, fixed, config: _keep(
        found, _CORE_ML[config], ask_core_ml(model, fixed, config), fixed=fixed
    )
    logger = logging.getLogger("quiet")
    logger.setLevel(logging.CRITICAL)
    checker.analyze_model(Path(sys.argv[1]), logger=logger)
    print(json.dumps(list(found.values())))  # noqa: T201 - how this program answers
    return 0


def _keep(found: dict[str, Json], provider: str, info: Any, *, fixed: bool) -> Any:
    # It asks twice: of the model as it is, where it refuses each dynamic shape, and as if all shapes were fixed.
    if fixed:
        found[provider] = {
            "provider": provider,
            "verdict": info.suitability().name.lower(),
            "nodes": info.num_nodes,
            "taken": info.num_supported_nodes,
            "partitions": info.num_partitions,
            "unknown_ops": sorted(op.removeprefix("ai.onnx:") for op in info.unsupported_ops),
            "dynamic_nodes": info.nodes_unsupported_due_to_dynamic_input,
        }
    return info


if __name__ == "__main__":
    sys.exit(main())
