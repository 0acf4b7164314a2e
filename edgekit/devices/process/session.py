"""Keeps one session of a device open for several turns, whose inputs may depend on the outputs of earlier turns.

The device runs one job in a thread. Samples are passed to it as they become known, and outputs back as they arrive.
"""

import contextlib
import itertools
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from threading import Condition, Thread

import msgspec

from edgekit.data.samples import Samples
from edgekit.devices.device import Device, DeviceRun, Job
from edgekit.errors import CrashError, DeviceError
from edgekit.model.tensors import Tensors

_WAITS_FOR_PIPES = os.name != "nt"

Turn = Callable[[Sequence[Tensors]], list[Tensors]]
"""Runs some samples and returns the outputs of each."""

_TEST = "edgekit devices test DEVICE shows whether the device works at all"


class _Session:
    """A job that a device runs in a separate thread, where it waits for samples."""

    def __init__(self, device: Device, job: Job, work: Path) -> None:
        self._timeout_s = job.timeout_s
        self._changed = Condition()
        # A sample that was answered is replaced by None to free its memory.
        self._given: list[Tensors | None] = []
        self._answers: list[Tensors] = []
        self._answered = 0
        self._is_over = False
        self._run: Future[DeviceRun] = Future()
        source = Samples(source=job.samples.source, count=job.samples.count, read=self._read)
        job = msgspec.structs.replace(job, samples=source, on_outputs=self._answer)
        self._thread = Thread(target=self._work, args=(device, job, work), daemon=True)
        self._thread.start()

    def run(self, samples: Sequence[Tensors]) -> list[Tensors]:
        """Runs samples, and returns the outputs of each.

        Raises:
            DeviceError: they did not come back in time, or the device failed.
        """
        with self._changed:
            self._given.extend(samples)
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(self._answers) >= len(samples) or self._is_over, self._timeout_s)
            answers, self._answers = self._answers, []
        if len(answers) != len(samples):
            self.finish()
            raise _explain(len(answers), len(samples))
        return answers

    def finish(self) -> None:
        """Ends the session, and raises the error that happened in it, if any."""
        self.end()
        if not self._run.done():
            raise DeviceError("the session did not end in time", hint=_TEST)
        _refuse_failed(self._run.result())

    def end(self) -> None:
        """Ends the session; afterwards nothing is written into its folder."""
        self._signal_end()
        self._thread.join(self._timeout_s)

    def _signal_end(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _read(self) -> Iterator[Tensors]:
        """Yields the samples and waits for more; until the first answer, they can be iterated repeatedly."""
        for index in itertools.count():
            with self._changed:
                self._changed.wait_for(lambda: index < len(self._given) or self._is_over)  # noqa: B023 - called at once
                if index >= len(self._given):
                    return
                sample = self._given[index]
            if sample is None:
                raise DeviceError("a turn that was answered cannot be run again", hint="run it anew")
            yield sample

    def _answer(self, outputs: Tensors) -> None:
        with self._changed:
            if self._answered < len(self._given):
                self._given[self._answered] = None
            self._answered += 1
            self._answers.append(outputs)
            self._changed.notify_all()

    def _work(self, device: Device, job: Job, work: Path) -> None:
        try:
            self._run.set_result(device.run_job(job, work))
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that asked
            self._run.set_exception(error)
        finally:
            self._signal_end()


@contextlib.contextmanager
def open_session(device: Device, job: Job, work: Path) -> Generator[Turn]:
    """Yields a function that runs samples in one session of a device.

    Of the samples of `job`, only their count is used, as the maximum. Files go into the folder `work`. On
    Windows, where `select` cannot wait for pipes, each turn is a separate run.

    Raises:
        CrashError: the program of an emulator died.
        DeviceError: the device failed, or did not return exactly one answer for each sample.
    """
    # No turn may stop early, because the next one needs the outputs of every sample.
    job = msgspec.structs.replace(job, budget_s=job.timeout_s)
    if not _WAITS_FOR_PIPES:
        folders = (work / f"turn-{turn}" for turn in itertools.count())

        def run_alone(samples: Sequence[Tensors]) -> list[Tensors]:
            turn = Samples(source=job.samples.source, count=len(samples), read=lambda: iter(samples))
            run = device.run_job(msgspec.structs.replace(job, samples=turn), next(folders))
            _refuse_failed(run)
            if run.outputs.count != len(samples):
                raise _explain(run.outputs.count, len(samples))
            return list(run.outputs)

        yield run_alone
        return
    session = _Session(device, job, work)
    try:
        yield session.run
        session.finish()
    finally:
        session.end()


def _refuse_failed(run: DeviceRun) -> None:
    if run.failure is not None:
        raise (CrashError if run.crashed else DeviceError)(run.failure, hint=_TEST)


def _explain(got: int, wanted: int) -> DeviceError:
    return DeviceError(f"{got} of {wanted} samples came back", hint=_TEST)
