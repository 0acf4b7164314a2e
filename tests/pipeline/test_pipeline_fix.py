"""A build rewrites the graph for a target where that target then takes more, and only there."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from tiny_models import parse_model

from edgekit.cli.main import run_command
from edgekit.jobs.build import build
from edgekit.recipe import Data, Recipe
from edgekit.report.summary import BuildReport, BundleSummary

pytestmark = pytest.mark.slow

NET = """
<ir_version: 8, opset_import: ["" : 17]> g (float[1,4,8,8] x) => (float[1,5] y)
{ a = Conv<pads=[1,1,1,1]>(x, u)  h = HardSwish(a)  b = Conv<pads=[1,1,1,1]>(h, v)  i = HardSwish(b)
  p = GlobalAveragePool(i)  f = Flatten(p)  y = Gemm(f, w) }
"""


# Mirrored borders become Slice and Concat for NNAPI, which takes these; but quantized, its builder refuses that Concat.
MIRRORED = """
<ir_version: 8, opset_import: ["" : 17]> g (float[1,4,8,8] x) => (float[1,5] y) <int64[8] pads = {0,0,1,1,0,0,1,1}>
{ q = Pad<mode="reflect">(x, pads)  a = Conv(q, u)  r = Relu(a)  b = Conv<pads=[1,1,1,1]>(r, v)
  p = GlobalAveragePool(b)  f = Flatten(p)  y = Gemm(f, w) }
"""


@pytest.fixture
def swishing(tmp_path: Path) -> tuple[Path, Data]:
    """A net whose HardSwish NNAPI does not take and QNN does."""
    return _make(NET, tmp_path)


def _make(text: str, tmp_path: Path) -> tuple[Path, Data]:
    rng = np.random.default_rng(3)
    path = parse_model(text, tmp_path / "swishing.onnx")
    proto = onnx.load(path)
    for name, shape in {"u": (8, 4, 3, 3), "v": (8, 8, 3, 3), "w": (8, 5)}.items():
        proto.graph.initializer.append(numpy_helper.from_array(0.3 * rng.normal(size=shape).astype(np.float32), name))
    onnx.save(proto, path)
    np.savez(tmp_path / "data.npz", x=rng.normal(size=(24, 4, 8, 8)).astype(np.float32))
    return path, Data(source=str(tmp_path / "data.npz"))


def _find(report: BuildReport, target: str) -> BundleSummary:
    return next(bundle for bundle in report.bundles if bundle.target == target)


def _share(bundle: BundleSummary) -> tuple[bool, int]:
    assert bundle.check is not None
    left = {node.op for node in bundle.check.node_list if not node.taken}
    return "HardSwish" in left, bundle.check.partitions


def test_a_target_gets_the_rewrites_by_which_it_takes_more(swishing: tuple[Path, Data], tmp_path: Path) -> None:
    recipe = Recipe(targets=("nnapi", "qnn"))
    fixed = build(*swishing, tmp_path / "fixed", recipe, verify=False)
    plain = build(*swishing, tmp_path / "plain", Recipe(targets=("nnapi", "qnn"), fix=False), verify=False)
    assert _share(_find(plain, "nnapi"))[0]
    assert not _share(_find(fixed, "nnapi"))[0]
    assert _share(_find(fixed, "nnapi"))[1] < _share(_find(plain, "nnapi"))[1]
    assert any("split-hard-swish (2 nodes)" in note for note in _find(fixed, "nnapi").notes)
    # What has nothing to gain has the bytes that it has alone.
    models = [
        {name: sha for name, sha in _find(each, "qnn").files.items() if name.startswith("model")}
        for each in (fixed, plain)
    ]
    assert models[0] == models[1] != {}


def test_the_option_leaves_the_graph_and_how_to_make_it_again_says_so(
    swishing: tuple[Path, Data], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, data = swishing
    arguments = ["build", str(model), "--data", data.source, "--target", "nnapi", "--no-verify", "--no-fix"]
    run_command([*arguments, "--out", str(tmp_path / "out")])
    assert "rewritten for it" not in capsys.readouterr().out
    manifest = (tmp_path / "out" / "swishing-nnapi" / "manifest.json").read_text()
    assert "--no-fix" in manifest


def test_a_graph_is_left_as_it_is_where_the_rewritten_one_would_make_no_session(tmp_path: Path) -> None:
    report = build(*_make(MIRRORED, tmp_path), tmp_path / "out", Recipe(targets=("nnapi",)), verify=False)
    bundle = _find(report, "nnapi")
    assert bundle.notes[0].startswith("left as it is, because no session of the int8 model starts on nnapi")
    # What was dropped is not told.
    assert not any("pad-reflect" in note for note in bundle.notes)
    assert bundle.check is not None
    assert bundle.check.verdict != "no"
