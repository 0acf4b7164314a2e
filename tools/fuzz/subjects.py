"""Makes the undamaged subjects: small models, samples, recipes, plans, bundles, archives, reports and keys."""

import contextlib
import io
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper, parser
from PIL import Image

from edgekit.cli.main import run_command

TARGETS = Path(__file__).parents[2] / "targets"

_HEAD = '<ir_version: 9, opset_import: ["" : 17, "local" : 1]>'
_MODELS: Mapping[str, str] = {
    "net": """net (float[1,3,8,8] x) => (float[1,5] y) <float[4,3,3,3] w, float[4] b, float[4,5] v> {
        a = Conv<pads=[1,1,1,1]>(x, w, b) r = Relu(a) p = GlobalAveragePool(r) f = Flatten(p) y = MatMul(f, v) }""",
    "dyn": """dyn (float[N,3,H,W] x) => (float[N,4,H2,W2] y) <float[4,3,3,3] w, float[4] b, float[4] scales> {
        c = Conv<pads=[1,1,1,1], strides=[2,2]>(x, w, b) s = Sigmoid(c) m = Mul(c, s)
        y = Resize<mode="nearest">(m, , scales) }""",
    "loop": """loop (float[1,4] x) => (float[1,4] y, float[K,1,4] all) <int64 n = {3}, bool go = {1}> {
        y, all = Loop <
          body = step (int64 i, bool c, float[1,4] before) => (bool again, float[1,4] after, float[1,4] seen)
          { again = Identity(c) after = Add(before, x) seen = Relu(after) }> (n, go, x) }""",
    "branch": """branch (float[1,4] x, bool c) => (float[1,4] y) {
        y = If (c) <then_branch = one () => (float[1,4] t) { t = Relu(x) },
                    else_branch = two () => (float[1,4] e) { e = Neg(x) }> }""",
    "function": """function (float[1,4] x) => (float[1,4] y) { h = local.Twice(x) y = Relu(h) }
        <domain: "local", opset_import: ["" : 17]> Twice (a) => (b) { h = Add(a, a) b = Identity(h) }""",
    "attention": """attention (float[1,6,8] x, int64[1,6] mask) => (float[1,6,8] y)
        <float[8,8] q, float[8,8] k, float[8,8] v, float[8] g, float[8] b> {
        a = MatMul(x, q) c = MatMul(x, k) d = MatMul(x, v) t = Transpose<perm=[0,2,1]>(c) s = MatMul(a, t)
        m = Cast<to=1>(mask) z = Add(s, m) p = Softmax<axis=-1>(z) o = MatMul(p, d) r = Add(o, x)
        y = LayerNormalization<axis=-1>(r, g, b) }""",
    "lstm": """lstm (float[5,1,4] x) => (float[5,1,1,3] y) <float[1,12,4] w, float[1,12,3] r> {
        y, h = LSTM<hidden_size=3>(x, w, r) }""",
    "recurrent": """recurrent (float[1,4] x, float[1,4] h) => (float[1,4] y, float[1,4] new_h) <float[4,4] w> {
        m = MatMul(x, w) a = Add(m, h) new_h = Tanh(a) y = Relu(new_h) }""",
    "words": """words (int64[N,S] ids, float[N,S] mask) => (float[N,5] y, float[N,S,8] t)
        <float[20,8] table, float[8,8] u, float[8,5] v, int64[1] one = {1}, int64[1] two = {2}> {
        e = Gather(table, ids) t = MatMul(e, u) m = Unsqueeze(mask, two) k = Mul(t, m)
        s = ReduceSum<keepdims=0>(k, one) y = MatMul(s, v) }""",
    "shapes": """shapes (float[1,4,2] x, int64[2] sizes) => (float[A,B] y, int64[3] s) <int64[1] one = {1}> {
        s = Shape(x) f = Reshape(x, sizes) g = Unsqueeze(f, one) y = Squeeze(g, one) }""",
}


def make_subjects(folder: Path) -> None:
    """Fills a folder with every kind of file that a command reads."""
    rng = np.random.default_rng(0)
    for name, text in _MODELS.items():
        _save_model(rng, text, folder / f"models/{name}.onnx")
    onnx.save(
        onnx.load(folder / "models/net.onnx"),
        folder / "external/net.onnx",
        save_as_external_data=True,
        location="external.data",
        size_threshold=0,
    ) if _make(folder / "external") else None
    _save_data(rng, folder)
    _save_texts(folder)
    shutil.copytree(TARGETS / "cpu", folder / "target")
    _run_commands(folder)


