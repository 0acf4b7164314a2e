"""Runs ONNX Runtime's binary for Android in a process of this machine: natively, or on an emulated Arm CPU.

`--set` names a core or a phone; a process under qemu then sees its CPU in /proc/cpuinfo and the flags of AT_HWCAP.
"""

import contextlib
import functools
import platform
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from edgekit._files import write_file
from edgekit._ort import CPU_PROVIDER, has_integer_products
from edgekit.devices.android import compute, network, tflite
from edgekit.devices.android.installed import LOADER, MACHINES
from edgekit.devices.device import Device, DeviceRun, Job, Missing, refuse_run
from edgekit.devices.process.exchange import RunnerJob
from edgekit.devices.process.pipes import Served, serving
from edgekit.devices.process.run import describe_job, run_program, stand_in
from edgekit.errors import UsageError, look_up
from edgekit.evidence import Evidence
from edgekit.model.external import skim_model
from edgekit.serialize import ready_type
from edgekit.target import Target

CORES = 4
"""The number of cores of the emulated phone; apps give ONNX Runtime at most that many threads."""

DEFAULT_CORE = "cortex-a76"
"""The core of a phone by default: Armv8.2 with dot products and half precision, as in most phones since 2019."""

# Names of the bits of AT_HWCAP and AT_HWCAP2, from bit 0: Linux, arch/arm64/include/uapi/asm/hwcap.h.
_HWCAP = """
fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm jscvt fcma lrcpc dcpop sha3 sm3 sm4
asimddp sha512 sve asimdfhm dit uscat ilrcpc flagm ssbs sb paca pacg
"""
_HWCAP2 = """
dcpodp sve2 sveaes svepmull svebitperm svesha3 svesm4 flagm2 frint svei8mm svef32mm svef64mm svebf16 i8mm bf16 dgh rng
bti mte
"""


