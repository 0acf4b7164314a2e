"""The forecast: what it counts, what moves it, when it refuses, and what it was worth on families left out."""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from demo_paths import MODEL
from fixture_types import Shown, present
from tiny_models import parse_model, save_net, write_small_net

from edgekit.bench.bench import BenchReport, BenchRun
from edgekit.bench.history import record_bench
from edgekit.cli.main import run_command
from edgekit.errors import DataError, UsageError
from edgekit.evidence import Evidence
from edgekit.forecasts.features import Traffic, join_graph, list_amounts, measure_work, read_plan
from edgekit.forecasts.forecast import KnownTime
from edgekit.forecasts.model import Bits, load_fitted, load_phones, load_table
from edgekit.graph.inference import infer_model
from edgekit.jobs.forecast import forecast, parse_cpu_times, parse_measured, read_history
from edgekit.phones import find_phone
from edgekit.report import timing
from edgekit.report.pages import make_page
from edgekit.report.timing import describe_cpu, draw_devices, headline_forecast, list_forecast_remarks
from edgekit.target import load_target


def _conv(path: Path, channels: int, *, size: str = "56") -> Path:
    shape = f"1,{channels},{size},{size}"
    weights = np.random.default_rng(0).normal(size=(channels, channels, 3, 3)).astype(np.float32)
    text = f"(float[{shape}] x) => (float[{shape}] y) {{ a = Conv<pads=[1,1,1,1]>(x, w)  y = Relu(a) }}"
    return save_net(text, path, w=weights).path


def test_work_counts_channels_in_blocks_of_32(tmp_path: Path) -> None:
    work = measure_work(join_graph(infer_model(onnx.load(_conv(tmp_path / "a.onnx", 48)))))
    assert (work.macs, work.kinds["matrix"]) == (56 * 56 * 48 * 48 * 9, 56 * 56 * 64 * 64 * 9)
    # The Relu is done as the convolution writes.
    assert (work.kinds["nodes"], work.kinds["vector"]) == (1, 0)
    assert work.kinds["outside"] == 2 * 56 * 56 * 48


def test_a_known_network_is_forecast_near_its_time_and_itself_is_the_nearest() -> None:
    model, networks = load_fitted()
    fitted = model.precisions["float"]
    measured = load_table().find_rows(load_table().find_key("resnet50"), "float")["Samsung Galaxy S25"].ms
    assert fitted.sum(list_amounts(networks["resnet50"].kinds)) == pytest.approx(measured, rel=0.5)


def test_a_forecast_has_the_lowest_evidence(tmp_path: Path) -> None:
    report = forecast(_conv(tmp_path / "a.onnx", 32), ["Galaxy S24"])
    assert report.evidence == Evidence.FORECAST.value
    assert all(one.is_at_least(Evidence.FORECAST) for one in Evidence)
    for row in report.rows:
        assert present(row.low_ms) < present(row.ms) < present(row.high_ms)


def test_one_time_moves_every_other_device_and_narrows_it(tmp_path: Path) -> None:
    path, phones = _conv(tmp_path / "a.onnx", 64), ["Galaxy S24", "Galaxy S25"]
    before = forecast(path, phones, ["float"]).rows
    assert before[1].ms is not None
    known = KnownTime(device=before[1].device, precision="float", ms=3 * before[1].ms)
    after = forecast(path, phones, ["float"], [known]).rows
    assert (after[1].basis, after[1].ms, after[0].basis) == ("measured", known.ms, "recalibrated")
    # The ratio of the two devices is what it was: log ms = model + device.
    assert after[0].ms == pytest.approx(3 * (before[0].ms or 0), rel=1e-3)
    widths = [(row.high_ms or 0) / (row.low_ms or 1) for row in (before[0], after[0])]
    assert widths[1] < widths[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Galaxy S25", "no time"), ("Galaxy S25=-1ms", "no time"), ("Galaxy S25=nanms", "no time"),
        ("Galaxy S25=1e9ms", "no time"), ("=1ms", "no time"), ("Galaxy S25=1.9", "no time"),
        ("Galxy S25=1ms", "Galaxy S25"), ("Galaxy S25:w7=1ms", "w8a8"),
    ],
)  # fmt: skip
def test_hostile_times_are_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_measured(text, ("float",))


