"""The library for the iOS simulator: what is taken out of a framework, what is refused, and what its provider does."""

import json
import os
import plistlib
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest
from devices_models import assert_same_as_cpu, float_conv, make_job, require_device, text_model
from fixture_types import present
from onnx import helper, load, save

from edgekit.devices.find import find_device, install_device
from edgekit.devices.ios.compute import read_package
from edgekit.devices.ios.ios import ABI, LOADER, IosSimulator, map_imports, unpack_framework
from edgekit.devices.local.host import COREML
from edgekit.devices.observe import Observed, observe_placement, observe_target
from edgekit.devices.packages import CACHE, write_coreml
from edgekit.devices.release import Release
from edgekit.errors import DeviceError, EdgekitError, UsageError
from edgekit.evidence import Evidence
from edgekit.jobs.convert import ConvertOptions, CoreMlOptions, convert_for
from edgekit.model.model import Model, load_model
from edgekit.recipe import Recipe
from edgekit.target import load_target
from edgekit.verify.layers.on_device import look_at_layers

SLICE = "ios-arm64_x86_64-simulator/onnxruntime.framework"
TWO_PARTITIONS = "(float[1,4,8,8] x) => (float[1,4,8,8] y) { a = Relu(x) b = Acos(a) y = Sigmoid(b) }"
SLICED = "(float16[1,4,8,8] x) => (float16[1,2,8,8] y) <int64[1] s = {0}, int64[1] e = {2}, int64[1] a = {1}>"


@pytest.fixture
def device() -> IosSimulator:
    # zig compiles its C++ library first, for a minute and more: CI has not the time to install it.
    found = require_device("ios-sim", "coreml")
    assert isinstance(found, IosSimulator)
    return found


def object_of(imports: tuple[str, ...], *, cpu: int = 0x01000007) -> bytes:
    """A Mach-O object that defines one function and leaves others to be found."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name in ("_own", *imports))
    places = [names.index(name.encode() + b"\0") for name in ("_own", *imports)]
    symbols = struct.pack("<IBBHQ", places[0], 0x0F, 1, 0, 0)
    symbols += b"".join(struct.pack("<IBBHQ", place, 0x01, 0, 0, 0) for place in places[1:])
    at = 32 + 24
    head = struct.pack("<8I", 0xFEEDFACF, cpu, 3, 1, 1, 24, 0, 0)
    return head + struct.pack("<6I", 2, 24, at, len(imports) + 1, at + len(symbols), len(names)) + symbols + names


def archive_of(*members: bytes) -> bytes:
    """A static library as Apple's tools write it, with long names before the data."""
    out = b"!<arch>\n"
    for data in (b"an index", *members):
        name = b"a_long_name_of_an_object.o\0\0"
        head = f"#1/{len(name):<13}{0:<12}{0:<6}{0:<6}{644:<8}{len(name) + len(data):<10}`\n".encode()
        out += head + name + data + b"\n" * (len(data) % 2)
    return out


def universal_of(parts: Mapping[int, bytes]) -> bytes:
    at = 8 + 20 * len(parts)
    head, body = struct.pack(">4sI", b"\xca\xfe\xba\xbe", len(parts)), b""
    for cpu, part in parts.items():
        head += struct.pack(">5I", cpu, 3, at + len(body), len(part), 0)
        body += part
    return head + body


def framework_of(folder: Path, library: bytes, *, version: str = "1.29.0") -> Path:
    (folder / SLICE).mkdir(parents=True)
    (folder / SLICE / "onnxruntime").write_bytes(library)
    (folder / SLICE / "Info.plist").write_bytes(plistlib.dumps({"CFBundleShortVersionString": version}))
    return folder


def unpack(framework: Path) -> Release:
    return unpack_framework(framework, framework.parent, framework.parent, lambda _: None)


def test_the_object_for_this_cpu_is_taken_out_of_a_framework(tmp_path: Path) -> None:
    mine = object_of(("_open", "_OBJC_CLASS_$_NSData"))
    library = universal_of({0x0100000C: archive_of(object_of(())), 0x01000007: archive_of(mine)})
    found = unpack(framework_of(tmp_path / "onnxruntime.xcframework", library))
    assert (found.archive, found.version) == ("onnxruntime.xcframework", "1.29.0")
    assert found.imports == {ABI: ("_OBJC_CLASS_$_NSData", "_open")}
    assert (tmp_path / ABI / "onnxruntime.o").read_bytes() == mine