class Core(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A core: the fields of its MIDR_EL1, its features by Linux's names, and a CPU of qemu that has all of them."""

    part: int
    qemu: str
    features: str
    implementer: int = 0x41
    variant: int = 0
    revision: int = 0
    source: str = ""

    @property
    def hwcaps(self) -> tuple[int, ...]:
        """AT_HWCAP and AT_HWCAP2 for these features."""
        known, words = set(self.features.split()), (_HWCAP.split(), _HWCAP2.split())
        return tuple(sum(1 << bit for bit, name in enumerate(names) if name in known) for names in words)


class Phone(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A phone, with the names of its kinds of cores, the big ones first."""

    title: str
    cores: tuple[str, ...]
    source: str


class Phones(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table of cores and phones, with the titles of its sources."""

    sources: dict[str, str]
    cores: dict[str, Core]
    phones: dict[str, Phone]


@functools.cache
def read_phones() -> Phones:
    """Returns the table of phones.toml."""
    return msgspec.toml.decode((Path(__file__).parent / "phones.toml").read_bytes(), type=ready_type(Phones))


def find_core(name: str) -> Core:
    """Returns a core by its name.

    Raises:
        UsageError: there is no such core.
    """
    return look_up(read_phones().cores, name, f"there is no cpu '{name}' for 'android'")


NNAPI = "NnapiExecutionProvider"
XNNPACK = "XnnpackExecutionProvider"
PROVIDERS = frozenset({NNAPI, XNNPACK, CPU_PROVIDER})
X86_64 = "x86_64"

_INSTALL = "edgekit devices install android"
_COMPUTE_MODULE = "edgekit.devices.android.compute"
_POOL = "intra_op_num_threads"
_CPU_ONLY = "NNAPI_FLAG_CPU_ONLY"


class Android(Device, frozen=True, kw_only=True):
    """ONNX Runtime's library for Android with its own providers; `cpu` is an Arm core or `x86_64`.

    `phone` names the phone that has the core, "" for none; `driver` is the NNAPI driver to emulate. With `computes`,
    NNAPI's networks must be computed, for which LiteRT has to be installed.
    """

    targets = ("xnnpack", "nnapi")
    providers: frozenset[str] = PROVIDERS
    cpu: str = DEFAULT_CORE
    phone: str = ""
    driver: network.Driver | None = None
    evidence: Evidence = Evidence.SAME_BINARY
    computes: bool = False

    @property
    def name(self) -> str:
        """The device as reports name it: with its phone and its core, unless they are the default."""
        if self.phone:
            return f"android:{self.phone}:{self.cpu}"
        return "android" if self.cpu == DEFAULT_CORE else f"android:{self.cpu}"

    @property
    def abi(self) -> str:
        """The ABI of the archive's library that runs."""
        return X86_64 if self.cpu == X86_64 else "arm64-v8a"

    def find_versions(self) -> dict[str, str]:
        """Returns the version of the library, and the name of its archive."""
        return LOADER.find_versions()

    def for_target(self, target: Target) -> "Android":
        """Returns the device, which computes NNAPI's networks only for a target of NNAPI."""
        return msgspec.structs.replace(self, computes=target.provider == NNAPI)

    def with_settings(self, settings: Mapping[str, str], target: Target) -> Sequence["Android"]:
        """Returns the device with settings applied, once for each kind of core that they name."""
        device = self
        for name in settings:
            look_up(SETTINGS, name, f"device 'android' has no setting '{name}'")
        if "cpu" in settings and "phone" in settings:
            raise UsageError("--set cpu and --set phone both name the CPU", hint="give one of them")
        if device.cpu == X86_64 and (named := next((name for name in ("cpu", "phone") if name in settings), None)):
            words = f"--set {named} means nothing for '{device.name}'"
            raise UsageError(words, hint="--on android is the one with a phone")
        if "driver" in settings:
            if target.provider != NNAPI:
                words = f"--set driver means nothing for {target.provider}"
                raise UsageError(words, hint="only NNAPI has drivers")
            device = msgspec.structs.replace(device, driver=network.read_driver(Path(settings["driver"])))
        phone, cores = settings.get("phone", self.phone), [self.cpu]
        if "phone" in settings:
            cores = [*look_up(read_phones().phones, phone, f"there is no phone '{phone}'").cores]
        if "cpu" in settings:
            cores = [core.strip() for core in settings["cpu"].split(",")]
            for core in cores:
                find_core(core)
        return tuple(msgspec.structs.replace(device, phone=phone, cpu=core) for core in dict.fromkeys(cores))

    def find_missing(self) -> Missing | None:
        """Returns what is lacking on this machine."""
        if (installed := LOADER.find_installed()) is None:
            return Missing(reason="ONNX Runtime for Android is not installed", command=_INSTALL)
        if self.abi not in installed.abis:
            command = f"{LOADER.needs[self.abi]}; {_INSTALL}"
            return Missing(reason=f"it was installed without {self.abi}", command=command)
        if self.computes and not compute.can_compute():
            reason = "ai-edge-litert, which computes NNAPI's networks, is not installed"
            return Missing(reason=reason, command=tflite.INSTALL_LITERT)
        if find_emulator(self.abi) is not None:
            return None
        if self.abi == X86_64:
            return Missing(reason="this machine has no x86-64 CPU", command=None)
        return Missing(reason="qemu-aarch64-static not found", command="apt-get install qemu-user-static")

    def run(self, job: Job, work: Path) -> DeviceRun:
        """Runs every sample of a job in the provider of its target."""
        installed = LOADER.find_installed()
        provider = job.target.provider
        if installed is None or provider not in {*installed.providers, CPU_PROVIDER}:
            return refuse_run(self, f"'{installed.archive if installed else ''}' was built without {provider}")
        run = self._run(job, work)
        other = msgspec.structs.replace(self, cpu=DEFAULT_CORE if self.abi == X86_64 else X86_64, phone="")
        # A job that crashed runs in the library for the other ABI too: if both crash, the cause is the job. A job with
        # `on_outputs` cannot be repeated, because its samples depend on outputs that were already used.
        if not run.crashed or job.on_outputs is not None or other.find_missing() is not None:
            return run
        other_run = other._run(job, work / "elsewhere")  # noqa: SLF001 - another of this class
        outcome = (
            "crashes too" if other_run.crashed else f"says: {other_run.failure}" if other_run.failure else "runs it"
        )
        failure = f"{run.failure}; '{other.name}' {outcome}"
        return msgspec.structs.replace(run, failure=failure, crashed=not other_run.crashed)

    def _run(self, job: Job, work: Path) -> DeviceRun:
        request = self._describe_job(job)
        # Without samples, or without TFLite's kernels, networks are only built, not computed.
        is_computed = job.target.provider == NNAPI and job.samples.count > 0 and compute.can_compute()
        pipes = serving(work / "nnapi", _COMPUTE_MODULE, job.timeout_s) if is_computed else contextlib.nullcontext()
        with pipes as served:
            argv = [*self._enter(job, work, served), str(LOADER.find_program(self.abi)), "--pipe"]
            run = run_program(self, argv, job, request, work, emulates=True)
        # NNAPI's last message, if there is one, is the reason of a failure.
        reason = [f"; {said}" for said in re.findall(r"^NNAPI: (.*)", run.log, re.MULTILINE)][-1:]
        return msgspec.structs.replace(
            run,
            failure=run.failure and "".join((run.failure, *reason)),
            versions={**LOADER.find_versions(), **run.versions},
            notes=(*run.notes, *self._list_notes(run, job, request, served)),
        )

    def _describe_job(self, job: Job) -> RunnerJob:
        provider, session = job.target.provider, job.target.session
        options = dict(session.platforms.get("android", session).provider_options)
        if provider == XNNPACK and _POOL in options and _POOL not in job.chosen:
            # XNNPACK's threads spin while they wait for each other. On few cores, each operation waits for the time
            # slice of another thread: 300 ms per run instead of 0.1 ms. The results do not depend on the number of
            # threads.
            options[_POOL] = str(job.threads or 1)
        # The session's own threads: one beside XNNPACK's pool, as in edgekit's app loaders.
        runtime = str(LOADER.find_library(self.abi))
        threads = job.threads or (1 if provider == XNNPACK else 0 if self.abi == X86_64 else CORES)
        # With exact sums the library for x86-64 writes beyond a buffer where a MatMulInteger has s8 weights (SIGABRT).
        is_safe = job.model.suffix == ".onnx" and not has_integer_products(skim_model(job.model).graph)
        describe = stand_in if self.abi == X86_64 and is_safe else describe_job
        return describe(job, provider=provider, provider_options=options, runtime=runtime, threads=threads)

    def _enter(self, job: Job, work: Path, served: Served | None) -> tuple[str, ...]:
        """Returns the start of the command: variables that describe the phone, and the emulator of its CPU."""
        api = job.target.settings.get("api_level", "34")
        variables = [f"EDGEKIT_ANDROID_API={api}"]
        if served is not None:
            variables.append(f"EDGEKIT_NNAPI_PIPES={served.folder}")
        if job.target.provider == NNAPI:
            variables.append(f"EDGEKIT_NNAPI_LEVEL={network.find_feature_level(int(api))}")
        if self.driver is not None:
            variables.append(f"EDGEKIT_NNAPI_DRIVER={self.driver.name}")
            variables.append(f"EDGEKIT_NNAPI_REFUSED={','.join(map(str, self.driver.numbers))}")
            if self.driver.feature_level is not None:
                variables.append(f"EDGEKIT_NNAPI_DRIVER_LEVEL={self.driver.feature_level}")
        return ("env", *variables, *enter_phone(self.cpu, find_emulator(self.abi) or (), work))

    def _list_notes(self, run: DeviceRun, job: Job, request: RunnerJob, served: Served | None) -> Iterator[str]:
        """Yields notes on the emulated phone, and on what was done differently from a real one."""
        if self.abi != X86_64 and run.cpu_features:
            yield f"the phone's CPU: {self.cpu}, with {', '.join(run.cpu_features)}"
        requested = job.target.session.provider_options.get(_POOL, "1")
        if request.provider_options.get(_POOL, requested) != requested:
            pool = request.provider_options[_POOL]
            yield f"XNNPACK had {pool} of {requested} threads: more compute the same, and wait for each other here"
        facts = None if served is None else served.read_facts()
        if facts is None:
            return
        if facts.halves:
            yield "NNAPI was allowed half precision: here each operation reads and gives halves"
        refused = () if self.driver is None or request.provider_options.get(_CPU_ONLY) == "1" else self.driver.refused
        if refused_counts := {name: facts.operations[name] for name in refused if name in facts.operations}:
            counts = ", ".join(f"{count} {name}" for name, count in refused_counts.items())
            operations = sum(facts.operations.values())
            share = f"{sum(refused_counts.values())} of {operations} operations"
            yield f"NNAPI's driver refuses {share}, which its reference kernels on the phone's CPU ran: {counts}"


def find_emulator(abi: str) -> tuple[str, ...] | None:
    """Returns the emulator's command for an ABI: empty if the ABI runs natively, None if it cannot run here."""
    if MACHINES[abi] == platform.machine():
        return ()
    if abi == X86_64:
        return None
    found = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    return None if found is None else (found,)


def enter_phone(core_name: str, emulator: Sequence[str], work: Path) -> tuple[str, ...]:
    """Returns the words after `env` for a program on the CPU of a phone: what describes it, and the emulator's command.

    Files below `work/phone` stand for its `/proc` and `/sys`. No words without an emulator, when the program runs
    natively.

    Raises:
        OutputError: the folder cannot be written.
    """
    if not emulator:
        return ()
    core, root = find_core(core_name), work / "phone"
    lines = "".join(
        f"processor\t: {index}\nBogoMIPS\t: 38.40\nFeatures\t: {core.features}\n"
        f"CPU implementer\t: {core.implementer:#04x}\nCPU architecture: 8\nCPU variant\t: {core.variant:#x}\n"
        f"CPU part\t: {core.part:#05x}\nCPU revision\t: {core.revision}\n\n"
        for index in range(CORES)
    )
    write_file(root / "proc" / "cpuinfo", lines.encode())
    for name in ("possible", "present", "online"):
        write_file(root / "sys" / "devices" / "system" / "cpu" / name, f"0-{CORES - 1}\n".encode())
    facts = (f"EDGEKIT_PHONE={root}", f"EDGEKIT_HWCAP={core.hwcaps[0]:#x},{core.hwcaps[1]:#x}")
    return (*facts, *emulator, "-cpu", core.qemu)


SETTINGS = {
    "cpu": "a core of Arm, or several with commas between them: each runs",
    "phone": "a phone of phones.toml: each kind of its cores runs",
    "driver": "a .toml file with what the NNAPI driver refuses",
}
"""The settings of the device, each with its meaning."""
