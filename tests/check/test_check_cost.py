"""What a check costs: it grows with the nodes, and the graph is made once for all targets."""

import cProfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import onnx
import pytest
from check_models import save_text

from edgekit.check.check import check_models
from edgekit.jobs.check import check_targets
from edgekit.model.model import load_model
from edgekit.recipe import Recipe
from edgekit.target import load_target


def _save_trees(count: int, path: Path) -> Path:
    """Writes trees as scikit-learn exports them: each feature is compared with a threshold, and leaves are summed."""
    trees = [
        f"f{at} = Gather<axis = 1>(x, i) l{at} = Less(f{at}, t) n{at} = Not(l{at}) c{at} = Cast<to = 1>(n{at})"
        f" s{at + 1} = Add(s{at}, c{at})"
        for at in range(count)
    ]
    net = "g (float[N,4] x) => (float[N,1] y) <float[1,1] t = {0.5}, int64[1] i = {2}, float[1,1] s0 = {0}>"
    return save_text(f"{net} {{ {' '.join(trees)} y = Neg(s{count}) }}", path)


def _count_calls(step: Callable[[], object]) -> int:
    profile = cProfile.Profile()
    profile.runcall(step)
    return sum(entry.callcount for entry in profile.getstats())


def test_the_graph_and_its_changes_are_made_once_for_all_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inferred = load_model(_save_trees(3, tmp_path / "m.onnx")), list[int]()
    real = onnx.shape_inference.infer_shapes

    def infer(proto: onnx.ModelProto, *, data_prop: bool = False) -> onnx.ModelProto:
        inferred[-1] += 1
        return real(proto, data_prop=data_prop)

    monkeypatch.setattr(onnx.shape_inference, "infer_shapes", infer)
    for names in (["coreml"], ["coreml", "nnapi", "xnnpack"]):
        inferred.append(0)
        reports = check_models(model, [load_target(name) for name in names])
        assert [report.target for report in reports] == names
    assert inferred[0] == inferred[1] > 1, inferred


def test_the_work_of_a_check_grows_as_the_nodes_do(tmp_path: Path) -> None:
    small, large = (_save_trees(count, tmp_path / f"{count}.onnx") for count in (20, 40))
    recipe = Recipe(targets=("coreml", "nnapi", "qnn"))
    check_targets(small, recipe)
    few, many = (_count_calls(partial(check_targets, path, recipe)) for path in (small, large))
    assert many <= 2.1 * few
