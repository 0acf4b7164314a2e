"""Draws the cases: a command, its subjects and its options, from a seed and a number."""

import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random

from mutate_file import mutate_path
from nasty import OUTSIDE, draw_text

_TARGETS = ("cpu", "nnapi", "xnnpack", "qnn", "coreml")
_FLOAT_MODELS = ("net", "dyn", "loop", "branch", "function", "attention", "lstm", "shapes", "words")
_INPUTS = ("x", "x:0", "N", "H", "S", "W", "c", "sizes", "mask", "nowhere")


class Case:
    """One call of a command: its arguments, and the files in a folder of its own, of which some are damaged."""

    def __init__(self, seed: int, number: int, subjects: Path, folder: Path) -> None:
        self.rng = Random(f"{seed}/{number}")
        self.number = number
        self.subjects = subjects
        self.folder = folder
        self.taken: list[Path] = []
        self.writes: set[str] = set()
        self.arguments: list[str] = []
        self.command = ""

    def prepare(self, commands: tuple[str, ...] = ()) -> None:
        """Copies the subjects, damages one or two of them, and writes the arguments."""
        (self.folder / "tmp").mkdir(parents=True)
        chosen = [plan for plan in PLANS if plan[0] in commands] if commands else list(PLANS)
        self.command, _, plan = self.rng.choices(chosen, [weight for _, weight, _ in chosen])[0]
        self.arguments = [self.command, *plan(self)]
        if self.command != "runner" and self.rng.random() < 0.3:
            self.arguments.append("--json")
        outside = str(self.folder.parent.parent / "outside")
        if len(self.arguments) > 1 and self.rng.random() < 0.08:
            at = self.rng.randrange(1, len(self.arguments))
            # No shell can pass a zero byte; and a user may well name a place outside.
            word = draw_text(self.rng).replace("\0", "0")
            self.arguments[at] = "elsewhere" if "loot" in word or OUTSIDE in word or word == ".." else word
            # It may be the output path.
            self.writes.add(self.arguments[at].partition("/")[0])
        # By chance a word is now the option that names such a place.
        self.writes |= {name for word, name in pairwise(self.arguments) if word == "--out"}
        self.arguments = [word.replace(OUTSIDE, outside) for word in self.arguments]
        for path in self.rng.sample(self.taken, min(len(self.taken), self.rng.choice((0, 1, 1, 1, 1, 1, 2)))):
            mutate_path(self.rng, path)

    def take(self, name: str) -> str:
        """Copies a subject (a file or a folder), and returns its path relative to the case's folder."""
        source, place = self.subjects / name, self.folder / Path(name).name
        if place.exists():
            return place.name
        if source.is_dir():
            shutil.copytree(source, place)
        else:
            shutil.copyfile(source, place)
        self.taken.append(place)
        return place.name

    def model(self, *names: str) -> str:
        """Chooses one of some models, or of all float ones."""
        name = self.rng.choice(names or _FLOAT_MODELS)
        if not names and self.rng.random() < 0.05:
            self.take("external/external.data")
            return self.take("external/net.onnx")
        return self.take(f"models/{name}.onnx")

    def some(self, share: float, *words: str) -> list[str]:
        """Returns the words with this probability, else nothing."""
        return list(words) if self.rng.random() < share else []

    def file(self, share: float, name: str, subject: str) -> list[str]:
        """Returns an option with a copied subject with this probability, else nothing."""
        return [name, self.take(subject)] if self.rng.random() < share else []

    def option(self, share: float, name: str, *values: str) -> list[str]:
        """Returns an option with one of some values with this probability, else nothing."""
        return [name, self.rng.choice(values)] if self.rng.random() < share else []

    def target(self) -> str:
        """Returns a target's name, or copies the folder of one."""
        return self.take("target") if self.rng.random() < 0.15 else self.rng.choice(_TARGETS)

    def dims(self) -> list[str]:
        """Returns a few sizes of dimensions."""
        found: list[str] = []
        for name in self.rng.sample(_INPUTS, self.rng.choice((0, 0, 1, 3))):
            found += ["--dim", f"{name}={self.rng.choice(('1', '2', '8', '0', '65536', '2147483647', 'x'))}"]
        return found

    def buckets(self) -> list[str]:
        """Returns several sizes of a dimension, mostly of one that exists, and the padding of inputs."""
        sizes = self.rng.choice(
            ("2,8", "2,5,8", "2,5,8", "8,2", "2,2", "2,", "0,8", "2,x", "2,2147483647", ",".join("8" * 70))
        )
        name = self.rng.choice(("S", "S", "S", "S", "N", "ids:1", "nowhere"))
        batch = self.some(0.8, "--dim", "N=1")
        return [*batch, "--dim", f"{name}={sizes}", *self.option(0.3, "--pad", "ids=1", "mask=nan", "y=1", "ids=1e99")]

    def out(self, name: str) -> list[str]:
        """Returns the option --out with a place in the case's folder."""
        self.writes.add(name)
        return ["--out", name]

    def bundle(self) -> str:
        """Copies a bundle in one of its forms."""
        shapes = (
            "bundles/net-cpu",
            "bundles/net-nnapi",
            "stateful/recurrent-cpu",
            "open/words-cpu",
            "sized/words-cpu",
            "joined",
            "made/joined.zip",
            "made/joined.tar",
            "made/packed.zip",
        )
        return self.take(self.rng.choice((*shapes[:2], *shapes, "made/packed.tar")))

    def data(self, model: str) -> list[str]:
        """Copies samples that fit a model, or others."""
        stem = Path(model).stem
        if stem == "words" and self.rng.random() < 0.9:
            return ["--data", self.take("data/words")]
        name = f"data/{stem if stem in {'net', 'lstm', 'loop', 'attention', 'recurrent'} else 'net'}.npz"
        kind = self.rng.random()
        if kind < 0.1:
            return ["--data", self.take("images"), *self.file(0.9, "--preprocess", "texts/preprocess.toml")]
        return ["--data", self.take("sets" if kind < 0.15 else name)]


