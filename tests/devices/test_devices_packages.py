"""What Core ML's provider wrote, kept: packages as Xcode opens them, and the cache as the provider finds it."""

import json
import os
import shutil
from pathlib import Path

import pytest
from devices_models import make_job, present, text_model
from onnx import helper, load, save

from edgekit.devices.ios.ios import IosSimulator
from edgekit.devices.ios.mil.compute import read_package
from edgekit.devices.observe import observe_placement
from edgekit.devices.packages import CACHE, match_operations, write_coreml
from edgekit.errors import DeviceError
from edgekit.jobs.convert import ConvertOptions, CoreMlOptions, convert_for
from edgekit.model.model import Model, load_model
from edgekit.recipe import Recipe
from edgekit.report.text import list_located
from edgekit.target import load_target
from edgekit.verify.layers.on_device import look_at_layers

KEY = "0123456789abcdef0123456789abcdef"
TWO_PARTITIONS = "(float[1,4,8,8] x) => (float[1,4,8,8] y) { a = Relu(x) b = Acos(a) y = Sigmoid(b) }"


@pytest.fixture(autouse=True)
def installed() -> None:
    present("ios-sim", "coreml")


def keyed_model(path: Path, body: str = TWO_PARTITIONS) -> Model:
    proto = load(str(text_model(path, body)))
    helper.set_model_props(proto, {"COREML_CACHE_KEY": KEY})
    save(proto, str(path))
    return load_model(path)


def test_each_partition_is_a_package_that_holds_what_it_lists(tmp_path: Path) -> None:
    model = keyed_model(tmp_path / "m.onnx")
    files = write_coreml(model, load_target("coreml"), tmp_path / "out", packages=True, cache=False)
    assert [(package.name, package.operations) for package in files.packages] == [
        ("m.0.mlpackage", {"relu": 1}),
        ("m.1.mlpackage", {"sigmoid": 1}),
    ]
    assert files.cache is None
    folder = tmp_path / "out" / "m.1.mlpackage"
    items = json.loads((folder / "Manifest.json").read_text())["itemInfoEntries"].values()
    assert all((folder / "Data" / item["path"]).exists() for item in items)
    assert sorted(path.name for path in folder.iterdir()) == ["Data", "Manifest.json"]
    assert read_package(folder).outputs == ("y",)


def test_an_app_that_ships_the_cache_gets_what_is_in_it(tmp_path: Path) -> None:
    """The provider takes what it finds under the key and writes nothing again: a file of another content stays."""
    model, target = keyed_model(tmp_path / "m.onnx"), load_target("coreml")
    cache = write_coreml(model, target, tmp_path / "out", packages=False, cache=True).cache
    assert cache is not None
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


def test_releases_of_ios_that_part_a_model_otherwise_have_no_common_cache(tmp_path: Path) -> None:
    """Core ML 6 of iOS 16 has 16-bit inputs that Core ML 5 has not."""
    body = "(float16[1,4,8,8] x) => (float16[1,2,8,8] y) <int64[1] s = {0}, int64[1] e = {2}, int64[1] a = {1}>"
    model = keyed_model(tmp_path / "m.onnx", body + " { z = Relu(x) y = Slice(z, s, e, a) }")
    with pytest.raises(DeviceError, match="other partitions of 'm' on iOS 16 than on 15") as caught:
        write_coreml(model, load_target("coreml", {"ios": "15"}), tmp_path / "out", packages=False, cache=True)
    assert caught.value.hint == "--set ios=16, or leave --cache out"
    assert not (tmp_path / "out").exists()
    assert write_coreml(model, load_target("coreml"), tmp_path / "out", packages=False, cache=True).cache


def test_a_model_of_which_the_provider_takes_nothing_has_no_package(tmp_path: Path) -> None:
    model = load_model(text_model(tmp_path / "m.onnx", "(float[4] x) => (float[4] y) { y = Acos(x) }"))
    with pytest.raises(DeviceError, match="takes nothing of 'm'"):
        write_coreml(model, load_target("coreml"), tmp_path / "out", packages=True, cache=False)


def test_operations_are_matched_to_the_nodes_that_they_are_made_of(tmp_path: Path) -> None:
    """One node may become several operations; names that MIL does not know are written otherwise."""
    body = "(float[1,4,8,8] x) => (float[1,4,8,8] y) <float one = {1.0}>"
    body += (
        " { a = HardSigmoid<alpha=0.2>(x) b = Max(a, one) c = Softplus(b) z = Acos(c) s = Sqrt(z) y = Max(s, x, one) }"
    )
    proto = load(str(text_model(tmp_path / "m.onnx", body)))
    for node in proto.graph.node:
        node.output[0] = {"a": "1/a:0", "b": "b.b"}.get(node.output[0], node.output[0])
        node.input[0] = {"a": "1/a:0", "b": "b.b"}.get(node.input[0], node.input[0])
    save(proto, str(tmp_path / "m.onnx"))
    found = match_operations(make_job(tmp_path / "m.onnx", "coreml", precision="fp32"))
    kinds = {name: [operation.kind for operation in operations] for name, operations in found.items()}
    assert kinds == {
        "n0": ["sigmoid_hard"],
        "n1": ["maximum"],
        "n2": ["softplus"],
        "n4": ["sqrt"],
        "n5": ["maximum", "maximum"],
    }


def test_the_layer_that_the_provider_writes_otherwise_is_named_as_in_the_program(tmp_path: Path) -> None:
    """It writes Reciprocal as 1 / (x + 0.0001), which is far off where x is small."""
    body = "(float[1,4,8,8] x) => (float[1,4,8,8] y) <float small = {0.001}>"
    model = text_model(
        tmp_path / "m.onnx", body + " { a = Sigmoid(x) b = Mul(a, small) c = Reciprocal(b) y = Sqrt(c) }"
    )
    job = make_job(model, "coreml", precision="fp32")
    located = look_at_layers(IosSimulator(), job, tmp_path / "work", may_cut=False)
    assert (located.layer, located.found_by) == ("n2", "tensors")
    assert located.operations["n2"] == ("inverse 'n2' (float)",)
    assert "'n2' in Core ML's program: inverse 'n2' (float)" in list(list_located(located))


def test_a_conversion_writes_them_beside_the_files_of_the_target(tmp_path: Path) -> None:
    source = text_model(tmp_path / "m.onnx", "(float[1,4,8,8] x) => (float[1,4,8,8] y) { y = Relu(x) }")
    recipe = Recipe(targets=("coreml",), settings={"model_format": "NeuralNetwork"})
    wanted = ConvertOptions(coreml=CoreMlOptions(packages=True, cache=True), checked=False)
    report = convert_for(source, tmp_path / "out", recipe, wanted)
    assert report.coreml is not None
    assert report.coreml.cache is not None
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"model.onnx", "model.runtime.ort", "model.mlmodel", CACHE}
    assert (tmp_path / "out" / CACHE / report.coreml.cache.key).is_dir()
