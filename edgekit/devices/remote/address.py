"""What `adb:SERIAL` and `ssh:USER@HOST` may hold: nothing that a command line could take for an option or a command."""

import re

from edgekit.errors import UsageError

# No "-" in front, which would make an option of it, and nothing that means something to a shell.
_SERIAL = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9._-]{0,126}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?")
_USER = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,31}@"
_HOST = r"(?:[A-Za-z0-9][A-Za-z0-9._-]{0,252}|\[?[0-9A-Fa-f]*:[0-9A-Fa-f:.]{1,43}\]?)"
_SSH = re.compile(f"(?:{_USER})?{_HOST}")


def is_serial(text: str) -> bool:
    """Returns True for a serial as `adb devices` prints it: a number, `emulator-5554`, or HOST:PORT."""
    return _SERIAL.fullmatch(text) is not None


def check_serial(serial: str) -> str:
    """Returns a serial.

    Raises:
        UsageError: it could be something else on a command line.
    """
    if not is_serial(serial):
        raise UsageError(f"{_quote(serial)} is no serial of a device", hint="adb devices lists them")
    return serial


def check_host(host: str) -> str:
    """Returns USER@HOST, HOST, or a name of the user's ssh configuration.

    Raises:
        UsageError: it could be something else on a command line.
    """
    if not _SSH.fullmatch(host):
        raise UsageError(f"{_quote(host)} is no USER@HOST", hint="give ports and options in ~/.ssh/config under a name")
    return host


def _quote(text: str) -> str:
    return ascii(text[:80])
