"""The CPU of a phone: the table, the settings that choose from it, and what the process then sees."""

from pathlib import Path

import numpy as np
import pytest
from devices_models import float_conv, make_job, qdq_conv, require_device, run_in
from fixture_types import Shown

from edgekit.devices.android.android import DEFAULT_CORE, Android, enter_phone, find_core, read_phones
from edgekit.devices.android.network import Driver, read_driver
from edgekit.devices.device import DeviceRun
from edgekit.devices.find import DeviceChoice, choose_devices, find_device
from edgekit.errors import UsageError
from edgekit.target import load_target

pytestmark = pytest.mark.slow

# What edgekit's runner tells of a CPU of Arm (tools/runner/src/machine.cpp).
TOLD = {
    "asimd", "aes", "crc32", "atomics", "fphp", "asimdhp", "asimddp", "sve", "asimdfhm", "sve2", "i8mm", "bf16", "sme",
}  # fmt: skip
CORES = read_phones().cores


def features_of(name: str) -> set[str]:
    return set(find_core(name).features.split())


def richest_of(qemu: str) -> str:
    """The core with the most features among those that a CPU of qemu runs."""
    return max((name for name, core in CORES.items() if core.qemu == qemu), key=lambda name: len(features_of(name)))


def test_each_phone_has_cores_that_are_known_and_a_source() -> None:
    table = read_phones()
    assert DEFAULT_CORE in table.cores
    for phone in table.phones.values():
        assert set(phone.cores) <= set(table.cores)
        assert phone.title
        assert phone.source


OF_QEMU = sorted({core.qemu for core in CORES.values()})
USUAL = find_core(DEFAULT_CORE).qemu
"""That of the device itself."""


@pytest.mark.parametrize("qemu", [pytest.param(qemu, marks=[pytest.mark.long] * (qemu != USUAL)) for qemu in OF_QEMU])
def test_qemu_has_the_cpu_features_of_the_table(qemu: str, tmp_path: Path, work: Path) -> None:
    """What the richest core has is there, so what the others of that CPU have is there too."""
    name = richest_of(qemu)
    device = Android(cpu=name)
    require_device("android", "xnnpack")
    run = device.run_job(make_job(float_conv(tmp_path / "f.onnx"), "cpu"), work)
    assert run.failure is None
    assert set(run.cpu_features) == features_of(name) & TOLD
    assert all(features_of(other) <= features_of(name) for other, core in CORES.items() if core.qemu == qemu)


@pytest.mark.parametrize("name", CORES)
def test_the_phone_s_files_and_its_hwcaps_say_the_same(name: str, tmp_path: Path) -> None:
    core = find_core(name)
    words = enter_phone(name, ("qemu",), tmp_path)
    assert words[2:] == ("qemu", "-cpu", core.qemu)
    lines = (tmp_path / "phone" / "proc" / "cpuinfo").read_text().split("\n\n")[0].splitlines()
    facts = {key.strip(): value.strip() for key, value in (line.split(":") for line in lines)}
    assert facts["Features"] == core.features
    numbers = [int(facts[f"CPU {key}"], 0) for key in ("implementer", "variant", "part", "revision")]
    assert numbers == [core.implementer, core.variant, core.part, core.revision]
    assert sum(word.bit_count() for word in core.hwcaps) == len(core.features.split())


def test_hwcaps_have_the_bits_of_linux() -> None:
    """HWCAP_FP is bit 0, HWCAP_ASIMDDP bit 20, HWCAP2_SVE2 bit 1, HWCAP2_I8MM bit 13."""
    first, second = find_core("cortex-a76").hwcaps
    assert (first & 1, first >> 20 & 1, first >> 22 & 1, second) == (1, 1, 0, 0)
    first, second = find_core("cortex-a510").hwcaps
    assert (first >> 22 & 1, second >> 1 & 1, second >> 13 & 1, second >> 14 & 1) == (1, 1, 1, 0)


def test_features_that_qemu_has_and_the_phone_lacks_are_hidden(tmp_path: Path, work: Path) -> None:
    """The Cortex-A76 of qemu has dot products; the kernel of a Galaxy S9 tells of none, that of a Cortex-A55 does.

    What both compute, with kernels of their own, lies on one grid.
    """
    require_device("android", "xnnpack")
    model, runs = qdq_conv(tmp_path / "q.onnx", np.int8), list[DeviceRun]()
    for cpu in ("kryo-385-silver", "cortex-a55"):
        runs.append(run_in(Android(cpu=cpu), make_job(model, "xnnpack"), work / cpu))
        assert runs[-1].failure is None
        assert "asimddp" in features_of(richest_of(find_core(cpu).qemu))
        assert set(runs[-1].cpu_features) == features_of(cpu) & TOLD
    assert "the phone's CPU: kryo-385-silver, with asimd, aes, crc32, atomics, fphp, asimdhp" in runs[0].notes
    assert [("asimddp" in run.cpu_features) for run in runs] == [False, True]
    rows = [[row["y"] for row in run.outputs] for run in runs]
    assert all(np.abs(a - b).max() <= 1 / 16 + 1e-6 for a, b in zip(*rows, strict=True))


def with_settings(settings: dict[str, str], name: str = "android", target: str = "nnapi") -> list[str]:
    chosen = load_target(target)
    return [device.name for device in find_device(name, chosen).with_settings(settings, chosen) or ()]


