"""Runs ONNX Runtime for the iOS simulator in a process of this machine, with the Core ML provider that an app links."""

import os
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path

import msgspec

from edgekit._ort import CPU_PROVIDER
from edgekit.devices.device import DeviceRun, Job, Missing
from edgekit.devices.ios.installed import ABI, LOADER, explain_machine
from edgekit.devices.ios.mil.compute import Facts
from edgekit.devices.local.host import PROVIDER, provider_options
from edgekit.devices.process.exchange import RunnerJob
from edgekit.devices.process.pipes import Served, serving
from edgekit.devices.process.run import describe_job, refuse_run, require_device, run_program
from edgekit.evidence import Evidence

NAME = "ios-sim"
PROVIDERS = frozenset({PROVIDER})

ML_PROGRAM = "MLProgram"

_DEFAULT_IOS = "17"
_INSTALL = f"edgekit devices install {NAME}"
_COMPUTES = "edgekit.devices.ios.mil.compute"
_LOG = "EDGEKIT_IOS_LOG"


class IosSimulator(msgspec.Struct, frozen=True, kw_only=True):
    """The release library for the iOS simulator: its real Core ML provider partitions the graph and writes the models.

    If `cache` is given, the provider uses that folder as its `ModelCacheDirectory`. `model_format` is the format that
    it writes: edgekit computes ML Programs; of other formats, models are only placed and built.
    """

    cache: Path | None = None
    model_format: str = ML_PROGRAM
    evidence: Evidence = Evidence.SAME_EP

    @property
    def name(self) -> str:
        """The device as the user names it."""
        return NAME

    def find_missing(self) -> Missing | None:
        """Returns what is lacking on this machine, or that models of this format cannot be computed."""
        if missing := self._find_absent():
            return missing
        if self.model_format == ML_PROGRAM:
            return None
        reason = f"it computes ML Programs alone, not the {self.model_format} format: check --observe places it"
        # No command: nothing that could be installed computes this format here.
        return Missing(reason=reason, command=None)

    def _find_absent(self) -> Missing | None:
        if reason := explain_machine():
            return Missing(reason=reason, command=None)
        if LOADER.find_installed() is None:
            return Missing(reason="ONNX Runtime for the iOS simulator is not installed", command=_INSTALL)
        return None

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        """Runs every sample of a job in the Core ML provider, as on the iOS release of the target.

        Raises:
            DeviceError: the device is not installed, or cannot run here.
            TargetError: the target has an option that the provider does not know.
        """
        require_device(self.name, self.find_missing() if job.samples.count else self._find_absent())
        if job.target.provider not in {PROVIDER, CPU_PROVIDER}:
            return refuse_run(self, f"'{self.name}' runs {PROVIDER}, not {job.target.provider}")
        models = work / "models"
        models.mkdir()
        request = _describe_job(job, self.cache)
        # Without samples, ML Programs are only built, not computed.
        with serving(work / "pipes", _COMPUTES, job.timeout_s) if job.samples.count else nullcontext() as served:
            enter = _enter(job.target.settings, models, work / "pipes" if served else None)
            argv = [*enter, str(LOADER.find_program(ABI)), "--pipe"]
            run = run_program(self, argv, job, request, work, emulates=True)
        return msgspec.structs.replace(
            run, versions={**LOADER.find_versions(), **run.versions}, notes=(*run.notes, *_list_notes(served))
        )


def _describe_job(job: Job, cache: Path | None) -> RunnerJob:
    platform = job.target.session.platforms.get("ios")
    request = describe_job(job, provider=job.target.provider)
    options = dict(request.provider_options if platform is None else platform.provider_options)
    options = provider_options(options) if job.target.provider == PROVIDER else {}
    return msgspec.structs.replace(
        request,
        provider_options=options if cache is None else {**options, "ModelCacheDirectory": str(cache)},
        runtime=str(LOADER.find_library(ABI)),
        threads=job.threads or 1,
    )


def _list_notes(served: Served | None) -> Iterator[str]:
    """Yields the note that the ML Program is the provider's, but was computed by edgekit."""
    if served is None or not served.said:
        return
    facts = msgspec.json.decode(served.said, type=Facts)
    total = sum(facts.operations.values())
    if total:
        yield (
            f"Core ML's program was written by the provider; edgekit computed its {total} operations,"
            f" {facts.halves} of them in half precision"
        )


def _enter(settings: Mapping[str, str], models: Path, pipes: Path | None) -> tuple[str, ...]:
    """Returns the start of the command, with the iOS release, the models' folder, and the pipes for computing."""
    facts = [f"EDGEKIT_IOS={settings.get('ios', _DEFAULT_IOS)}", f"EDGEKIT_COREML_MODELS={models}"]
    facts += [] if pipes is None else [f"EDGEKIT_COREML_PIPES={pipes}"]
    # The simulator's library has telemetry on by default.
    facts += ["ORT_DISABLE_TELEMETRY=1", *([f"{_LOG}=1"] if os.environ.get(_LOG) else [])]
    return ("env", *facts)
