"""A run in a file: recorded on a machine with the device, judged on a machine with the bundle.

The first line has the signature of the rest, if any, the second a `Claim`. The outputs follow, one `.tensors` message
for each sample (`edgekit.devices.process.exchange`), and then those of the turns of a stateful model, whose inputs
depend on earlier outputs. Nothing in the file is trusted before it has been checked against the bundle.
"""

import hashlib
import itertools
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Annotated, Literal, TypeVar

import msgspec

from edgekit._files import digest_file, open_regular, read_chunks, replacing_file, work_folder, write_new
from edgekit.bundle.sign import DigestSignature, check_digest_signature, sign_digest
from edgekit.data.data_check import digest_samples
from edgekit.data.samples import Samples, select_samples
from edgekit.devices.device import Count, Device, DeviceRun, Job, Measured, Milliseconds, PlacedNode, WrappedDevice
from edgekit.devices.process import exchange
from edgekit.errors import DataError, DeviceError, reading, reraised
from edgekit.evidence import Evidence
from edgekit.model.tensors import Tensors
from edgekit.serialize import UNDECODABLE, fill, ready_type

# The order in which samples run is part of the format, because the digest of the inputs depends on it.
_FORMAT = "edgekit-run-2"
_MAX_HEAD_BYTES = 1 << 12
_HINT = "edgekit verify BUNDLE --on DEVICE --export FILE writes one"
_Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
_Word = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][\w .:@+-]{0,63}$")]
_T = TypeVar("_T")
_Line = Annotated[str, msgspec.Meta(max_length=2000)]