def bad_libraries() -> dict[str, tuple[bytes, str, str]]:
    mine = object_of(("_open",))
    good = universal_of({7: b"", 0x01000007: archive_of(mine)})
    return {
        "text": (b"no library", "1.29.0", "is no static library"),
        "arm only": (universal_of({0x0100000C: archive_of(mine)}), "1.29.0", "no part for x86-64"),
        "cut off": (good[:-60], "1.29.0", "is cut off"),
        "two objects": (archive_of(mine, mine), "1.29.0", "has 2 objects where one was expected"),
        "no object": (archive_of(b"text"), "1.29.0", "has 0 objects"),
        "other cpu": (archive_of(object_of((), cpu=0x0100000C)), "1.29.0", "its object is not for x86-64"),
        "cut object": (archive_of(mine[:40]), "1.29.0", "is damaged"),
        "too old": (good, "1.20.0", "is ONNX Runtime '1.20.0'"),
        "no version": (good, "new", "is ONNX Runtime 'new'"),
    }


@pytest.mark.parametrize("case", sorted(bad_libraries()))
def test_a_bad_framework_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    library, version, words = bad_libraries()[case]
    with pytest.raises(DeviceError, match=words) as caught:
        unpack(framework_of(tmp_path / "a.xcframework", library, version=version))
    assert "\n" not in caught.value.message
    assert caught.value.hint


def test_a_folder_that_is_no_framework_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no folder"):
        unpack(tmp_path / "a.xcframework")
    with pytest.raises(DeviceError, match="holds no ios-arm64_x86_64-simulator"):
        unpack(tmp_path)
    framework_of(tmp_path / "b.xcframework", b"")
    (tmp_path / "b.xcframework" / SLICE / "Info.plist").unlink()
    with pytest.raises(DeviceError, match="does not say its version"):
        unpack(tmp_path / "b.xcframework")


def test_names_are_those_of_this_machine_unless_something_stands_for_them() -> None:
    places = {
        "_open": "darwin_open", "_realpath$DARWIN_EXTSN": "darwin_realpath", "_strlen": "strlen",
        "__ZNSt3__15mutex4lockEv": "darwin__ZNSt3__15mutex4lockEv", "_OBJC_CLASS_$_NSData": "apple_object",
    }  # fmt: skip
    assert map_imports(places) == places


def test_the_simulator_is_refused_on_another_cpu_than_x86_64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEKIT_CACHE", str(tmp_path))
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    missing = present(IosSimulator().find_missing())
    assert (missing.reason, missing.command) == ("the simulator's code runs on x86-64 Linux only", None)
    with pytest.raises(DeviceError, match="cannot be installed here: the simulator's code"):
        install_device("ios-sim", lambda _: None)


@pytest.mark.parametrize("model_format", ["MLProgram", "NeuralNetwork"])
def test_the_provider_itself_places_the_nodes(device: IosSimulator, model_format: str, tmp_path: Path) -> None:
    target = load_target("coreml", {"model_format": model_format})
    seen = observe_placement(load_model(text_model(tmp_path / "m.onnx", TWO_PARTITIONS)), target, device)
    assert seen.failure is None
    assert (seen.providers["n0"], seen.providers["n1"]) == (COREML, "CPUExecutionProvider")


@pytest.mark.parametrize(("ios", "taken"), [("15", False), ("16", True)])
def test_the_target_says_the_release_of_ios(device: IosSimulator, ios: str, taken: bool, tmp_path: Path) -> None:
    """Core ML 6, which came with iOS 16, has 16-bit inputs of operators that Core ML 5 has not."""
    model = load_model(text_model(tmp_path / "m.onnx", f"{SLICED} {{ y = Slice(x, s, e, a) }}"))
    seen = observe_placement(model, load_target("coreml", {"ios": ios}), device)
    assert (seen.providers["n0"] == COREML) == taken


@pytest.mark.usefixtures("device")
def test_check_holds_its_rules_against_the_provider(tmp_path: Path) -> None:
    observed = observe_target(load_model(float_conv(tmp_path / "f.onnx")), load_target("coreml"))
    assert isinstance(observed, Observed)
    assert (observed.device, observed.evidence, observed.failure) == ("ios-sim", Evidence.SAME_EP, None)
    assert (observed.nodes, observed.taken, observed.disagreements) == (2, 2, ())


