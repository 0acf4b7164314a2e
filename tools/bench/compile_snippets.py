"""Compiles the Kotlin of bundles and of an Android archive's README against the real ONNX Runtime for Java.

    python tools/bench/compile_snippets.py

Not among the tests because Kotlin's compiler is large (58 MB) and slow; it comes from Maven Central into edgekit's
cache.
"""

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(ROOT / "tests" / "package"))

from package_loaders import run_program  # noqa: E402 - after the path
from package_maven import ANDROID, GET, ORT, fetch_jar, maven_repository, run_maven  # noqa: E402

from edgekit.bundle.archive import unpack_archive  # noqa: E402
from edgekit.cli.main import run_command  # noqa: E402

KOTLIN = "org.jetbrains.kotlin:kotlin-compiler-embeddable:2.0.21"
MAIN = "org.jetbrains.kotlin.cli.jvm.K2JVMCompiler"
TARGETS = ("nnapi", "qnn", "xnnpack")


def main() -> int:
    """Compiles everything at once; the exit code is the compiler's."""
    code, shown = run_maven(GET, f"-Dartifact={KOTLIN}")
    if code:
        sys.stderr.write(shown)
        return code
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        sources = [*_collect_snippets(work), _collect_usage(work)]
        return _compile(sources, work)


def _collect_snippets(work: Path) -> list[Path]:
    demo = ROOT / "edgekit" / "demo"
    chosen = [word for target in TARGETS for word in ("--target", target)]
    data = ["--data", str(demo / "calibration.npz"), "--samples", "16", "--no-verify", "-q"]
    run_command(["build", str(demo / "digits_mobilenet.onnx"), *data, *chosen, "--out", str(work / "bundles")])
    run_command(["package", str(work / "bundles"), "--as", "aar", "--out", str(work / "maven")])
    unpack_archive(next((work / "maven").rglob("*.aar")), work / "aar")
    sources: list[Path] = []
    for target in TARGETS:
        code = (work / "bundles" / f"digits_mobilenet-{target}" / "app" / "ModelSession.kt").read_text()
        sources.append(work / f"{target}.kt")
        sources[-1].write_text(f"package {target}\n\n{code}")
    return sources


def _collect_usage(work: Path) -> Path:
    """Wraps the README's lines, which stand inside a function of an app."""
    block = (work / "maven" / "README.md").read_text().split("Kotlin:\n\n")[1].split("\n\n`openFirst`")[0]
    lines = [line.removeprefix("    ") for line in block.splitlines()]
    imports = [line for line in lines if line.startswith("import ")]
    code = ["import ai.onnxruntime.OnnxTensor", "import android.content.Context", "import android.util.Log", *imports]
    code += ["fun use(context: Context, inputs: Map<String, OnnxTensor>) {", *_set_lines(lines), "}"]
    path = work / "usage.kt"
    path.write_text("package usage\n\n" + "\n".join(code) + "\n")
    return path


def _set_lines(lines: Sequence[str]) -> list[str]:
    """Returns the lines that are no import."""
    return [f"    {line}" for line in lines if not line.startswith("import ")]


def _compile(sources: Sequence[Path], work: Path) -> int:
    compiler = os.pathsep.join(str(path) for path in sorted((maven_repository() / "org" / "jetbrains").rglob("*.jar")))
    library = next((maven_repository() / "org" / "jetbrains" / "kotlin" / "kotlin-stdlib").rglob("*.jar"))
    path = os.pathsep.join(
        str(jar) for jar in (library, fetch_jar(ORT), fetch_jar(ANDROID), work / "aar" / "classes.jar")
    )
    options = ["-no-stdlib", "-no-reflect", "-Werror", "-classpath", path, "-d", str(work / "out")]
    code, shown = run_program(["java", "-cp", compiler, MAIN, *options, *sources])
    sys.stderr.write(shown)
    print(f"{len(sources)} Kotlin files: {'refused' if code else 'compiled'}")
    return code


if __name__ == "__main__":
    sys.exit(main())
