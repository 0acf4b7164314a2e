"""A phone examined: faults seeded in a root behind adb are found, each with its cause, and a good one has none."""

import json
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from other_machine.client import Adb
from other_machine.machine import start_machine

from edgekit.cli.main import run_command
from edgekit.devices.remote.examine import PhoneFacts, judge_facts, read_facts

GOOD = PhoneFacts(
    abi="arm64-v8a", model="SM-S921B", android="13", api_level="30", soc="SM8650", maker="QTI", page_size="4096",
    soc_id="557", rpc="/vendor/lib64/libcdsprpc.so", lists="1", public="1", rpc_device="/dev/fastrpc-cdsp",
    skels="libQnnHtpV75Skel.so ", nnapi="/system/lib64/libneuralnetworks.so", nnapi_drivers="neuralnetworks.xml",
    soc_model="57", htp="75",
)  # fmt: skip


def test_a_good_phone_has_no_findings() -> None:
    assert judge_facts(GOOD) == ()


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"abi": "armeabi-v7a"}, ["abi"]),
        ({"page_size": "16384"}, ["pages"]),
        ({"maker": "Google", "soc": "Tensor G3", "htp": ""}, ["chip"]),
        ({"rpc": "", "public": "", "rpc_device": ""}, ["rpc"]),
        ({"public": ""}, ["rpc-public"]),
        ({"api_level": "34"}, ["rpc-manifest"]),
        ({"rpc_device": ""}, ["rpc-device"]),
        ({"htp": "66", "skels": "libQnnHtpV66Skel.so"}, ["old-npu"]),
        ({"skels": "libQnnHtpV73Skel.so "}, ["skel"]),
        ({"nnapi": "", "nnapi_drivers": ""}, ["nnapi"]),
        ({"nnapi_drivers": ""}, ["nnapi-driver"]),
        # Faults come before warnings.
        ({"page_size": "16384", "rpc_device": ""}, ["rpc-device", "pages"]),
    ],
)
def test_each_cause_of_a_refusal_is_found_from_the_phones_facts(changes: Mapping[str, str], found: list[str]) -> None:
    findings = judge_facts(msgspec.structs.replace(GOOD, **changes))
    assert [finding.id for finding in findings] == found
    assert all(finding.cause and finding.fix and "{" not in finding.cause + finding.fix for finding in findings)


def test_facts_of_a_phone_are_bounded_and_unknown_ones_dropped() -> None:
    facts = read_facts(f"abi={'x' * 9999}\nsoc=sm8650\nhtp=99\nevil=1\nno line\n")
    assert (len(facts.abi), facts.soc_model, facts.htp) == (200, "57", "75")


_SEEDS = {
    "vendor/lib64/libcdsprpc.so": "", "vendor/etc/public.libraries.txt": "libcdsprpc.so\n", "dev/fastrpc-cdsp": "",
    "system/lib64/libneuralnetworks.so": "", "vendor/etc/vintf/manifest/android.hardware.neuralnetworks.xml": "",
    "vendor/lib/rfsa/adsp/libQnnHtpV75Skel.so": "",
}  # fmt: skip
_SAYS = {"ro.product.cpu.abi": "arm64-v8a", "ro.build.version.sdk": "30", "ro.soc.model": "SM8650",
         "ro.soc.manufacturer": "QTI", "ro.product.model": "Edge Fake 1"}  # fmt: skip


def _program(path: Path, cases: Mapping[str, str]) -> None:
    lines = "".join(f"{key}) echo '{value}';;\n" for key, value in cases.items())
    path.write_text(f'#!/bin/sh\ncase "$1" in\n{lines}esac\n')
    path.chmod(0o755)


@pytest.mark.slow
@pytest.mark.parametrize("arm", [False, pytest.param(True, marks=pytest.mark.long)], ids=["native", "arm64"])
def test_faults_seeded_in_a_root_behind_adb_are_found(arm: bool, adb: Adb, capsys: pytest.CaptureFixture[str]) -> None:
    with start_machine(arm=arm, adb=True) as machine, adb.connected(machine) as serial:

        def examine(code: int) -> list[str]:
            capsys.readouterr()
            assert run_command(["doctor", "--on", f"adb:{serial}", "--json"]) == code
            report = json.loads(capsys.readouterr().out)
            assert report["facts"]["model"] == "Edge Fake 1"
            return [finding["id"] for finding in report["findings"]]

        for name, text in _SEEDS.items():
            path = machine.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        _program(machine.root / "system/bin/getprop", _SAYS)
        _program(machine.root / "system/bin/getconf", {"PAGE_SIZE": "4096"})
        # Android's own shell and tools answer the same; looking once at them is enough, as qemu runs each.
        if not arm:
            assert examine(0) == []
        _program(machine.root / "system/bin/getconf", {"PAGE_SIZE": "16384"})
        (machine.root / "vendor/lib/rfsa/adsp/libQnnHtpV75Skel.so").unlink()
        if not arm:
            assert examine(0) == ["pages", "skel"]
        (machine.root / "dev/fastrpc-cdsp").unlink()
        (machine.root / "vendor/etc/public.libraries.txt").write_text("libother.so\n")
        assert examine(1) == ["rpc-public", "rpc-device", "pages", "skel"]
        if not arm:
            others = {"ro.soc.manufacturer": "MediaTek", "ro.soc.model": "MT6989"}
            _program(machine.root / "system/bin/getprop", {**_SAYS, **others})
            assert "chip" in examine(1)


def test_a_phone_that_is_not_connected_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["doctor", "--on", "ssh:pi"]) == 2
    assert "adb:SERIAL" in capsys.readouterr().err
