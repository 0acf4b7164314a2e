"""Compiles one ONNX model into a QNN context model; a standalone program, started with one JSON argument.

The argument holds `model`, `out`, `provider_options`, `config`, and `embed`, which puts the context inside the ONNX
file. With `load` the context `out` is loaded instead, as a device would do. On success one JSON object on the last line
of stdout holds `versions`. A refusal by ONNX Runtime ends with exit code 3 and its message on the last line of stderr.
"""

import json
import sys
from typing import Any

import onnxruntime
import onnxruntime_qnn

ort: Any = onnxruntime
qnn: Any = onnxruntime_qnn


def main() -> int:
    """Returns the exit code."""
    job = json.loads(sys.argv[1])
    provider = qnn.get_ep_name()
    try:
        ort.register_execution_provider_library(provider, qnn.get_library_path())
        devices = [device for device in ort.get_ep_devices() if device.ep_name == provider]
        options = ort.SessionOptions()
        options.log_severity_level = 3
        for key, value in job["config"].items():
            options.add_session_config_entry(key, value)
        options.add_provider_for_devices(devices[:1], job["provider_options"])
        if job.get("load"):
            ort.InferenceSession(job["out"], options, enable_fallback=False)
        else:
            embed, flags = job["embed"], ort.OrtCompileApiFlags
            strict = int(flags.ERROR_IF_NO_NODES_COMPILED) | int(flags.ERROR_IF_OUTPUT_FILE_EXISTS)
            # As a session does before it asks a provider; by default a compiler folds no constant, and QNN refuses the
            # Cast of one.
            level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
            given = {"embed_compiled_data_into_model": embed, "flags": strict, "graph_optimization_level": level}
            ort.ModelCompiler(options, job["model"], **given).compile_to_file(job["out"])
    except Exception as error:  # noqa: BLE001 - onnxruntime's exceptions have no base of their own
        sys.stderr.write("\n" + " ".join(str(error).split()) + "\n")
        return 3
    versions = {"onnxruntime": ort.__version__, "onnxruntime-qnn": qnn.__version__}
    sys.stdout.write("\n" + json.dumps({"versions": versions}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
