"""What is wrong on a command line is told in one line with the next step, and leaves nothing behind."""

from pathlib import Path

import pytest
from demo_paths import CALIBRATION, EVALUATION, LABELS, MODEL
from fixture_types import Refused

from edgekit.bundle.folder import open_bundle

DATA = f"--data {CALIBRATION}"
BUILD = f"build {MODEL} {DATA} --out out"
BENCH = f"bench {MODEL} --on host --runs 10 -q"
CONVERT = f"convert {MODEL} --out out"
PREPARE = f"prepare {MODEL} --out o/out.onnx"
COMPARE = f"compare {MODEL} {MODEL} --data {EVALUATION} --samples 2"
MEASURED = f"--data {EVALUATION} --reference {MODEL} --samples 8"

WRONG = {
    "biuld": "did you mean 'build'",
    "build": "Missing argument 'MODEL'",
    "build none.onnx --data x.npz --out out": "no file 'none.onnx'",
    f"build {MODEL} --data none.npz --out out": "'none.npz' does not exist",
    f"build {MODEL} {DATA} --out /proc/nowhere/out": "cannot write",
    f"build {MODEL} {DATA} --out out.zip": "--out 'out.zip' would be a folder (give --out out)",
    f"group build g.toml {DATA} --out out.tar": "--out 'out.tar' would be a folder (give --out out)",
    f"convert {MODEL} --out m.ort": "--out 'm.ort' would be a folder (give --out m)",
    f"prepare {MODEL} --out m.ort": "--out 'm.ort' would be a .onnx file (give --out m.onnx)",
    f"quantize {MODEL} {DATA} --target cpu --out q.TFLITE": "would be a .onnx file (give --out q.onnx)",
    "join a b --out all.onnx": "--out 'all.onnx' would be a folder (give --out all)",
    "join a b --out all.zip": "'a'",
    "package a --as tar --out a.zip": "--out 'a.zip' would be a .tar file (give --out a.tar)",
    "package a --as aar --out a.aar": "--out 'a.aar' would be a folder (give --out a)",
    f"{BUILD} --target qnnn": "did you mean 'qnn'",
    f"{BUILD} --target NNAPI": "did you mean 'nnapi'",
    f"{BUILD} --target qnn,nnapi": "name each by itself: --target qnn --target nnapi",
    f"{BUILD} --targte qnn": "No such option",
    f"{BUILD} --set soc_model=SM9999": "'SM9999' is no soc_model",
    f"{BUILD} --set soc_modle=69": "no target here has a parameter 'soc_modle'",
    f"{BUILD} --set soc_model": "is not NAME=VALUE",
    f"{BUILD} --dim batch=1": "no dynamic dim",
    f"{BUILD} --dim batch=one": "is no size",
    f"{BUILD} --dim batch=999999999999": "'999999999999' is no size (a whole number from 0 to 2147483647)",
    f"check {MODEL} --shape image=1x3x32x32": "--shape image=1x3x32x32: '1x3x32x32' is no size",
    f"check {MODEL} --shape image=1,1,99,99": "(the model fixes the numbers)",
    f"check {MODEL} --shape image=1,1": "(one size an axis)",
    f"{BUILD} --target coreml --precision int8": "does not take int8",
    f"{BUILD} --precision int3": "int3",
    f"{BUILD} --samples 0": "--samples",
    f"{BUILD} --samples x.npz": "not a valid integer. (--samples N: Use at most N samples; see 'edgekit build --help')",
    "quantize m.onnx": "Missing option '--data'. (--data DATA: Sample inputs: ",
    f"{BUILD} --labels {LABELS}": "labels",
    f"{BUILD} --recipe none.toml": "cannot read 'none.toml'",
    "devices install androit": "did you mean 'android'",
    "devices test hots": "did you mean 'host'",
    "targets qnnn": "did you mean 'qnn'",
    "inspect none.onnx": "no file",
    "check none.onnx": "no file",
    f"{CONVERT} --weights int4 --keep classifier": "'digits_mobilenet' has no weights that int4 takes",
    "convert none.onnx --out out": "there is no file 'none.onnx'",
    "completion tcsh": "tcsh",
    "join a --out": "Option '--out' requires an argument. (see 'edgekit --help')",
    "join nothing --out out": "'nothing'",
    "sign": "give either BUNDLE and --key FILE, or --new-key FILE",
    "sign bundle": "give either BUNDLE and --key FILE, or --new-key FILE",
    "sign bundle --key k --new-key n": "give either BUNDLE and --key FILE, or --new-key FILE",
    "diff a b": "'a'",
    "verify": "either a BUNDLE to run or --recheck",
    "verify none": "cannot read 'none': No such file",
    f"verify {MODEL}": "is a model, not a bundle (edgekit build makes bundles",
    "verify BUNDLE --recheck v.json": "either a BUNDLE to run or --recheck",
    "verify --recheck none.json": "cannot read 'none.json'",
    "verify --recheck v.json --on host": "--on means nothing",
    "verify --recheck v.json --on-file d.toml": "--on-file means nothing here",
    f"verify --recheck v.json {MEASURED}": "--data means nothing",
    "verify --files-only --recheck x --key k": "--key means nothing",
    "verify --recheck v.json --require host": "--require means nothing here (--recheck runs nothing)",
    "verify --recheck v.json --layers": "--layers means nothing",
    "verify --recheck v.json --target cpu": "--target means nothing",
    "verify --recheck v.json --import a.run": "--import means nothing",
    "verify --recheck v.json --samples 3": "--samples means nothing",
    "verify BUNDLE --files-only --on host": "--on means nothing here (--files-only runs nothing)",
    "verify BUNDLE --files-only --html v.html": "--html means nothing here (--files-only runs nothing)",
    "verify BUNDLE --files-only --layers": "--layers means nothing here (--files-only runs nothing)",
    "verify BUNDLE --run-key k": "add --import FILE",
    "verify BUNDLE --sign-run k": "add --export FILE",
    f"verify BUNDLE {MEASURED} --export run": "--export means nothing",
    f"verify BUNDLE {MEASURED} --import a.run": "--import means nothing here",
    f"verify BUNDLE --labels {LABELS}": "--labels means nothing",
    "verify BUNDLE --samples 3": "--samples means nothing",
    f"verify BUNDLE --data {EVALUATION}": "--data needs --reference",
    f"verify BUNDLE {MEASURED} --on emulatd": "emulatd",
    f"verify BUNDLE --data none.npz --reference {MODEL}": "'none.npz' does not exist",
    f"verify BUNDLE --data {EVALUATION} --reference none.onnx": "no file 'none.onnx'",
    "verify BUNDLE --junit BUNDLE/v.xml": "lies in the bundle",
    "verify BUNDLE --html BUNDLE/manifest.json": "lies in the bundle",
    "bench BUNDLE --shape x=1,6": "is a folder (a bundle has its sizes",
    "verify BUNDLE --min-cosine 1.5": "--min-cosine",
    "verify BUNDLE --on host --max-metric-drop 5": "add --metric NAME",
    "verify BUNDLE --on host --min-metric-share 0.99 --gate bound": "add --metric NAME",
    "verify BUNDLE --min-sqnr nan": "'nan' is no number",
    "verify BUNDLE --min-top1 x": "--min-top1",
    "verify BUNDLE --max-latency-ratio 1.2": "give --baseline FILE or --history",
    "verify BUNDLE --baseline a --history b": "--baseline and --history both name an earlier run",
    "verify BUNDLE --on host --baseline none.json": "cannot read 'none.json'",
    f"{COMPARE} --min-sqnr nan": "'nan' is no number",
    f"{COMPARE} --target qnn": "--target says how a device opens B",
    f"{COMPARE} --on hots": "there is no device 'hots'",
    f"{COMPARE} --on host --target nap": "there is no target 'nap'",
    f"{COMPARE} --metric top1": "goes with --labels",
    "bench none.onnx": "no file 'none.onnx'",
    f"{BENCH} --on hots": "did you mean 'host'",
    f"{BENCH} --runs 0": "--runs",
    f"{BENCH} --seconds nan": "--seconds",
    f"{BENCH} --target qnnn": "did you mean 'qnn'",
    f"{BENCH} --batch 1,0": "no list of sizes",
    f"{BENCH} --concurrency 1,2 --against {MODEL}": "--against compares in one way",
    f"{BENCH} --concurrency two": "no list of sizes",
    f"{BENCH} --batch 2": "no input has a dynamic first axis",
    f"{BENCH} --batch 1,2 --against {MODEL}": "--against compares in one way",
    f"{BENCH} --on-file none.toml": "cannot read 'none.toml'",
    f"{BENCH} --against none.onnx": "no file 'none.onnx'",
    f"{CONVERT} --target nnapi --cpu arm": "sets style, level and CPU",
    f"{CONVERT} --target xnnpack --style runtime": "XnnpackExecutionProvider cannot use a file of runtime style: ",
    f"{CONVERT} --target nnapi --style both": "NnapiExecutionProvider cannot use a file of full style: ",
    f"{CONVERT} --target nnapi --style runtime": "sets style, level and CPU",
    f"{CONVERT} --soc 43": "add --target qnn",
    f"{CONVERT} --model-type gpt2": "add --fuse transformer",
    f"{CONVERT} --keep conv": "add --weights",
    f"{CONVERT} --weights int4 --keep nix": "no node 'nix' to keep",
    f"{CONVERT} --weights int4 --block 7": "no block of 7 weights",
    f"{CONVERT} --weights int4 --rounding gptq": "--rounding comq --data DATA",
    f"{CONVERT} --target cpu --onnx --level all": "--level would have no effect",
    f"{CONVERT} --fuse transformer --model-type brt": "no --model-type 'brt'",
    f"{CONVERT} --fuse transformer": "no pattern of 'bert' was found",
    f"{CONVERT} --preprocess x.toml": "add --data",
    f"{CONVERT} --custom-ops none.so": "no custom-op library 'none.so'",
    f"{PREPARE} --rename nix=x": "no input or output 'nix'",
    f"{PREPARE} --layout nix=nhwc": "no input 'nix'",
    f"{PREPARE} --layout x=hwcn": "there is no layout 'hwcn'",
    f"{PREPARE} --embed-preprocess none.toml": "cannot read 'none.toml'",
    f"{PREPARE} --custom-ops none.so": "no custom-op library 'none.so'",
    f"{PREPARE} --outputs nix": "no output 'nix'",
    f"{PREPARE} --inputs nix": "no input 'nix'",
    f"{PREPARE} --opset 99": "there is no opset '99'",
    f"quantize {MODEL} {DATA} --target coreml --out q.onnx": (
        "target 'coreml' takes no quantized model: the Core ML provider has no builder for Q or DQ nodes"
    ),
    f"quantize {MODEL} --target coreml {DATA} --out q.onnx": "or edgekit convert MODEL --weights fp16",
}


@pytest.mark.parametrize("line", WRONG, ids=[f"{line.partition(' ')[0]}: {said}" for line, said in WRONG.items()])
def test_what_is_wrong_is_one_line_and_leaves_nothing(
    line: str, request: pytest.FixtureRequest, refused: Refused
) -> None:
    bundle = request.getfixturevalue("demo_bundles") / "digits_mobilenet-cpu" if "BUNDLE" in line else Path()
    assert WRONG[line] in refused(*line.replace("BUNDLE", str(bundle)).split())
    if "BUNDLE" in line:
        open_bundle(bundle)
