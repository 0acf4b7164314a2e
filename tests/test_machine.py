import platform
import socket

from edgekit.machine import describe_machine


def test_it_says_what_figures_depend_on_and_names_no_host() -> None:
    found = describe_machine()
    assert found["machine"] == platform.machine()
    assert int(found["cores"]) >= 1
    assert found["cpu"]
    assert socket.gethostname() not in found.values()
