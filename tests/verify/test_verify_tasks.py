"""Metrics of the task against figures worked out by hand, and their limits, which must say no."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundle_models import make_samples, save_classifier
from fixture_types import present
from msgspec.structs import replace
from verify_devices import from_list

from edgekit.bundle.golden import make_golden
from edgekit.data.intervals import interval_of_pairs
from edgekit.data.samples import Samples
from edgekit.data.sets import FOLDERS, Boxes, Label, read_task_labels
from edgekit.errors import DataError, EdgekitError, UsageError
from edgekit.model.tensors import Tensors
from edgekit.target import TaskLimit
from edgekit.verify.task_metrics import measure_task, prepare_auc, prepare_map, read_detections
from edgekit.verify.task_scores import TaskReport, check_class_labels, describe_difference, judge_task, measure_accuracy


def measure(
    name: str, reference: Sequence[Tensors], got: Sequence[Tensors], labels: Sequence[Label], **options: Any
) -> TaskReport:
    return measure_task(TaskLimit(name=name, **options), from_list(reference), from_list(got), labels)


def score(name: str, outputs: Sequence[Tensors], labels: Sequence[Label], **options: Any) -> float:
    return measure(name, outputs, outputs, labels, **options).reference


def ranked(*classes: int) -> list[Tensors]:
    return [{"y": np.eye(10, dtype=np.float32)[[best]] - np.arange(10) * 1e-3} for best in classes]


def spoken(*texts: str) -> list[Tensors]:
    return [{"t": np.array([text], dtype=object)} for text in texts]


def test_a_label_among_the_best_is_a_hit_and_a_constant_hits_one_class_only() -> None:
    assert score("top1", ranked(3, 4, 5, 6), [3, 4, 0, 1]) == 0.5
    assert (score("top3", ranked(9, 9), [1, 2]), score("top5", ranked(9, 9), [3, 4])) == (0.5, 0.5)
    assert [measure(name, ranked(9), ranked(8), [9]).lost for name in ("top1", "top3", "top5")] == [1, 1, 1]
    flat: list[Tensors] = [{"y": np.zeros((1, 10), np.float32)} for _ in range(10)]
    assert (score("top1", flat, list(range(10))), score("top5", flat, list(range(10)))) == (0.1, 0.1)


@pytest.mark.parametrize(
    ("output", "share"),
    [
        ({"y": np.array([[0, 9, 1]], np.float32)}, 1.0),
        ({"y": np.array([[0, 9, 1]], np.uint8)}, 1.0),
        ({"y": np.array([[9, 0, 1]], np.float32)}, 0.0),
        ({"y": np.array([[0, np.inf, 1]], np.float32)}, 0.0),
        ({"y": np.array([[False, True, False]])}, 0.0),
        ({"y": np.zeros((1, 0), np.float32)}, 0.0),
        ({"z": np.array([[0, 9, 1]], np.float32)}, 0.0),
    ],
)
def test_only_numbers_that_are_finite_have_a_first_class(output: Tensors, share: float) -> None:
    accuracy = present(measure_accuracy(from_list(ranked(1, 2)), from_list([output, *ranked(3)]), [1, 2]))
    assert (accuracy.reference, accuracy.got) == (1.0, share / 2)
    assert accuracy.interval == interval_of_pairs(2, 0, 2 - int(share))


def test_labels_must_be_classes_of_the_output(tmp_path: Path) -> None:
    model = save_classifier(tmp_path / "m.onnx", classes=5)
    for label, good in ((0, True), (4, True), (5, False), (-1, False)):
        golden = make_golden(model, make_samples(2), tmp_path / str(label), labels=(1, label))
        with contextlib.nullcontext() if good else pytest.raises(DataError, match=f"label {label} is no class .* of 5"):
            check_class_labels(golden)
    check_class_labels(make_golden(model, make_samples(2), tmp_path / "no labels"))


def test_samples_behind_one_that_cannot_be_read_count_as_wrong() -> None:
    def read() -> Iterator[Tensors]:
        yield from ranked(1, 2)
        raise DataError("the file ends here", hint="fetch it again")

    accuracy = measure_accuracy(from_list(ranked(1, 2, 3, 4)), Samples(source="s", count=4, read=read), [1, 2, 3, 4])
    assert accuracy is not None
    assert (accuracy.reference, accuracy.got) == (1.0, 0.5)


def test_texts_are_compared_as_they_are_and_by_their_edits() -> None:
    texts, labels = spoken("kitten", "same"), ["sitting", "same"]
    assert measure("exact-match", spoken("sitting", "same"), texts, labels).lost == 1
    assert score("edit-distance", texts, labels) == pytest.approx(3 / 11)


def test_wer_and_cer_count_errors_of_words_and_letters() -> None:
    texts, labels = spoken("the hat sat", "a dog"), ["the cat sat down", "a dog"]
    assert score("wer", texts, labels) == pytest.approx(2 / 6)
    assert score("cer", texts, labels) == pytest.approx(6 / 21)
    # Of a label without words all that is read is wrong.
    assert [score(name, spoken("a b", "c"), ["", "c"]) for name in ("wer", "cer")] == [2.0, 3.0]


def test_ctc_joins_repeats_and_drops_blanks() -> None:
    path = [0, 1, 1, 0, 1, 2, 2, 0]
    output: list[Tensors] = [{"y": np.eye(3, dtype=np.float32)[path][:, np.newaxis]}]
    assert score("exact-match", output, ["aab"], decoder="ctc-greedy", alphabet="ab") == 1.0
    assert score("exact-match", output, ["aab"], decoder="ctc-greedy", alphabet="_ab") == 1.0
    last: list[Tensors] = [{"y": np.eye(3, dtype=np.float32)[[2, 0, 0, 2, 0, 1]]}]
    assert score("exact-match", last, ["aab"], decoder="ctc-greedy", alphabet="ab", blank=-1) == 1.0
    ids: list[Tensors] = [{"y": np.array([2, 0, 1], np.int64)}]
    assert score("exact-match", ids, ["cab"], decoder="indices", alphabet="abc") == 1.0


def test_masks_overlap_by_class_over_all_samples() -> None:
    label = np.array([[0, 0], [1, 255]], np.uint8)
    found = np.zeros((1, 2, 2, 2), np.float32)
    found[0, 1, 0] = 1.0
    found[0, 1, 1] = 1.0
    for kind in (np.float32, np.uint8):
        assert score("miou", [{"y": found.astype(kind)}], [label]) == pytest.approx((0 / 2 + 1 / 3) / 2)
    assert score("miou", [{"y": np.array([[[0, 0], [1, 1]]], np.int64)}], [label]) == 1.0


def test_texts_are_judged_by_how_well_each_token_is_foreseen() -> None:
    # Two words with odds 3 to 1, then even odds; the last position does not count.
    scores = np.log(np.array([[[0.75, 0.25], [0.5, 0.5], [0.01, 0.99]]], np.float32)) + 7
    others = {"flat": np.zeros(3, np.float32), "other": np.zeros((1, 5), np.float32)}
    outputs, labels = [{**others, "y": scores}], [np.array([0, 1, -1])]
    assert score("perplexity", outputs, labels) == pytest.approx((0.75 * 0.5) ** -0.5, rel=1e-6)
    assert score("next-token", outputs, labels) == 0.5
    more, both = [*outputs, *outputs], [labels[0], np.array([1, -1, -1])]
    assert score("perplexity", more, both) == pytest.approx((0.75 * 0.5 * 0.25) ** (-1 / 3), rel=1e-6)
    assert score("next-token", more, both) == pytest.approx(1 / 3)
    assert score("perplexity", outputs, [np.array([-1, -1, -1])]) == 1.0
    far = [{"y": np.array([[[0.0, 2000.0]]], np.float32)}]
    assert np.isfinite(score("perplexity", far, [np.array([0])]))


def test_auc_is_the_area_under_the_curve_and_needs_both_kinds() -> None:
    outputs: list[Tensors] = [{"p": np.array([[1 - p, p]], np.float32)} for p in (0.1, 0.4, 0.35, 0.8)]
    assert score("auc", outputs, [0, 0, 1, 1]) == score("auc", outputs, [0, 0, 1, 1], positive=0) == pytest.approx(0.75)
    assert score("auc", [{"p": each["p"][:, 1]} for each in outputs], [0, 0, 1, 1]) == pytest.approx(0.75)
    # Of three pairs one is in order, one is not, and of the third both have the same score.
    assert score("auc", [outputs[place] for place in (0, 3, 1, 1)], [0, 0, 0, 1]) == pytest.approx(0.5)
    # A sample that the bootstrap draws twice counts twice, and one that it leaves out not at all.
    judge = prepare_auc([(0.1, 0.0), (0.4, 0.0), (0.35, 1.0), (0.8, 1.0)])
    assert [judge(np.array(drawn)) for drawn in ((1, 2, 1, 0), (2, 2, 0, 0))] == [pytest.approx(1 / 3), 0.5]
    for label in (0, 1):
        with pytest.raises(DataError, match="both kinds"):
            score("auc", outputs, [label] * 4)


def test_map_is_the_mean_average_precision_over_ten_overlaps() -> None:
    pytest.importorskip("pycocotools", reason="pip install pycocotools")
    box = (10.0, 10.0, 50.0, 50.0)
    labels = [Boxes(boxes=(box,), classes=(1,)), Boxes(boxes=(box,), classes=(1,))]
    right = {"boxes": np.array([box]), "scores": np.array([0.9]), "classes": np.array([1.0])}
    wrong = {**right, "boxes": np.array([box]) + 100.0}
    assert score("map", [right, right], labels) == pytest.approx(1.0)
    assert score("map", [right, wrong], labels) == pytest.approx(51 / 101, abs=0.01)
    assert score("map", [wrong, wrong], labels) == score("map", [right], [Boxes(boxes=(), classes=())]) == 0.0
    assert score("map", [{name: value[:0] for name, value in right.items()}] * 2, labels) == 0.0
    # An overlap of 0.68 counts at the limits 0.50 to 0.65 of ten.
    near = {**right, "boxes": np.array([box]) + 4.0}
    assert score("map", [near, near], labels) == pytest.approx(0.4)
    # COCO looks at up to 100 detections of an image.
    apart = np.array([box]) + 100.0 * np.arange(12)[:, None]
    many = {"boxes": apart, "scores": np.linspace(0.9, 0.5, 12), "classes": np.ones(12)}
    objects = Boxes(boxes=tuple(map(tuple, apart.tolist())), classes=(1,) * 12)
    assert score("map", [many], [objects]) == pytest.approx(1.0)
    # A class that a draw of the bootstrap leaves out does not count.
    detected = read_detections(right, labels[0], TaskLimit(name="map"))[1:]
    judge = prepare_map([(Boxes(boxes=(box,), classes=(kind,)), *detected) for kind in (1, 2)])
    assert [judge(np.array(drawn)) for drawn in ((1, 1), (2, 0), (0, 2))] == pytest.approx([0.5, 1.0, 0.0])
    report = measure("map", [right] * 40, [right] * 20 + [wrong] * 20, labels * 20, max_drop=5)
    assert present(report.interval)[0] < -0.5 < present(report.interval)[1] < -0.3
    assert judge_task(report, TaskLimit(name="map", max_drop=5.0)).verdict == "fail"
    renamed = [{"b": value["boxes"], "s": value["scores"], "c": value["classes"]} for value in (right, right)]
    assert score("map", renamed, labels, output="b,s,c") == pytest.approx(1.0)
    for output in ("", "b,s", "b,s,x"):
        with pytest.raises(DataError, match="map needs three outputs"):
            score("map", renamed, labels, output=output)


def test_psnr_compares_images_with_their_labels() -> None:
    label = np.full((4, 4), 100, np.uint8)
    report = measure("psnr", [{"y": np.full((1, 1, 4, 4), 101.0)}], [{"y": np.full((1, 1, 4, 4), 110.0)}], [label])
    assert report.reference == pytest.approx(20 * np.log10(255))
    assert report.difference == pytest.approx(-20.0)
    assert (report.unit, describe_difference(report)) == ("dB", "-20.00")
    assert score("psnr", [{"y": np.full((1, 4), 0.5)}], [np.full((1, 4), 0.6)]) == pytest.approx(20)
    assert score("psnr", [{"y": label}], [label]) == 100  # an image without any error


def test_a_users_function_is_a_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_metric.py").write_text(
        "def near(outputs, label):\n    return abs(float(outputs['y'].argmax()) - label), 2.0\n"
        "def plain(outputs, label):\n    return label\n"
        "def broken(outputs, label):\n    return 'much'\n"
        "def endless(outputs, label):\n    return 1.0, float('inf')\n"
        "def failing(outputs, label):\n    return 1 / 0\n"
    )
    assert [score(f"own_metric:{name}", ranked(3, 5), [4, 5]) for name in ("near", "plain")] == [0.25, 4.5]
    with pytest.raises(DataError, match="gave 'much'"):
        score("own_metric:broken", ranked(3), [4])
    with pytest.raises(DataError, match=r"gave \(1.0, inf\)"):
        score("own_metric:endless", ranked(3), [4])
    with pytest.raises(DataError, match="metric 'own_metric:failing' raises ZeroDivisionError: division by zero"):
        score("own_metric:failing", ranked(3), [4])
    with pytest.raises(UsageError, match="cannot load metric 'own_metric:none'"):
        score("own_metric:none", ranked(3), [4])


SQUARE, DIAGONAL = np.zeros((2, 2), np.int64), np.eye(2, dtype=np.int64)


@pytest.mark.parametrize(
    ("name", "output", "label", "options", "message"),
    [
        ("top2", ranked(1)[0], 1, {}, "there is no metric 'top2'"),
        ("top1", ranked(1)[0], 10, {}, "label 10 is no class"),
        ("top1", ranked(1)[0], 1, {"output": "z"}, "there is no output 'z'"),
        ("wer", spoken("a")[0], "a", {"decoder": "beam"}, "there is no decoder 'beam'"),
        ("exact-match", ranked(1)[0], "a", {"decoder": "ctc-greedy"}, "ctc-greedy cannot read float64"),
        ("exact-match", {"y": SQUARE}, "a", {"decoder": "ctc-greedy"}, "ctc-greedy cannot read int64"),
        ("perplexity", {"y": np.zeros((1, 4, 2))}, np.arange(3), {"output": "y"}, "do not fit a text of 3 tokens"),
        ("perplexity", {"y": np.zeros((1, 3, 2))}, np.arange(3), {}, "token 2 is no word of 2"),
        ("perplexity", {"y": np.zeros((1, 3, 2))}, np.ones(3), {}, "do not fit a text"),
        ("perplexity", {"y": np.zeros((1, 3, 2))}, np.arange(2), {}, "can read no output"),
        ("perplexity", {"y": np.zeros(3)}, np.arange(3), {"output": "y"}, r"scores \[3\] do not fit a text"),
        ("exact-match", ranked(1)[0], "a", {"decoder": "indices"}, "'indices' cannot read float64"),
        ("exact-match", {"y": 3 * DIAGONAL}, "a", {"decoder": "indices", "alphabet": "abc"}, "does not fit 3 classes"),
        ("miou", {"y": np.zeros((2, 3), np.int64)}, SQUARE, {}, r"a mask \[2, 3\] does not fit a label \[2, 2\]"),
        *(("miou", {"y": SQUARE}, wrong * DIAGONAL, {"ignore": 9}, "classes beyond 0 to 255") for wrong in (256, -1)),
        *(("miou", {"y": wrong * DIAGONAL}, SQUARE, {"ignore": 9}, "classes beyond 0 to 255") for wrong in (256, -1)),
        ("auc", ranked(1)[0], 1, {"positive": 10}, "positive = 10 is no class of 10"),
        ("psnr", {"y": np.zeros((1, 3))}, SQUARE, {"output": "y"}, r"an image \[1, 3\] does not fit a label \[2, 2\]"),
        ("map", {"boxes": np.ones(3), "scores": np.ones(1), "classes": np.ones(1)}, Boxes(boxes=(), classes=()), {},
         "hold 3 coordinates, 1 scores and 1 classes"),
        ("map", {"boxes": np.ones(4), "scores": np.ones(1), "classes": np.ones(2)}, Boxes(boxes=(), classes=()), {},
         "hold 4 coordinates, 1 scores and 2 classes"),
    ],
)  # fmt: skip
def test_what_a_metric_cannot_read_is_refused_with_what_does_not_fit(
    name: str, output: Tensors, label: Label, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(EdgekitError, match=message):
        score(name, [output], [label], **options)


@pytest.mark.parametrize(
    ("got", "why"),
    [
        (ranked(1, 2), "2 of 3 samples came back"),
        ([*ranked(1, 2), {"z": np.zeros(())}], "metric 'top1' can read no output of z"),
        ([*ranked(1, 2), {"y": np.full((1, 10), np.nan, np.float32)}], "output 'y' has values that are not finite"),
    ],
)
def test_a_sample_that_does_not_come_back_is_no_measurement(got: list[Tensors], why: str) -> None:
    report = measure("top1", ranked(1, 2, 3), got, [1, 2, 3], max_drop=50.0)
    assert (report.got, report.difference, report.mismatch) == (None, None, why)
    assert "was not measured on every sample" in judge_task(report, TaskLimit(name="top1", max_drop=50.0)).failures[0]


LIMIT = TaskLimit(name="top1", max_drop=0.5)


def agree(samples: int, wrong: int = 0) -> TaskReport:
    labels = [index % 10 for index in range(samples)]
    got = ranked(*[(label + 1) % 10 if index < wrong else label for index, label in enumerate(labels)])
    return measure("top1", ranked(*labels), got, labels)


def test_a_part_of_the_labelled_samples_fails_only_beyond_chance() -> None:
    for wrong, labelled, verdict in ((1, 8, "fail"), (1, 400, "not proven"), (6, 400, "fail"), (0, 400, "not proven")):
        report = replace(agree(8, wrong), labelled=labelled)
        assert judge_task(report, LIMIT).verdict == verdict, (wrong, labelled)
    (line,) = judge_task(replace(agree(8, 1), labelled=400), LIMIT).unproven
    assert "on 8 of 400 labelled samples" in line


def test_a_metric_may_be_limited_to_a_share_of_the_float_model() -> None:
    limit = TaskLimit(name="top1", min_share=0.98)
    assert judge_task(agree(600, 1), limit).verdict == "pass"
    report = agree(600, 8)
    assert (report.gained, report.lost, report.interval) == (0, 8, interval_of_pairs(600, 0, 8))
    found = judge_task(report, limit)
    assert found.verdict == "not proven"
    assert "could be 97.7%" in found.unproven[0]
    assert "samples would tell" in found.unproven[0]
    assert "is 97.0% of the float model's, less than 98.0%" in judge_task(agree(600, 18), limit).failures[0]


def test_a_part_of_the_samples_may_prove_that_a_least_value_is_missed() -> None:
    # A part of the samples tells enough where no luck with the others could reach the limit.
    part, ruined = (replace(agree(64, wrong), labelled=400) for wrong in (8, 57))
    assert "on 64 of 400 labelled samples" in judge_task(part, TaskLimit(name="top1", at_least=0.9)).unproven[0]
    assert judge_task(ruined, TaskLimit(name="top1", at_least=0.9)).failures == ("metric 'top1' is 10.9%, below 0.9",)


def test_of_a_metric_that_counts_errors_more_is_worse() -> None:
    labels = [f"word{index} same" for index in range(60)]
    got = [label if index % 2 else "same" for index, label in enumerate(labels)]
    report = measure("edit-distance", spoken(*labels), spoken(*got), labels)
    assert present(report.interval)[0] > 0
    assert "points worse" in judge_task(report, TaskLimit(name="edit-distance", max_drop=5.0)).failures[0]
    assert judge_task(report, TaskLimit(name="edit-distance", max_drop=90.0)).verdict == "pass"
    few, enough = (measure("edit-distance", spoken(*part), spoken(*part), part) for part in (labels[:29], labels[:30]))
    assert "too few samples (29)" in judge_task(few, TaskLimit(name="edit-distance", max_drop=5.0)).unproven[0]
    assert enough.interval == (0.0, 0.0)


def test_labels_of_every_form_are_read(tmp_path: Path) -> None:
    samples = Samples(source="s", count=2, read=lambda: iter(()), class_names=("dog", "cat"))
    (tmp_path / "l.txt").write_text("ein Wort\nzwei Worte\n")
    np.save(tmp_path / "l.npy", np.zeros((2, 4, 4), np.uint8))
    (tmp_path / "l.json").write_text(
        json.dumps([{"boxes": [[0, 0, 1, 1]], "classes": [3]}, {"boxes": [], "classes": []}])
    )
    assert read_task_labels(tmp_path / "l.txt", "text", samples)[1] == "zwei Worte"
    assert np.asarray(read_task_labels(tmp_path / "l.npy", "array", samples)[1]).shape == (4, 4)
    assert read_task_labels(tmp_path / "l.json", "boxes", samples)[0] == Boxes(boxes=((0, 0, 1, 1),), classes=(3,))
    assert read_task_labels(FOLDERS, "class", samples) == (1, 0)
    assert [len(read_task_labels(tmp_path / f"l.{kind}", "any", samples)) for kind in ("txt", "npy", "json")] == [2] * 3


@pytest.mark.parametrize(("name", "kind"), [("l.json", "boxes"), ("l.npy", "array"), ("none.txt", "text")])
def test_labels_that_are_none_are_refused(tmp_path: Path, name: str, kind: Any) -> None:
    (tmp_path / "l.json").write_text('[{"boxes": [[0, 0]], "classes": [1]}]')
    (tmp_path / "l.npy").write_bytes(b"nothing")
    samples = Samples(source="s", count=1, read=lambda: iter(()))
    with pytest.raises(EdgekitError, match=name):
        read_task_labels(tmp_path / name, kind, samples)
