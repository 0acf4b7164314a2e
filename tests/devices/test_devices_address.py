"""Names of remote devices hold nothing that a command line could take for something else."""

import pytest

from edgekit.devices.remote.remote import check_address
from edgekit.errors import UsageError

HOSTILE = [
    "", "-", "-oProxyCommand=id", "--help", "a b", "a;id", "a$(id)", "a`id`", "a|id", "a&id", "a>b", "a\nb", "a\x00b",
    "a'b", 'a"b', "../a", "/etc", "a/b", "a\\b", "x" * 300, "é", "\x1b[2J", "@", "a@", "@b", "-l@host", "a@-oX",
]  # fmt: skip


@pytest.mark.parametrize(
    "serial",
    ["R5CT1234", "emulator-5554", "192.168.1.2:5555", "[::1]:5555", "localhost:5555", "adb-1A2B._adb-tls-connect._tcp"],
)
def test_serials_that_adb_prints_pass(serial: str) -> None:
    assert check_address("adb", serial) == serial


@pytest.mark.parametrize(
    "host", ["pi@raspberry.local", "board", "root@10.0.0.7", "user_1@my-host", "pi@fe80::1", "::1"]
)
def test_hosts_that_ssh_takes_pass(host: str) -> None:
    assert check_address("ssh", host) == host


@pytest.mark.parametrize("text", HOSTILE)
def test_anything_else_is_refused_in_one_line(text: str) -> None:
    for kind in ("adb", "ssh"):
        with pytest.raises(UsageError) as caught:
            check_address(kind, text)
        assert str(caught.value).isprintable()