def test_a_time_of_another_network_is_refused(tmp_path: Path) -> None:
    known = parse_measured("Galaxy S25=5s", ("float",))
    with pytest.raises(UsageError, match="cannot be of this network"):
        forecast(_conv(tmp_path / "a.onnx", 32), ["Galaxy S24"], ["float"], [known])


_RUN = BenchRun(
    device="adb:R5CT1234",
    evidence=Evidence.DEVICE,
    provider="QNNExecutionProvider",
    median_ms=0.5,
    versions={"soc": "SM8650"},
)


def test_a_time_that_bench_recorded_on_a_phone_moves_the_others(tmp_path: Path) -> None:
    path, history = _conv(tmp_path / "a.onnx", 64), tmp_path / "bench.sqlite"
    early = msgspec.structs.replace(_RUN, median_ms=9.0)
    # What an emulator took, a batch, a failure, and another model are no times of this one on a phone.
    others = (
        msgspec.structs.replace(_RUN, median_ms=7.0, evidence=Evidence.SIMULATOR),
        msgspec.structs.replace(_RUN, median_ms=7.0, batch=4),
        msgspec.structs.replace(_RUN, median_ms=7.0, failure="it died"),
        msgspec.structs.replace(_RUN, median_ms=7.0, provider="CPUExecutionProvider"),
    )
    for runs in ((early,), (_RUN, *others)):
        record_bench(history, BenchReport(subject="a.onnx", runs=runs))
    record_bench(history, BenchReport(subject="b.onnx", runs=(early,)))
    report = forecast(path, ["Galaxy S24", "Galaxy S25"], ["float"], read_history(history, path))
    assert [(time.device, time.ms, time.source) for time in report.known] == [
        ("Samsung Galaxy S24", 0.5, "bench 2 of bench.sqlite")
    ]
    assert [row.basis for row in report.rows] == ["measured", "recalibrated"]
    assert any("bench 2 of bench.sqlite" in remark for remark in report.remarks)


def test_a_history_without_a_time_of_this_model_on_a_phone_is_refused(tmp_path: Path) -> None:
    path, history = _conv(tmp_path / "a.onnx", 64), tmp_path / "bench.sqlite"
    with pytest.raises(DataError):
        read_history(history, path)
    record_bench(history, BenchReport(subject="b.onnx", runs=(_RUN,)))
    with pytest.raises(UsageError, match=r"no time of 'a\.onnx' on the NPU"):
        read_history(history, path)
    record_bench(history, BenchReport(subject="a.onnx", runs=(msgspec.structs.replace(_RUN, versions={"soc": "X"}),)))
    with pytest.raises(UsageError, match="its chip is 'X'"):
        read_history(history, path)