def test_settings_name_cores_and_phones() -> None:
    assert with_settings({}) == ["android"]
    assert with_settings({"cpu": "cortex-a53"}) == ["android:cortex-a53"]
    assert with_settings({"cpu": "cortex-a76"}) == ["android"]
    assert with_settings({"cpu": "cortex-a53, cortex-a55,cortex-a53"}) == ["android:cortex-a53", "android:cortex-a55"]
    pixel = [f"android:pixel-6:{core}" for core in ("cortex-x1", "cortex-a76", "cortex-a55")]
    assert with_settings({"phone": "pixel-6"}) == pixel
    assert find_device("host", load_target("cpu")).with_settings({"cpu": "x"}, load_target("cpu")) is None


@pytest.mark.parametrize(
    ("settings", "name", "target", "words"),
    [
        ({"cpu": "cortex-a35"}, "android", "nnapi", "there is no cpu 'cortex-a35'"),
        ({"phone": "pixl-6"}, "android", "nnapi", "there is no phone 'pixl-6' .did you mean 'pixel-6'"),
        ({"core": "x"}, "android", "nnapi", "device 'android' has no setting 'core'"),
        ({"cpu": "cortex-a53", "phone": "pixel-6"}, "android", "nnapi", "both name the CPU"),
        ({"phone": "pixel-6"}, "android:x86_64", "nnapi", "--set phone means nothing for 'android:x86_64'"),
        ({"driver": "d.toml"}, "android", "xnnpack", "--set driver means nothing for XnnpackExecutionProvider"),
        ({"driver": "nothing.toml"}, "android", "nnapi", "cannot read 'nothing.toml'"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, str], name: str, target: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        with_settings(settings, name, target)
    assert caught.value.hint


@pytest.mark.parametrize(("name", "hint"), [("cortex-a53", "--set cpu=cortex-a53"), ("pixel-6", "--set phone=pixel-6")])
def test_the_name_of_a_core_or_phone_is_no_device_but_a_setting(name: str, hint: str) -> None:
    with pytest.raises(UsageError, match=f"'{name}' is a setting of 'android'") as caught:
        find_device(f"android:{name}", load_target("nnapi"))
    assert str(caught.value.hint).endswith(hint)


def test_settings_reach_the_devices_that_take_them() -> None:
    target = load_target("nnapi")
    choice = DeviceChoice(names=("host", "android"), settings={"cpu": "cortex-a53,cortex-a72"})
    names = [device.name for device in choose_devices(choice, lambda _: target, default=())]
    assert names == ["host", "android:cortex-a53", "android:cortex-a72"]
    with pytest.raises(UsageError, match="--set cpu means nothing for host"):
        choose_devices(DeviceChoice(names=("host",), settings={"cpu": "x"}), lambda _: target, default=())


def test_a_listed_device_has_settings(tmp_path: Path) -> None:
    target = load_target("nnapi")
    (tmp_path / "driver.toml").write_text('name = "npu"\n')
    file = tmp_path / "devices.toml"
    file.write_text(
        '[[device]]\nname = "old"\ndevice = "android"\nsettings = { cpu = "cortex-a53", driver = "driver.toml" }\n'
        '[[device]]\nname = "new"\ndevice = "android"\nsettings = { phone = "pixel-6" }\n'
    )
    devices = choose_devices(DeviceChoice(file=file), lambda _: target, default=())
    assert [device.name for device in devices] == ["old", "new:cortex-x1", "new:cortex-a76", "new:cortex-a55"]
    file.write_text('[[device]]\nname = "pc"\ndevice = "host"\nsettings = { cpu = "cortex-a53" }\n')
    with pytest.raises(UsageError, match="'settings' of device 'pc' mean nothing for 'host'"):
        choose_devices(DeviceChoice(file=file), lambda _: target, default=())


def test_a_driver_is_read(tmp_path: Path) -> None:
    path = tmp_path / "driver.toml"
    path.write_text('name = "npu"\nrefused = ["SOFTMAX", "CONV_2D"]\nfeature_level = 29\n')
    driver = read_driver(path)
    assert driver == Driver(name="npu", refused=("SOFTMAX", "CONV_2D"), feature_level=29)
    assert driver.numbers == (3, 25)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("refused = [", "is malformed"),
        ("refused = 3", "is malformed"),
        ('refused = ["Softmax"]', "refuses 'Softmax', which is no operation of NNAPI .* .did you mean 'SOFTMAX'"),
        ('refused = ["xyzzy"]', "NeuralNetworksTypes.h"),
        ('refuse = ["SOFTMAX"]', "unknown field `refuse` .did you mean 'refused'"),
        ("feature_level = 26", "has no feature level of NNAPI: 26"),
        ('name = "a b\\n"', "is malformed"),
    ],
)
def test_a_wrong_driver_is_refused_in_one_line(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "driver.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=words) as caught:
        read_driver(path)
    assert "\n" not in str(caught.value)


def test_bench_takes_android(tmp_path: Path, shown: Shown) -> None:
    require_device("android:x86_64", "xnnpack")
    model = str(float_conv(tmp_path / "f.onnx"))
    told = shown(["bench", model, "--on", "android:x86_64", "--runs", "2", "--json"])
    assert '"provider": "XnnpackExecutionProvider"' in told
