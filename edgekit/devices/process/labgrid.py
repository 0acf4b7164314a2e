"""Places of Labgrid: who shares a laboratory holds a place there while something of his runs on its device."""

import contextlib
import getpass
import shutil
import time
from collections.abc import Generator

from edgekit._files import digest_bytes, one_at_a_time
from edgekit._proc import Finished, run_process
from edgekit.devices.process.cache import cache_folder
from edgekit.errors import DeviceError

_CLIENT = "labgrid-client"
_CALL_S = 60.0
_WAIT_S = 3600.0
_PAUSE_S = 2.0
# What the client of Labgrid 24 and 26 says, `labgrid/remote/client.py`.
_MINE, _TAKEN = "You have already acquired place", "is already acquired by"


@contextlib.contextmanager
def holding_place(place: str, *, wait_s: float = _WAIT_S) -> Generator[None]:
    """Holds a place of Labgrid, and waits for it as long as somebody else has it.

    The coordinator is that of `LG_COORDINATOR`, as Labgrid's own client finds it.

    Raises:
        DeviceError: there is no client or no coordinator or no such place, or it was not free in time.
    """
    program = shutil.which(_CLIENT)
    if program is None:
        raise DeviceError(f"place '{place}' of Labgrid needs {_CLIENT}", hint="pip install labgrid, or pipx")
    # Under a name of our own: a place that a person holds by hand is not taken for ours.
    env = {"LG_USERNAME": f"edgekit-{getpass.getuser()}"}

    def ask(what: str) -> Finished:
        return run_process([program, "-p", place, what], timeout_s=_CALL_S, env=env)

    # One process of this machine at a time: what is ours and is held then is left by one that was killed.
    with one_at_a_time(cache_folder() / "leases" / digest_bytes(f"labgrid:{place}".encode()) / "lock"):
        end = time.monotonic() + wait_s
        while not (done := ask("acquire")).succeeded:
            if _MINE in done.stderr:
                ask("release")
            elif _TAKEN not in done.stderr:
                raise DeviceError(f"place '{place}' of Labgrid: {_quote(done)}", hint=f"{_CLIENT} places lists them")
            elif time.monotonic() > end:
                raise DeviceError(f"place '{place}' was not free: {_quote(done)}", hint=f"{_CLIENT} who says more")
            else:
                time.sleep(_PAUSE_S)
        try:
            yield
        finally:
            ask("release")


def _quote(done: Finished) -> str:
    lines = done.stderr.strip().splitlines()
    return lines[-1].removeprefix(f"{_CLIENT}: ") if lines else done.ending