def test_the_format_neural_network_is_placed_and_not_computed(device: IosSimulator, tmp_path: Path, work: Path) -> None:
    """Nothing computes it here: a device that refused it would say "fail" of a bundle that may be right."""
    target = load_target("coreml", {"model_format": "NeuralNetwork"})
    job = make_job(float_conv(tmp_path / "f.onnx"), target, precision="fp32")
    run = device.run_job(job, work)
    assert "the model is a neural network: edgekit computes ML Programs only" in str(run.failure)
    missing = present(find_device("ios-sim", target).find_missing())
    assert missing.command is None
    assert missing.reason.startswith("it computes ML Programs alone, not the NeuralNetwork format")
    assert find_device("ios-sim", load_target("coreml")).find_missing() is None
    seen = observe_target(load_model(job.model), target)
    assert isinstance(seen, Observed)
    assert (seen.device, seen.failure, seen.taken) == ("ios-sim", None, seen.nodes)


def test_an_exception_of_onnxruntime_keeps_its_words(device: IosSimulator, tmp_path: Path, work: Path) -> None:
    """It is thrown and caught inside the library, through frames that Apple's compiler described."""
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"no model")
    job = msgspec.structs.replace(make_job(float_conv(tmp_path / "f.onnx"), "coreml"), model=broken)
    run = device.run_job(job, work)
    assert run.failure is not None
    assert "Load model from" in run.failure
    assert "Protobuf parsing failed" in run.failure


