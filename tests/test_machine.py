import platform
import resource
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from edgekit.devices.standalone import ort_runner
from edgekit.machine import (
    describe_machine,
    host_cpu,
    map_in_order,
    own_peak_bytes,
    peak_bytes,
    single_blas_thread,
    spell_install,
)


def test_the_description_of_a_machine_has_no_host_name() -> None:
    found = describe_machine()
    assert found["machine"] == platform.machine()
    assert int(found["cores"]) >= 1
    assert found["cpu"]
    assert socket.gethostname() not in found.values()


@pytest.mark.parametrize(("machine", "cpu"), [("arm64", "arm"), ("aarch64", "arm"), ("AMD64", "x64")])
def test_a_mac_with_arm_is_arm_as_linux_on_arm_is(monkeypatch: pytest.MonkeyPatch, machine: str, cpu: str) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert host_cpu() == cpu


def test_packages_are_put_beside_edgekit_as_it_was_installed(tmp_path: Path) -> None:
    assert spell_install("cryptography", tmp_path) == "pip install cryptography"
    # As uv 0.13 writes it.
    (tmp_path / "uv-receipt.toml").write_text(
        """[tool]
requirements = [
    { name = "edgekit-onnx", path = "/home/me/edgekit_onnx-0.1.0-py3-none-any.whl" },
    { name = "ziglang", specifier = "==0.17.1" },
]
"""
    )
    assert spell_install("fsspec s3fs", tmp_path) == (
        "uv tool install /home/me/edgekit_onnx-0.1.0-py3-none-any.whl --with ziglang==0.17.1 --with fsspec --with s3fs"
    )
    pipx = tmp_path / "edgekit-onnx"
    pipx.mkdir()
    (pipx / "pipx_metadata.json").write_text("{}")
    assert spell_install("onnxruntime-qnn==2.7.0", pipx) == "pipx inject edgekit-onnx onnxruntime-qnn==2.7.0"


@pytest.mark.parametrize(("system", "unit"), [("linux", 1024), ("darwin", 1)])
def test_the_peak_of_memory_has_the_unit_of_the_system(monkeypatch: pytest.MonkeyPatch, system: str, unit: int) -> None:
    monkeypatch.setattr(sys, "platform", system)
    assert peak_bytes(SimpleNamespace(ru_maxrss=5000)) == 5000 * unit
    both = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    assert own_peak_bytes() == sum(resource.getrusage(who).ru_maxrss for who in both) * unit
    monkeypatch.setattr(ort_runner, "Path", lambda _: Path("/nowhere"))
    assert ort_runner._read_memory()[1] == resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@pytest.mark.parametrize("at_once", [1, 2, 5])
def test_parallel_results_keep_their_order_and_items_are_read_lazily(at_once: int) -> None:
    read = list[int]()

    def items() -> Iterator[int]:
        for item in range(9):
            read.append(item)
            yield item

    for count, (item, square) in enumerate(map_in_order(lambda item: item * item, items(), at_once)):
        assert (item, square) == (count, count * count)
        assert len(read) <= count + at_once + 1


def test_two_items_are_processed_at_a_time() -> None:
    both = threading.Barrier(2, timeout=20)
    assert [found for _, found in map_in_order(lambda _: both.wait() >= 0, range(4), 2)] == [True] * 4


def test_results_before_a_failure_are_yielded_first() -> None:
    def items() -> Iterator[int]:
        yield from (4, 2)
        raise ValueError("no more")

    done = list[float]()
    with pytest.raises(ValueError, match="no more"):
        done.extend(found for _, found in map_in_order(lambda item: 8 / item, items(), 3))
    assert done == [2, 4]
    with pytest.raises(ZeroDivisionError):
        list(map_in_order(lambda item: 8 / item, (4, 0, 2), 2))


def test_blas_uses_one_thread_inside_the_block() -> None:
    def threads() -> set[int]:
        return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}

    with threadpool_limits(limits=2, user_api="blas"):
        assert threads() == {2}
        with single_blas_thread():
            assert threads() == {1}
        assert threads() == {2}