def _inspect(case: Case) -> list[str]:
    subject = case.rng.choice((case.model, lambda: case.take("ort/model.ort"), case.bundle))()
    return [subject, *case.some(0.5, "--sizes")]


def _check(case: Case) -> list[str]:
    case.writes.add("check.html")
    model = case.model(*_FLOAT_MODELS, "qdq")
    more = [*case.some(0.2, "--html", "check.html"), *case.some(0.1, "--compare-ort")]
    return [model, "--target", case.target(), *case.dims(), *_settings(case), *more]


def _forecast(case: Case) -> list[str]:
    case.writes.add("forecast.html")
    return [
        case.rng.choice((case.model, case.bundle))(),
        *case.option(0.5, "--device", "Galaxy S24", "galaxy", "iPhone 15", "", "S2\u00e4"),
        *case.option(0.3, "--precision", "float", "w8a8,w8a16", "int3", ","),
        *case.option(
            0.5, "--measured", "Galaxy S25=1.9ms", "Galaxy S25:w8a8=1us", "x", "Galaxy S25=nans", "S24=-1ms", "=1s"
        ),
        *case.option(0.3, "--max-ms", "5", "0", "inf", "nan"),
        *case.some(0.2, "--html", "forecast.html"),
        *case.some(0.2, "--all"),
        *case.dims(),
    ]


def _settings(case: Case) -> list[str]:
    return case.option(0.2, "--set", "api_level=31", "arch=x64", "htp_arch=73", "api_level=-1", "x=y", "layout=NHWC")


def _prepare(case: Case) -> list[str]:
    more = [
        *case.option(0.2, "--opset", "7", "13", "21", "26", "99"),
        *case.option(0.1, "--outputs", "y", "a,r", "nowhere", "x"),
        *case.option(0.1, "--freeze", "x=1", "c=1", "sizes=3", "mask=0", "x=nan"),
        *case.option(0.1, "--rename", "x=image", "y=x", "x=", "a=b"),
        *case.option(0.1, "--layout", "x=nhwc", "mask=nhwc"),
        *case.option(0.1, "--shape", "x=1,3,8,8", "x=1", "sizes=2", "x=9,9,9,9,9"),
        *case.some(0.1, "--external-data"),
    ]
    if case.rng.random() < 0.1:
        more += ["--embed-preprocess", case.take("texts/preprocess.toml")]
    if case.rng.random() < 0.4:
        more += ["--target", case.target(), *_settings(case)]
    case.writes.add("out.onnx.data")
    return [case.model(), *case.dims(), *more, *case.out("out.onnx")]