class Claim(Measured, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a file claims about a run, with the digests of the bundle, the model file, the inputs and the outputs.

    The outputs of `samples` samples follow, and then those of the `turns` of a session that was run step by step.
    `waited_ms` is how long the device took to answer. The other fields are those of `DeviceRun`, but bounded, because
    the file may be untrusted.
    """

    bundle_sha256: _Sha256
    model_sha256: _Sha256
    inputs_sha256: _Sha256
    outputs_sha256: _Sha256
    samples: Count
    device: _Word
    evidence: Evidence
    placement: tuple[PlacedNode, ...]
    placement_source: Literal["session", "profile", "log", "predicted"]
    waited_ms: Milliseconds
    versions: dict[_Word, _Line]
    failure: _Line | None
    notes: tuple[_Line, ...]
    stopped_early: bool
    crashed: bool = False
    turns: Count = 0
    turns_sha256: _Sha256 | None = None


class _Head(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: _Word
    seal: DigestSignature | None


class Recording(WrappedDevice, frozen=True, kw_only=True):
    """A device whose first run is written into the file `path`, signed with `key` if it is given.

    The first run that is made step by step (`Job.on_outputs`) is added to the file. After the first run, `written` has
    one item: the claim in the file, and the outputs of that run.
    """

    path: Path
    bundle_sha256: str
    key: Path | None = None
    written: list[tuple[Claim, Samples]] = msgspec.field(default_factory=list[tuple[Claim, Samples]])

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        """Runs a job on the device, and records the first run and the first run whose samples are turns.

        Raises:
            DeviceError: the device is not there.
            OutputError: the file cannot be written.
            UsageError: the key cannot be used to sign.
        """
        begun = time.monotonic()
        run = self.device.run_job(job, work)
        if not self.written:
            waited_ms = 1000.0 * (time.monotonic() - begun)
            claim = fill(
                Claim,
                run,
                bundle_sha256=self.bundle_sha256,
                model_sha256=digest_file(job.model),
                inputs_sha256=digest_samples(job.samples),
                outputs_sha256=digest_samples(run.outputs),
                samples=run.outputs.count,
                waited_ms=waited_ms,
            )
            self.written.append((claim, run.outputs))
            _write_run(self.path, claim, run.outputs, self.key)
        elif job.on_outputs is not None and not self.written[0][0].turns:
            claim, outputs = self.written[0]
            digest = digest_samples(run.outputs)
            claim = msgspec.structs.replace(claim, turns=run.outputs.count, turns_sha256=digest)
            self.written[0] = claim, outputs
            _write_run(self.path, claim, itertools.chain(outputs, run.outputs), self.key)
        return run


class Recorded(Device, frozen=True, kw_only=True):
    """A recorded run in the role of the device that made it; it can run only the recorded job.

    `signer` says who signed the file, as text.
    """

    path: Path
    claim: Claim
    bundle_sha256: str
    signer: str

    @property
    def name(self) -> str:
        """The name of the device that made the run."""
        return self.claim.device

    @property
    def evidence(self) -> Evidence:
        """How much a run on that device proves, as the file claims."""
        return self.claim.evidence

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        """Returns the run, if it is a run of this job.

        Raises:
            DeviceError: it is a run of another bundle, model file or samples, or the outputs do not have the claimed
                digest.
        """
        for reason in self._find_mismatches(job):
            raise self._explain(reason)
        count, folder = self.claim.samples, work / "out"
        received = count + self.claim.turns
        with _open(self.path) as file:
            _take_lines(file)
            for index in range(received):
                exchange.receive_tensors(file, folder / exchange.tensors_name(index), job.outputs)
            if file.read(1):
                raise self._explain("has data after its last output")
        all_outputs = exchange.open_outputs(folder, received, job.outputs, str(self.path))
        outputs = select_samples(all_outputs, range(count))
        if digest_samples(outputs) != self.claim.outputs_sha256:
            raise self._explain("has outputs with another digest than it claims")
        if job.on_outputs is not None:
            outputs = select_samples(all_outputs, range(count, all_outputs.count))
            if digest_samples(outputs) != self.claim.turns_sha256:
                raise self._explain("has turns with another digest than it claims")
            for _, answer in zip(job.samples, outputs, strict=False):
                job.on_outputs(answer)
        device, notes = f"{self.claim.device} (recorded)", (f"{self.path.name}: {self.signer}", *self.claim.notes)
        return fill(DeviceRun, self.claim, device=device, outputs=outputs, notes=notes)

    def _find_mismatches(self, job: Job) -> Iterator[str]:
        """Yields the reasons why the run is not a run of a job."""
        claim = self.claim
        if claim.bundle_sha256 != self.bundle_sha256:
            yield "is of another bundle, or of another build of it"
        if claim.model_sha256 != digest_file(job.model):
            yield "is of another model file than is judged here"
        if job.on_outputs is not None:
            # No digest of inputs is needed: they follow from the outputs, and from the samples that were compared for
            # the first run.
            if claim.turns != job.samples.count:
                yield f"holds {claim.turns} of {job.samples.count} steps with the state that the device had itself"
            return
        if claim.inputs_sha256 != digest_samples(job.samples):
            yield "is of other samples than are judged here"
        is_whole = claim.samples == job.samples.count or claim.stopped_early or claim.failure is not None
        if not is_whole or claim.samples > job.samples.count:
            yield f"holds {claim.samples} outputs of {job.samples.count} samples"
        if claim.turns > claim.samples:
            yield f"holds {claim.turns} turns, and {claim.samples} samples"

    def _explain(self, reason: str) -> DeviceError:
        return DeviceError(f"the run in '{self.path.name}' {reason}", hint=_HINT)


def open_recorded(path: Path, bundle_sha256: str, key: Path | None = None) -> Recorded:
    """Returns the run in a file; with `key`, a public key in PEM, only if its owner signed the file.

    Raises:
        DataError: there is no such file, or it is no run.
        BundleError: the key's owner did not sign it.
        UsageError: the key cannot be read, or is no Ed25519 public key.
    """
    with _open(path) as file:
        first, second = _take_lines(file)
        head = _decode(first, _Head, path)
        if head.format != _FORMAT:
            other = f"'{path}' is a run of format {head.format}, not {_FORMAT}: another version of edgekit wrote it"
            raise DataError(other, hint=_HINT)
        claim = _decode(second, Claim, path)
        rest = hashlib.sha256(second)
        for chunk in read_chunks(file):
            rest.update(chunk)
        digest = rest.hexdigest()
    if key is not None:
        check_digest_signature(head.seal, digest, str(path), key)
        signer = f"signed with the key '{key.name}'"
    elif head.seal is not None:
        signer = f"as claimed: it is signed with the key {head.seal.keyid[:16]}, which was not asked for (--run-key)"
    else:
        signer = "as claimed: nobody signed it"
    return Recorded(path=path, claim=claim, bundle_sha256=bundle_sha256, signer=signer)


def _decode(line: bytes, kind: type[_T], path: Path) -> _T:
    with reraised(UNDECODABLE, DataError(f"'{path}' is no recorded run", hint=_HINT), quote=True):
        return msgspec.json.decode(line, type=ready_type(kind))


def _write_run(path: Path, claim: Claim, outputs: Iterable[Tensors], key: Path | None) -> None:
    with work_folder() as work:
        body = work / "body"
        line = msgspec.json.encode(claim) + b"\n"
        write_new(body, itertools.chain((line,), map(exchange.encode_tensors, outputs)))
        seal = None if key is None else sign_digest(digest_file(body), key)
        head = msgspec.json.encode(_Head(format=_FORMAT, seal=seal)) + b"\n"
        with replacing_file(path) as temporary, body.open("rb") as file:
            write_new(temporary, itertools.chain((head,), read_chunks(file)))


def _open(path: Path) -> IO[bytes]:
    with reading(f"'{path}'", DataError, _HINT):
        return open_regular(path)


def _take_lines(file: IO[bytes]) -> tuple[bytes, bytes]:
    """Returns the first two lines of a file, up to their maximum lengths."""
    return file.readline(_MAX_HEAD_BYTES), file.readline(exchange.MAX_RESULT_BYTES)
