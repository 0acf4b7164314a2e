"""Runs a job with the onnxruntime of this Python, in a child process of its own."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from edgekit._proc import ChildSetting, run_process
from edgekit.devices.device import DeviceRun, Job
from edgekit.devices.process.child import ORT_RUNNER, Runner, collect_run
from edgekit.devices.process.exchange import FarJob, write_job
from edgekit.devices.process.link import LocalLink
from edgekit.devices.process.pipe import run_over


def run_python(
    runner: Runner,
    job: Job,
    far: FarJob,
    work: Path,
    emulator: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    *,
    one_core: bool = False,
) -> DeviceRun:
    """Runs a job in a child, which `emulator` executes if it is given.

    `env` is added to the child's environment. With `one_core` all of the child's threads share a core.
    """
    # -P keeps the program's own folder out of sys.path: its neighbours would stand in for modules of the same names.
    argv = [*emulator, sys.executable, "-P", str(ORT_RUNNER)]
    if job.answered is not None:
        # Samples that are not known yet cannot lie in a folder.
        link = LocalLink(name=runner.device, folder=work, inside=str(work))
        argv.append("--pipe")
        setting = ChildSetting(cwd=work, env=env, one_core=one_core)
        return run_over(link, argv, job, far, work, runner=runner, setting=setting)
    write_job(work, far, job.samples)
    # No pipes: this process would compete for the cores while runs are timed.
    finished = run_process([*argv, str(work)], timeout_s=job.timeout_s, cwd=work, env=env, one_core=one_core)
    return collect_run(runner, job, finished, work)