def test_a_cpu_at_hand_is_forecast_from_another_model_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small, large = _conv(tmp_path / "small.onnx", 32), _conv(tmp_path / "large.onnx", 128)
    (row,) = forecast(large, ["iPhone 17"], ["float"], parse_cpu_times(f"{small}=2ms")).rows[:1]
    assert (row.basis, row.device) == ("scaled", "the CPU that ran small.onnx")
    assert row.ms is not None
    assert row.low_ms is not None
    assert row.high_ms is not None
    # 16 times the products, and less than that of everything else.
    assert 2 * 2 < row.ms < 16 * 2
    assert row.low_ms * 2 < row.high_ms
    assert row.low_ms < row.ms < row.high_ms
    (same,) = forecast(small, ["iPhone 17"], ["float"], parse_cpu_times(f"{small}=2ms")).rows[:1]
    assert same.ms == pytest.approx(2)
    history = tmp_path / "bench.sqlite"
    host = msgspec.structs.replace(_RUN, device="host", provider="CPUExecutionProvider", evidence=Evidence.SAME_EP)
    record_bench(history, BenchReport(subject="small.onnx", runs=(host,)))
    assert run_command(["forecast", str(large), "--device", "S24", "--on-cpu", f"{small}={history}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][-1]["device"] == "host (cpu)"


@pytest.mark.parametrize(
    "text", ["a.onnx", "=12ms", "a.onnx=", "a.onnx=-1ms", "a.onnx=nan", "a.onnx=0ms", "a.onnx=12", "a.onnx=1e9ms"]
)
def test_hostile_times_on_a_cpu_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_cpu_times(text)


def test_devices_with_one_number_of_the_soc_are_forecast_alike(tmp_path: Path) -> None:
    rows = forecast(_conv(tmp_path / "a.onnx", 64), ["Galaxy S23", "QCS8550"], ["float", "w8a8"]).rows
    assert [row.ms for row in rows[:2]] == [row.ms for row in rows[2:]]


def test_the_precision_that_is_mostly_fastest_is_recommended_unless_known_times_differ(tmp_path: Path) -> None:
    path = _conv(tmp_path / "a.onnx", 64)
    bits: tuple[Bits, ...] = ("float", "w8a8")
    before = forecast(path, ["Galaxy S24"], bits)
    words = next(list_forecast_remarks(before))
    assert "w8a8 forecast to be the fastest, as it was in most" in words
    assert "although" not in words
    # So little work that the table's times say the opposite.
    small = forecast(_conv(tmp_path / "b.onnx", 1), ["Galaxy S24"], bits)
    assert "although the uncertain times above say otherwise" in next(list_forecast_remarks(small))
    ms = before.rows[0].ms or 0
    known = [
        KnownTime(device="Samsung Galaxy S25", precision=bit, ms=ms * by) for bit, by in zip(bits, (1, 2), strict=True)
    ]
    assert "float is forecast to be the fastest" in next(
        list_forecast_remarks(forecast(path, ["Galaxy S24"], bits, known))
    )


def test_open_sizes_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: Callable[..., str]
) -> None:
    path = _conv(tmp_path / "a.onnx", 32, size="n")
    assert "--dim n=" in refused("forecast", str(path))
    assert run_command(["forecast", str(path), "--dim", "n=56", "--device", "S24", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["ms"] > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "Galxy S24"], "Samsung Galaxy S24"), (["--device", "8 Elite"], "several devices"),
        (["--precision", "w8a32"], "did you mean"), (["--all", "--device", "S24"], "contradict"),
        (["--max-ms", "nan"], "no number"),
    ],
)  # fmt: skip
def test_unknown_names_get_the_nearest_one(arguments: list[str], said: str, refused: Callable[..., str]) -> None:
    assert said in refused("forecast", str(MODEL), *arguments)