def _quantize(case: Case) -> list[str]:
    model = case.model("net", "net", "dyn", "loop", "attention", "lstm", "qdq")
    more = [
        *case.option(0.3, "--precision", "int8", "int16", "w4a16", "w4a8"),
        *case.option(0.2, "--method", "mse", "best", "entropy", "x"),
    ]
    more += [*case.option(0.2, "--samples", "1", "3", "99"), *case.dims(), *_settings(case)]
    kind = case.rng.randrange(8)
    if kind == 0:
        more += ["--labels", case.take("data/labels.npy"), *case.option(0.5, "--metric", "top1", "miou", "wer", "x")]
    elif kind == 1:
        more += ["--plan", case.take("made/plan.json")]
    elif kind == 2:
        more += ["--max-drop", "50", "--state", case.take("made/state.json")]
        case.writes.add("state.json")
    elif kind == 3:
        more += ["--recipe", case.take("texts/recipe.toml")]
    elif kind == 4:
        return [model, *case.data(model), "--target", case.target(), "--plan-only", *case.dims()]
    case.writes.add("quantize.html")
    more += case.some(0.1, "--html", "quantize.html")
    return [model, *case.data(model), "--target", case.target(), *more, *case.out("out.onnx")]


def _convert(case: Case) -> list[str]:
    model = case.model(*_FLOAT_MODELS, "qdq")
    more = [
        *case.option(0.3, "--style", "full", "runtime"), *case.option(0.3, "--level", "disabled", "basic", "extended"),
        *case.option(0.2, "--weights", "fp16", "dynamic-int8", "int8", "int4"), *case.some(0.2, "--onnx"),
        *case.option(0.1, "--cpu", "x64", "arm"), *case.some(0.6, "--no-check"), *case.some(0.1, "--qoperator"),
        *case.option(0.1, "--fuse", "transformer"), *case.option(0.05, "--keep", "a", "nowhere"),
        *case.option(0.05, "--block", "16", "0", "31"),
    ]  # fmt: skip
    if case.rng.random() < 0.3:
        more += ["--target", case.target(), *_settings(case)]
    if case.rng.random() < 0.2:
        more += case.data(model)
    return [model, *case.dims(), *more, *case.out("out")]


def _build(case: Case) -> list[str]:
    model = case.model("net", "net", "net", "attention", "lstm", "recurrent", "words", "words")
    has_state = Path(model).stem == "recurrent"
    more = case.file(0.5, "--recipe", "texts/state.toml" if has_state else "texts/recipe.toml")
    more += case.option(0.5 if has_state else 0.05, "--steps", "1", "2", "3", "4096", "0", "8")
    more += case.option(0.3, "--precision", "int8", "fp32", "fp16", "int16", "w4a16")
    if case.rng.random() < 0.2:
        more += ["--golden", case.take("bundles")]
    if case.rng.random() < 0.2:
        more += ["--eval", case.take("data/net.npz"), "--labels", case.take("data/labels.npy")]
    verify = "--verify" if case.rng.random() < 0.2 else "--no-verify"
    if Path(model).stem == "words":
        # Half of them have open dimensions, which the target cpu takes.
        sizes = case.buckets() if case.rng.random() < 0.5 else case.some(0.5, "--dim", "N=1")
        targets = ["--target", case.target() if case.rng.random() < 0.3 else "cpu"]
    else:
        sizes, targets = case.dims(), ["--target", case.target()]
    return [model, *case.data(model), *targets, *more, verify, *sizes, *case.out("out")]


def _compare(case: Case) -> list[str]:
    case.writes.add("compare.html")
    more = [
        *case.some(0.4, "--layers"),
        *case.option(0.2, "--min-sqnr", "20", "nan"),
        *case.some(0.1, "--html", "compare.html"),
    ]
    if case.rng.random() < 0.15:
        more += [
            "--labels",
            case.take("data/labels.npy"),
            "--metric",
            case.rng.choice(("top1", case.take("texts/metric.toml"))),
        ]
    model = case.model("net", "net", "loop", "attention", "lstm")
    return [model, case.model("qdq", Path(model).stem), *case.data(model), *more]


def _diff(case: Case) -> list[str]:
    if case.rng.random() < 0.5:
        return [case.model("net", "loop", "branch", "function"), case.model("qdq", "net", "dyn", "lstm", "shapes")]
    old = case.take("bundles/net-cpu")
    return [old, case.bundle(), *case.option(0.3, "--target", "cpu", "nnapi", "x")]