@pytest.mark.usefixtures("device")
def test_a_damaged_library_is_a_refusal(tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = LOADER.folder
    monkeypatch.setenv("EDGEKIT_CACHE", str(tmp_path))
    shutil.copytree(kept, LOADER.folder)
    library = LOADER.find_library(ABI)
    library.write_bytes(library.read_bytes()[: library.stat().st_size // 2])
    with_half = IosSimulator().run_job(make_job(float_conv(tmp_path / "f.onnx"), "coreml"), work)
    assert "is cut off" in str(with_half.failure)


def test_an_unknown_option_is_refused_before_the_run(device: IosSimulator, tmp_path: Path, work: Path) -> None:
    job = make_job(float_conv(tmp_path / "f.onnx"), "coreml")
    session = msgspec.structs.replace(job.target.session, provider_options={"Units": "ALL"}, platforms={})
    target = msgspec.structs.replace(job.target, session=session)
    with pytest.raises(EdgekitError, match="'Units' is no option"):
        device.run_job(msgspec.structs.replace(job, target=target), work)


def test_a_program_is_computed_in_its_precision(device: IosSimulator, tmp_path: Path, work: Path) -> None:
    """The weights of a float16 model become halves in the program; a float32 one is computed as it stands."""
    job = make_job(float_conv(tmp_path / "f.onnx"), "coreml", precision="fp32")
    run = device.run_job(job, work)
    assert (run.failure, run.outputs.count) == (None, job.samples.count)
    assert any("edgekit computed its 2 operations, 0 of them in half precision" in n for n in run.notes)
    assert_same_as_cpu(run, job, 5e-5)


def test_the_providers_program_is_computed(device: IosSimulator, tmp_path: Path, work: Path) -> None:
    """It writes Reciprocal as 1 / (x + 0.0001)."""
    model = text_model(tmp_path / "r.onnx", "(float[1,4,8,8] x) => (float[1,4,8,8] y) { y = Reciprocal(x) }")
    job = make_job(model, "coreml", precision="fp32")
    run = device.run_job(job, work)
    for sample, got in zip(job.samples, run.outputs, strict=True):
        assert np.allclose(got["y"], 1 / (sample["x"] + np.float32(1e-4)), rtol=1e-5)
        assert not np.allclose(got["y"], 1 / sample["x"], rtol=1e-5)


KEY = "0123456789abcdef0123456789abcdef"


def keyed_model(path: Path, body: str = TWO_PARTITIONS) -> Model:
    proto = load(str(text_model(path, body)))
    helper.set_model_props(proto, {"COREML_CACHE_KEY": KEY})
    save(proto, str(path))
    return load_model(path)


@pytest.mark.usefixtures("device")
def test_each_partition_is_a_package_that_holds_what_it_lists(tmp_path: Path) -> None:
    model = keyed_model(tmp_path / "m.onnx")
    files = write_coreml(model, load_target("coreml"), tmp_path / "out", packages=True, cache=False)
    made = [(package.name, package.operations) for package in files.packages]
    assert made == [("m.0.mlpackage", {"relu": 1}), ("m.1.mlpackage", {"sigmoid": 1})]
    assert files.cache is None
    folder = tmp_path / "out" / "m.1.mlpackage"
    items = json.loads((folder / "Manifest.json").read_text())["itemInfoEntries"].values()
    assert all((folder / "Data" / item["path"]).exists() for item in items)
    assert sorted(path.name for path in folder.iterdir()) == ["Data", "Manifest.json"]
    assert read_package(folder).outputs == ("y",)


@pytest.mark.usefixtures("device")
def test_the_provider_uses_a_cache_that_an_app_ships(tmp_path: Path) -> None:
    """The provider takes what it finds under the key and writes nothing again: a file of another content stays."""
    model, target = keyed_model(tmp_path / "m.onnx"), load_target("coreml")
    cache = present(write_coreml(model, target, tmp_path / "out", packages=False, cache=True).cache)
    assert (cache.folder, cache.key, cache.releases) == (CACHE, KEY, (16, 17, 18))
    files = [path for path in (tmp_path / "out" / CACHE).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) == cache.size_bytes
    for path in files:
        os.utime(path, (1, 1))
    seen = observe_placement(model, target, IosSimulator(cache=tmp_path / "out" / CACHE))
    assert seen.failure is None
    assert {path.stat().st_mtime for path in files} == {1.0}
    # Without one partition that is written anew, and only that.
    shutil.rmtree(tmp_path / "out" / CACHE / KEY / "1_static_mlprogram")
    observe_placement(model, target, IosSimulator(cache=tmp_path / "out" / CACHE))
    assert {path.stat().st_mtime == 1.0 for path in files if "0_static" in str(path)} == {True}
    assert {path.stat().st_mtime == 1.0 for path in files if "1_static" in str(path)} == {False}


@pytest.mark.usefixtures("device")
def test_releases_of_ios_that_partition_a_model_differently_share_no_cache(tmp_path: Path) -> None:
    """Core ML 6 of iOS 16 has 16-bit inputs that Core ML 5 has not."""
    model = keyed_model(tmp_path / "m.onnx", f"{SLICED} {{ z = Relu(x) y = Slice(z, s, e, a) }}")
    with pytest.raises(DeviceError, match="other partitions of 'm' on iOS 16 than on 15") as caught:
        write_coreml(model, load_target("coreml", {"ios": "15"}), tmp_path / "out", packages=False, cache=True)
    assert caught.value.hint == "--set ios=16, or leave --cache out"
    assert not (tmp_path / "out").exists()
    assert write_coreml(model, load_target("coreml"), tmp_path / "out", packages=False, cache=True).cache


@pytest.mark.usefixtures("device")
def test_a_model_of_which_the_provider_takes_nothing_has_no_package(tmp_path: Path) -> None:
    model = load_model(text_model(tmp_path / "m.onnx", "(float[4] x) => (float[4] y) { y = Acos(x) }"))
    with pytest.raises(DeviceError, match="takes nothing of 'm'"):
        write_coreml(model, load_target("coreml"), tmp_path / "out", packages=True, cache=False)


@pytest.mark.usefixtures("device")
def test_the_layer_that_the_provider_writes_otherwise_is_named(tmp_path: Path) -> None:
    """It writes Reciprocal as 1 / (x + 0.0001), which is far off where x is small."""
    body = "(float[1,4,8,8] x) => (float[1,4,8,8] y) <float small = {0.001}>"
    model = text_model(
        tmp_path / "m.onnx", body + " { a = Sigmoid(x) b = Mul(a, small) c = Reciprocal(b) y = Sqrt(c) }"
    )
    job = make_job(model, "coreml", precision="fp32")
    located = look_at_layers(IosSimulator(), job, tmp_path / "work", may_cut=False)
    assert (located.layer, located.found_by) == ("n2", "tensors")


@pytest.mark.usefixtures("device")
def test_convert_writes_packages_and_cache_next_to_the_files_of_the_target(tmp_path: Path) -> None:
    source = text_model(tmp_path / "m.onnx", "(float[1,4,8,8] x) => (float[1,4,8,8] y) { y = Relu(x) }")
    recipe = Recipe(targets=("coreml",), settings={"model_format": "NeuralNetwork"})
    wanted = ConvertOptions(coreml=CoreMlOptions(packages=True, cache=True), checked=False)
    report = convert_for(source, tmp_path / "out", recipe, wanted)
    assert report.coreml is not None
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"model.onnx", "model.runtime.ort", "model.mlmodel", CACHE}
    assert (tmp_path / "out" / CACHE / present(report.coreml.cache).key).is_dir()
