"""Quantizes and scores what strangers_train.py trained: python strangers.py FOLDER NET [TARGET:PRECISION]..."""

import sys, subprocess, json, time, pathlib
import numpy as np, onnxruntime as ort

D = pathlib.Path(sys.argv[1])


def run(path, name):
    o = ort.SessionOptions()
    o.intra_op_num_threads = 1
    o.log_severity_level = 3
    s = ort.InferenceSession(str(path), o, providers=["CPUExecutionProvider"])
    z = np.load(D / f"{name}_evaluate.npz")
    keys = [i.name for i in s.get_inputs()]
    return np.concatenate([s.run(None, {k: z[k][i : i + 1] for k in keys})[0] for i in range(len(z[keys[0]]))])


def text(c):
    return [int(k) for i, k in enumerate(c) if k and (i == 0 or c[i - 1] != k)]


def near(v):
    n = np.linalg.norm(v, axis=1, keepdims=True)
    v = v / np.maximum(n, 1e-12)
    a = v @ v.T
    np.fill_diagonal(a, -9)
    return a.argmax(1)


def score(out, ref, name):
    db = 10 * np.log10((ref**2).sum() / max(((ref - out) ** 2).sum(), 1e-30))
    if name == "reader":
        w = np.load(D / "reader_evaluate.npz")["steps"]
        right = [text(a) == text(b) for a, b in zip(out.argmax(-1), w)]
        same = [text(a) == text(b) for a, b in zip(out.argmax(-1), ref.argmax(-1))]
        return f"lines {100 * np.mean(right):.2f} same {100 * np.mean(same):.2f} {db:.1f} dB"
    return f"same neighbour {100 * np.mean(near(out) == near(ref)):.2f} {db:.1f} dB"


def stock(name, kind):
    import onnxruntime.quantization as q
    from onnxruntime.quantization.shape_inference import quant_pre_process

    z = np.load(D / f"{name}_cal.npz")
    rows = iter([{k: z[k][i : i + 1] for k in z.files} for i in range(256)])

    class R(q.CalibrationDataReader):
        def get_next(self):
            return next(rows, None)

    ready, out = D / f"{name}.ready.onnx", D / f"{name}.ort-{kind}.onnx"
    quant_pre_process(str(D / f"{name}.onnx"), str(ready), skip_symbolic_shape=True)
    act, w = {"u8s8": ("QUInt8", "QInt8"), "s8s8": ("QInt8", "QInt8"), "u16s8": ("QUInt16", "QInt8")}[kind]
    q.quantize_static(
        str(ready), str(out), R(), per_channel=True, activation_type=q.QuantType[act], weight_type=q.QuantType[w]
    )
    return out


def edgekit(name, target, precision):
    out = D / f"{name}.{target}-{precision}.onnx"
    t = time.time()
    p = subprocess.run(
        [
            sys.executable,
            "-m",
            "edgekit",
            "quantize",
            str(D / f"{name}.onnx"),
            "--data",
            str(D / f"{name}_cal.npz"),
            "--target",
            target,
            "--precision",
            precision,
            "--out",
            str(out),
            "-q",
        ],
        capture_output=True,
        text=True,
    )
    (D / f"{out.stem}.txt").write_text(p.stdout + p.stderr)
    lines = p.stdout.splitlines()
    print(
        "\n".join(
            "      " + l[:170] for l in lines if l.startswith(("expected", "much", str(out), target)) or p.returncode
        )
        + ("" if p.returncode == 0 else p.stderr[-500:]),
        f"[{time.time() - t:.0f} s]",
        flush=True,
    )
    return out


if __name__ == "__main__":
    name = sys.argv[2]
    z = np.load(D / f"{name}_calibrate.npz")
    if not (D / f"{name}_cal.npz").exists():
        np.savez(D / f"{name}_cal.npz", **{k: z[k] for k in z.files if k != "steps"})
    if not (D / f"{name}.ref.npy").exists():
        np.save(D / f"{name}.ref.npy", run(D / f"{name}.onnx", name))
    ref = np.load(D / f"{name}.ref.npy")
    print(name, "float", score(ref, ref, name), flush=True)
    for v in sys.argv[3:] or ["ort:u8s8", "ort:s8s8", "qnn:int8", "qnn:int16", "xnnpack:int8"]:
        a, b = v.split(":")
        try:
            path = stock(name, b) if a == "ort" else edgekit(name, a, b)
            print(f"{name} {v}: {score(run(path, name), ref, name)}, {path.stat().st_size / 1e3:.0f} kB", flush=True)
        except Exception as e:
            print(name, v, "failed", type(e).__name__, str(e)[:200], flush=True)