def _verify_files(case: Case) -> list[str]:
    key = case.file(0.3, "--key", "made/key.pem.pub")
    return [case.bundle(), "--files-only", *key, *case.option(0.3, "--target", "cpu", "nnapi")]


def _verify_recheck(case: Case) -> list[str]:
    case.writes |= {"verify.html", "verify.xml", "verify.md", "history.sqlite", "history.sqlite-journal"}
    more = [*case.some(0.2, "--html", "verify.html"), *case.some(0.2, "--junit", "verify.xml")]
    more += [*case.some(0.2, "--markdown", "verify.md"), *case.option(0.2, "--min-cosine", "0.9", "2", "nan")]
    if case.rng.random() < 0.2:
        more += ["--baseline", case.take("bundles/net-nnapi/verify.json")]
    if case.rng.random() < 0.2:
        more += ["--history", case.take("made/history.sqlite")]
    return ["--recheck", case.take("made/verify.json"), *more, *_judging(case)]


def _judging(case: Case) -> list[str]:
    """Returns options for how a verification is judged: a metric with its limits, intervals, what counts as a pass."""
    metric = case.option(0.2, "--metric", "top1", "auc", "psnr", "x", "os:system")
    return [
        *metric,
        *case.option(0.2, "--max-metric-drop", "0", "5", "nan"),
        *case.option(0.2, "--gate", "bound", "estimate"),
        *case.some(0.2, "--accept-unproven"),
    ]


def _verify_device(case: Case) -> list[str]:
    bundle = case.bundle()
    case.writes |= {f"{bundle}/verify.json", "verify.html"}
    devices = ["--on-file", case.take("texts/devices.toml")] if case.rng.random() < 0.2 else ["--on", "host"]
    more = [
        *case.option(0.3, "--target", "cpu", "nnapi"),
        *case.some(0.1, "--layers"),
        *case.some(0.2, "--html", "verify.html"),
    ]
    if case.rng.random() < 0.2:
        model = "words" if "words" in bundle else "net"
        more += [*case.data(f"{model}.onnx"), "--reference", case.model(model)]
    return [bundle, *devices, *more, *_judging(case)]


def _bench(case: Case) -> list[str]:
    subject = case.rng.choice((case.model, case.bundle))()
    more = [*case.option(0.2, "--target", "cpu", "nnapi"), *case.some(0.3, "--markdown", "bench.md")]
    case.writes.add("bench.md")
    return [subject, "--on", "host", "--runs", "2", "--seconds", "1", *more]


def _profile(case: Case) -> list[str]:
    subject = case.rng.choice((case.model, case.bundle))()
    more = [*case.file(0.3, "--against", "models/net.onnx"), *case.option(0.2, "--target", "cpu", "nnapi")]
    more += [*case.option(0.3, "--top", "1", "0", "9"), *case.some(0.5, "--html", "page.html")]
    case.writes |= {"page.html", "trace.json", "trace.1.json"}
    return [
        subject, "--on", "host", "--runs", "1", "--seconds", "0.2", "--no-roofline",
        *case.dims(), *case.some(0.5, "--trace", "trace.json"), *more,
    ]  # fmt: skip


def _package(case: Case) -> list[str]:
    kinds = ("aar", "ort-package", "react-native", "swiftpm", "tar", "zip")
    more = [*case.option(0.1, "--name", "x", "../x", "é"), *case.option(0.1, "--group", "a.b", "..", "x<y")]
    more += [*case.option(0.1, "--package-version", "1.0", "x y"), *case.some(0.3, "--allow-failed")]
    more += [*case.file(0.1, "--key", "made/key.pem.pub"), *case.some(0.2, "--accept-unproven")]
    subject = case.bundle() if case.rng.random() < 0.8 else case.take("bundles")
    return [subject, "--as", case.rng.choice(kinds), *more, *case.out("out")]


def _sign(case: Case) -> list[str]:
    bundle = case.take(case.rng.choice(("bundles/net-cpu", "bundles/net-nnapi", "joined")))
    case.writes.add(f"{bundle}/signature.json")
    return [
        bundle,
        "--key",
        case.take("made/key.pem"),
        *case.some(0.3, "--allow-failed"),
        *case.some(0.2, "--accept-unproven"),
    ]