def _place(folder: Path, name: str) -> Path:
    _make(folder)
    return folder / name


def _make(folder: Path) -> bool:
    folder.mkdir(parents=True, exist_ok=True)
    return True


def _save_model(rng: np.random.Generator, text: str, path: Path) -> None:
    """Writes a model; weights that its text only declares are random."""
    proto = parser.parse_model(f"{_HEAD} {text}")
    path.parent.mkdir(exist_ok=True)
    known = {tensor.name for tensor in proto.graph.initializer}
    for value in list(proto.graph.value_info):
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        if (
            value.name not in known
            and all(shape)
            and value.type.tensor_type.elem_type == 1
            and not _is_made(proto, value.name)
        ):
            data = (
                np.array([1, 1, 2, 2], np.float32)
                if value.name == "scales"
                else rng.normal(size=shape).astype(np.float32)
            )
            proto.graph.initializer.append(numpy_helper.from_array(data, value.name))
            proto.graph.value_info.remove(value)
    onnx.checker.check_model(proto)
    path.write_bytes(proto.SerializeToString())


def _is_made(proto: onnx.ModelProto, name: str) -> bool:
    return any(name in node.output for node in proto.graph.node)


def _save_data(rng: np.random.Generator, folder: Path) -> None:
    data, images = folder / "data", folder / "images"
    for place in (data, images, folder / "sets/test_data_set_0"):
        _make(place)
    rows = rng.normal(size=(12, 1, 3, 8, 8)).astype(np.float32)
    np.savez(data / "net.npz", x=rows)
    np.savez(data / "lstm.npz", x=rng.normal(size=(8, 5, 1, 4)).astype(np.float32))
    np.savez(data / "recurrent.npz", x=rng.normal(size=(8, 1, 4)).astype(np.float32))
    np.savez(data / "loop.npz", x=rng.normal(size=(8, 1, 4)).astype(np.float32))
    np.savez(
        data / "attention.npz", x=rng.normal(size=(8, 1, 6, 8)).astype(np.float32), mask=np.ones((8, 1, 6), np.int64)
    )
    for index, length in enumerate((1, 2, 3, 4, 5, 6, 7, 8)):
        ids, mask = rng.integers(0, 20, (1, length)), np.ones((1, length), np.float32)
        np.savez(_place(data / "words", f"{index}.npz"), ids=ids, mask=mask)
    np.save(data / "labels.npy", rng.integers(0, 5, 12))
    tensor = numpy_helper.from_array(rows[0], "x")
    (folder / "sets/test_data_set_0/input_0.pb").write_bytes(tensor.SerializeToString())
    for index in range(3):
        pixels = rng.integers(0, 255, (9, 11, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(images / f"{index}.png")


def _save_texts(folder: Path) -> None:
    texts = folder / "texts"
    _make(texts)
    (texts / "preprocess.toml").write_text(
        'size = [8, 8]\nresize = 9\ncolor = "RGB"\nlayout = "NCHW"\nscale = 0.0039\nmean = [0.5]\nstd = [0.25]\n'
    )
    (texts / "recipe.toml").write_text(
        'targets = ["cpu"]\nprecision = "int8"\nsamples = 8\nmax_drop = 5.0\n[dims]\n[settings]\narch = "arm64"\n'
        '[licence]\nmodel = "MIT"\n[tensors.x]\nlayout = "NCHW"\npreprocessing = "none"\n[outputs]\ny = "logits"\n'
        "[thresholds.cpu]\nmin_cosine = 0.9\nmin_sqnr_db = 10.0\n"
    )
    (texts / "state.toml").write_text('[state]\nsteps = 2\n[state.feeds]\nh = "new_h"\n')
    (texts / "metric.toml").write_text('name = "top1"\nmax_drop = 1.0\n')
    (texts / "group.toml").write_text(
        'name = "pair"\n[members.net]\nmodel = "net.onnx"\n[[stages]]\nrun = "net"\n'
        '[metric]\nname = "top1"\nmax_drop = 5.0\n'
    )
    (texts / "edgekit.toml").write_text(
        'version = 1\n[models.net]\npath = "net.onnx"\n[models.net.data]\nsource = "net.npz"\nsamples = 8\n'
        "[targets.cpu]\n[gates]\nmax_drop = 5.0\n[verify]\nenabled = false\n"
        '[packages.app]\nas = "tar"\nwith = ["golden"]\n'
    )
    (texts / "devices.toml").write_text(
        '[[device]]\nname = "here"\ndevice = "host"\ntimeout_s = 30.0\nbudget_s = 1.0\n'
    )


def _run_commands(folder: Path) -> None:
    """Makes the files that edgekit writes: prepared and quantized models, bundles, packages, reports, keys."""
    net, data, made = (str(folder / name) for name in ("models/net.onnx", "data/net.npz", "made"))
    bundles = folder / "bundles"
    _edgekit("quantize", net, "--data", data, "--target", "cpu", "--out", str(folder / "models/qdq.onnx"))
    plan = _edgekit("quantize", net, "--data", data, "--target", "cpu", "--plan-only")
    searched = ("--max-drop", "50", "--state", f"{made}/state.json", "--out", f"{made}/searched.onnx")
    _edgekit("quantize", net, "--data", data, "--target", "cpu", *searched)
    (folder / "made/plan.json").write_text(plan)
    _edgekit("convert", net, "--out", str(folder / "ort"), "--no-check")
    _edgekit("operators", *map(str, sorted((folder / "ort").glob("*.ort"))), "--out", f"{made}/required.config")
    _edgekit("build", net, "--data", data, "--target", "cpu", "--target", "nnapi", "--no-verify", "--out", str(bundles))
    for name in ("report.html", "report.json"):
        (bundles / name).unlink()
    recurrent = (str(folder / "models/recurrent.onnx"), "--data", str(folder / "data/recurrent.npz"), "--steps", "2")
    _edgekit(
        "build", *recurrent, "--target", "cpu", "--precision", "fp32", "--no-verify", "--out", str(folder / "stateful")
    )
    plain = ("--target", "cpu", "--no-verify", "--precision", "fp32")
    words = (str(folder / "models/words.onnx"), "--data", str(folder / "data/words"), *plain)
    _edgekit("build", *words, "--out", str(folder / "open"))
    _edgekit("build", *words, "--dim", "N=1", "--dim", "S=2,5,8", "--out", str(folder / "sized"))
    shutil.copy(folder / "texts/group.toml", folder / "models/group.toml")
    labelled = ("--data", data, "--eval", data, "--labels", str(folder / "data/labels.npy"))
    grouped = ("--target", "cpu", "--no-verify", "--accept-unproven", "--out", str(folder / "grouped"))
    _edgekit("group", "build", str(folder / "models/group.toml"), *labelled, *grouped)
    history = f"{made}/history.sqlite"
    for _ in range(2):
        _edgekit("verify", f"{bundles}/net-cpu", "--on", "host", "--history", history)
    # The host has no NNAPI, so its run leaves the bundle not proven.
    _edgekit("verify", f"{bundles}/net-nnapi", "--on", "host", "--history", history, "--accept-unproven")
    shutil.copy(bundles / "net-cpu/verify.json", folder / "made/verify.json")
    _edgekit("sign", "--new-key", f"{made}/key.pem")
    _edgekit("sign", f"{bundles}/net-cpu", "--key", f"{made}/key.pem")
    _edgekit("join", str(bundles), "--accept-unproven", "--out", str(folder / "joined"))
    for suffix in ("zip", "tar"):
        _edgekit("join", str(bundles), "--accept-unproven", "--out", f"{made}/joined.{suffix}")
        _edgekit("package", f"{bundles}/net-cpu", "--as", suffix, "--out", f"{made}/packed.{suffix}")


def _edgekit(*arguments: str) -> str:
    """Runs a command that must succeed and returns what it prints."""
    shown, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(said):
        code = run_command([*arguments])
    if code != 0:
        raise SystemExit(
            f"fuzz: 'edgekit {' '.join(arguments)}' ended with {code}: {said.getvalue()} {shown.getvalue()}"
        )
    return shown.getvalue()