def test_a_time_limit_is_met_missed_or_not_proven(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["forecast", str(MODEL), "--device", "Galaxy S24", "--precision", "w8a8", "--json"]
    assert run_command(command) == 0
    row = json.loads(capsys.readouterr().out)["rows"][0]
    limits = {row["high_ms"] * 2: 0, row["low_ms"] / 2: 1, (row["ms"] + row["high_ms"]) / 2: 3}
    for limit, code in limits.items():
        assert run_command([*command, "--max-ms", str(limit)]) == code


def test_chips_and_precisions_without_measurements_get_no_figure(tmp_path: Path) -> None:
    report = forecast(_conv(tmp_path / "a.onnx", 32), ["iPhone 17", "Pixel 9", "Dimensity 9400"], ["float"])
    assert [row.ms for row in report.rows] == [None] * 3
    assert "Neural Engine" in report.rows[0].note
    assert report.rows[0].placing is not None
    assert report.rows[0].placing.taken
    # Work, partitions and bytes are told all the same.
    assert "multiply-accumulates" in headline_forecast(report)
    assert describe_cpu(report.rows[0]) == "none, in one partition"
    rows = forecast(_conv(tmp_path / "a.onnx", 32), ["RB3 Gen 2"]).rows
    assert [row.ms is None for row in rows] == [True, False, False]
    assert rows[0].note == "its NPU computes no floats"


def test_a_network_unlike_all_measured_ones_gets_a_note_and_a_wide_interval(tmp_path: Path) -> None:
    path = parse_model(
        "g (float[1,64,4096,4096] x) => (float[1,64,4096,4096] y){ a = Exp(x) b = Sin(a) y = Exp(b) }",
        tmp_path / "a.onnx",
    )
    report = forecast(path, ["Galaxy S24"], ["float"])
    assert report.unlike == ("float",)
    row, near = report.rows[0], forecast(_conv(tmp_path / "b.onnx", 64), ["Galaxy S24"], ["float"]).rows[0]
    assert (row.high_ms or 0) / (row.low_ms or 1) > 2 * (near.high_ms or 0) / (near.low_ms or 1)


def test_the_data_name_their_sources() -> None:
    table = load_table()
    assert (table.package, table.version, table.licence) == ("qai-hub-models", "0.65.0", "BSD-3-Clause")
    assert "Redistributions in binary form must reproduce" in table.notice
    rows = (row for one in table.rows.values() for two in one.values() for three in two.values() for row in three)
    assert sum(1 for _ in rows) == 14683


def test_the_page_draws_each_device_and_escapes(tmp_path: Path) -> None:
    report = forecast(_conv(tmp_path / "a.onnx", 32), ["Galaxy S24", "Galaxy S25"])
    chart = draw_devices(report)
    assert chart is not None
    assert len([mark for mark in chart.marks if mark.label]) == 2
    bars, dots = (
        [one for one in chart.marks if not one.label and bool(one.radius) is round_] for round_ in (False, True)
    )
    assert len(bars) == 6
    assert all(bar.x <= dot.x <= bar.x + bar.width for bar, dot in zip(bars, dots, strict=True))
    hostile = msgspec.structs.replace(report, model="<script>alert(1)</script>")
    page = make_page("forecast", timing, report=hostile)
    assert "<script>alert(1)" not in page


def test_nodes_on_the_cpu_are_named_and_widen_the_interval(tmp_path: Path) -> None:
    widths: list[float] = []
    for op, left in (("Exp", {}), ("Acos", {"Acos": 1})):
        body = f"g (float[1,8,32,32] x) => (float[1,8,32,32] y) {{ a = {op}(x) y = Exp(a) }}"
        (row,) = forecast(parse_model(body, tmp_path / "a.onnx"), ["Galaxy S24"], ["float"]).rows
        assert (present(row.placing).cpu_ops, row.note) == (left, "1 of 2 nodes on the CPU" if left else "")
        widths.append((row.high_ms or 0) / (row.low_ms or 1))
    assert widths[1] > 1.05 * widths[0]


def test_phones_are_found_by_what_people_call_them_and_stand_for_their_chip() -> None:
    names = {"Galaxy S24": 57, "rb3 gen 2": 93, "Galaxy S22 Ultra": 36, "Snapdragon 8 Gen 3": 57}
    assert {name: find_phone(name, load_phones()).soc_model for name in names} == names
    target = load_target("qnn", {"phone": "Galaxy S24"})
    assert target.settings == load_target("qnn", {"soc_model": "57"}).settings
    assert load_target("qnn", {"phone": "rb3 gen 2"}).settings["soc_model"] == "93"
    # What a bundle keeps builds it again.
    again = load_target("qnn", {"phone": "Snapdragon X Elite"}).settings
    assert load_target("qnn", again).settings == again


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"phone": "Galxy S24"}, "near it: Samsung Galaxy S24"),
        ({"phone": "Pixel 3"}, "begins with v68"),
        ({"phone": "Galaxy S24", "soc_model": "69"}, "its soc_model is 57"),
    ],
)
def test_a_phone_that_does_not_fit_is_refused(settings: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError) as error:
        load_target("qnn", settings)
    assert said in str(error.value)


def _recipe(path: Path, devices: str, more: str = "") -> Path:
    path.write_text(f'targets = ["qnn"]\n[forecast]\ndevices = ["{devices}"]\n{more}')
    return path