def _join(case: Case) -> list[str]:
    both = [case.take("bundles/net-cpu"), case.take("bundles/net-nnapi")]
    bundles = both if case.rng.random() < 0.7 else [case.take("bundles")]
    key = case.file(0.2, "--key", "made/key.pem")
    return [
        *bundles,
        *key,
        *case.some(0.5, "--allow-failed"),
        *case.out(case.rng.choice(("out", "out.zip", "out.tar"))),
    ]


def _group_build(case: Case) -> list[str]:
    case.take("models/net.onnx")
    labels = ["--eval", case.take("data/net.npz"), "--labels", case.take("data/labels.npy")]
    options = ["--target", "cpu", "--no-verify", *case.option(0.3, "--precision", "fp32", "int8", "fp16")]
    return [
        "build",
        case.take("texts/group.toml"),
        "--data",
        case.take("data/net.npz"),
        *labels,
        *options,
        *case.out("out"),
    ]


def _group_verify(case: Case) -> list[str]:
    case.writes.add("pair-cpu/verify.json")
    return ["verify", case.take("grouped/pair-cpu"), "--on", "host"]


def _tune(case: Case) -> list[str]:
    case.writes.add("tune.json")
    subject = case.rng.choice((case.model, case.bundle))()
    return [subject, "--on", "host", "--time-budget", "1s", *case.some(0.3, "--state", "tune.json")]


def _operators(case: Case) -> list[str]:
    if case.rng.random() < 0.5:
        return [case.take("ort/model.ort"), "--compare", case.take("made/required.config")]
    return [case.take("ort/model.ort"), *case.some(0.5, "--types"), *case.out("out.config")]


def _runs(case: Case) -> list[str]:
    asked = case.rng.choice(
        (["list"], ["list", "--bundle", "net-cpu"], ["show", "1"], ["show", "99"], ["diff", "1", "2"])
    )
    return [*asked, "--history", case.take("made/history.sqlite")]


def _targets(case: Case) -> list[str]:
    return [case.take("target"), *_settings(case)]


def _devices(case: Case) -> list[str]:
    return (
        ["list", "--target", case.take("target")]
        if case.rng.random() < 0.5
        else ["test", draw_text(case.rng).replace("\0", "0")]
    )


def _runner(case: Case) -> list[str]:
    return ["build", "--abi", draw_text(case.rng).replace("\0", "0")]


def _init(case: Case) -> list[str]:
    case.writes.add("edgekit.schema.json")
    model = case.model()
    data = ["--images", case.take("images")] if case.rng.random() < 0.3 else case.data(model)
    return [model, *data, *case.some(0.5, "--target", case.target()), *case.out("edgekit.toml")]


def _run(case: Case) -> list[str]:
    case.take("models/net.onnx")
    case.take("data/net.npz")
    case.writes.add("build")
    return [case.take("texts/edgekit.toml"), *case.some(0.3, "--only", "cpu"), *case.some(0.3, "--again")]


def _nothing(case: Case) -> list[str]:
    return case.some(0.5, draw_text(case.rng).replace("\0", "0"))


PLANS: tuple[tuple[str, float, Callable[[Case], list[str]]], ...] = (
    ("inspect", 14, _inspect),
    ("check", 10, _check),
    ("forecast", 3, _forecast),
    ("prepare", 8, _prepare),
    ("quantize", 4, _quantize),
    ("convert", 6, _convert),
    ("build", 1.5, _build),
    ("compare", 4, _compare),
    ("diff", 10, _diff),
    ("verify", 12, _verify_files),
    ("verify", 8, _verify_recheck),
    ("verify", 2, _verify_device),
    ("bench", 1.5, _bench),
    ("profile", 0.4, _profile),
    ("package", 9, _package),
    ("sign", 5, _sign),
    ("join", 5, _join),
    ("group", 1, _group_build),
    ("group", 2, _group_verify),
    ("tune", 0.1, _tune),
    ("operators", 4, _operators),
    ("runs", 7, _runs),
    ("targets", 4, _targets),
    ("devices", 0.5, _devices),
    ("runner", 0.3, _runner),
    ("init", 3, _init),
    ("run", 0.5, _run),
    ("schema", 0.1, _nothing),
    ("completion", 0.3, _nothing),
    ("doctor", 0.05, _nothing),
)
"""Every command with its weight in the draw: slow commands are drawn rarely. `demo` reads no foreign file."""