def test_a_check_tells_the_forecast_of_its_recipe(tmp_path: Path, shown: Shown) -> None:
    check = ["check", str(_conv(tmp_path / "m.onnx", 32)), "--recipe"]
    assert "forecast, nothing ran there: Samsung Galaxy S24 w8a8" in shown(
        [*check, str(_recipe(tmp_path / "a.toml", "Galaxy S24"))]
    )
    assert run_command([*check, str(_recipe(tmp_path / "b.toml", "Galaxy S24", "max_ms = 0.0001"))]) == 1
    assert run_command([*check, str(_recipe(tmp_path / "c.toml", "Pixel 4", "max_ms = 1"))]) == 3
    assert run_command([*check, str(_recipe(tmp_path / "d.toml", "Galxy S24"))]) == 2
    assert run_command([*check, str(_recipe(tmp_path / "e.toml", "Galaxy S24", "max_ms = -1"))]) == 2


def test_a_build_holds_the_forecast_against_its_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, samples = tmp_path / "net.onnx", tmp_path / "samples.npz"
    write_small_net(model, samples)
    recipe = tmp_path / "a.toml"
    recipe.write_text('targets = ["cpu"]\nprecision = "fp32"\n[forecast]\ndevices = ["S24"]\nmax_ms = 0.0001\n')
    command = ["build", str(model), "--data", str(samples), "--recipe", str(recipe), "--no-verify", "--json"]
    assert run_command([*command, "--out", str(tmp_path / "out")]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["verdict"], told["forecast"]["too_slow"]) == ("fail", ["Samsung Galaxy S24"])
    recipe.write_text('targets = ["cpu"]\n[forecast]\ndevices = ["Galxy S24"]\n')
    assert run_command([*command, "--out", str(tmp_path / "other")]) == 2
    assert not (tmp_path / "other").exists()


_PLAN = """
{"opid" : 0x11 , "dram_read": 4096 , "dram_write": 512 , "vtcm_read": 0 , "vtcm_write": 4096, "is_dma": 1},
{"opid" : 0x12 , "dram_read": 0 , "dram_write": 0 , "vtcm_read": 100 , "vtcm_write": 20, "is_dma": 0},
{"opid" : 0x13 , "dram_read": 0 , "dram_write": 0 , "vtcm_read": 7 , "vtcm_write": 1, "is_dma": 0},
runlist_vec = [
	0x13,
]
"""


def test_the_bytes_of_a_compiler_plan_are_summed_per_unit() -> None:
    assert read_plan(_PLAN) == Traffic(dram=4608, matrix=120, vector=8, operations=3)


def test_a_compiled_forecast_uses_the_plan_of_the_float_model(tmp_path: Path) -> None:
    path = _conv(tmp_path / "a.onnx", 64)
    graph, plan = (forecast(path, ["Galaxy S25"], compiles=compiles) for compiles in (False, True))
    assert graph.traffic is None
    # The weights in fp16, and the picture in and out in float.
    assert present(plan.traffic).dram == pytest.approx(2 * 64 * 64 * 9 + 2 * 4 * 64 * 56 * 56, rel=0.1)
    assert [row.basis for row in graph.rows] == ["networks"] * 3
    fitted, _ = load_fitted()
    gaining = [fitted.precisions[row.precision].compiled is not None for row in plan.rows]
    assert [row.basis == "compiled" for row in plan.rows] == gaining
    assert gaining[0]
    assert "QNN's compiler plans" in plan.remarks[-1]
    widths = [(report.rows[0].high_ms or 0) / (report.rows[0].low_ms or 1) for report in (graph, plan)]
    assert widths[1] < widths[0]


def test_what_the_compiler_refuses_is_forecast_from_the_graph_alone(tmp_path: Path) -> None:
    text = "g (float[4,4] x) => (float y) { y = Det(x) }"
    report = forecast(parse_model(text, tmp_path / "a.onnx"), ["Galaxy S25"], ["float"], compiles=True)
    assert (report.rows[0].basis, report.traffic) == ("networks", None)
    assert "forecast from the graph alone" in report.remarks[-1]


def test_a_quantized_model_is_not_compiled(refused: Callable[..., str], tmp_path: Path) -> None:
    path = parse_model(
        "g (float[1,8] x) => (float[1,8] y)"
        " <float s = {0.1}, uint8 z = {0}> { q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z) }",
        tmp_path / "a.onnx",
    )
    assert "is quantized" in refused("forecast", str(path), "--device", "S24", "--compile")
