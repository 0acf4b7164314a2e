"""What a bundle costs: `python bundle_costs.py [BUNDLE...]` says its overhead, and how long 100 MB take to open.

The overhead is all that is neither the model to load, another form of it, nor the golden samples. Times are the least
of several, beside that of sha256 alone in the same run, because the machine may be busy.
"""

import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from edgekit._files import digest_file
from edgekit.bundle.archive import list_files, write_archive
from edgekit.bundle.folder import open_bundle
from edgekit.bundle.manifest.manifest import BundledFile, decode_manifest, encode_json
from edgekit.bundle.opening import opened_bundle, sign_bundle
from edgekit.bundle.sign import make_key

V1 = Path(__file__).parents[2] / "tests" / "bundle" / "manifest_v1.json"
SIZE_BYTES = 100_000_000
RUNS = 7


def measure_overhead(folder: Path) -> dict[str, object]:
    """Returns the bytes of the models, of the golden samples, and of the rest as a share of the models."""
    manifest = open_bundle(folder).manifest
    models = {name for names in manifest.forms.values() for name in names}
    size = {name: entry.size_bytes for name, entry in manifest.files.items()}
    size["manifest.json"] = (folder / "manifest.json").stat().st_size
    golden = sum(count for name, count in size.items() if name.startswith("golden/"))
    weights = sum(size[name] for name in models)
    rest = sum(size.values()) - golden - weights
    return {"bundle": folder.name, "models": weights, "golden": golden, "rest": rest, "overhead": rest / weights}


def make_large(folder: Path) -> Path:
    """Writes a bundle of 100 MB: the oldest manifest, around files of noise."""
    manifest, rng = decode_manifest(V1.read_bytes(), str(V1)), np.random.default_rng(1)
    files: dict[str, BundledFile] = {}
    for name in manifest.files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rng.bytes(SIZE_BYTES if name.endswith(".onnx") else 1000))
        files[name] = BundledFile(sha256=digest_file(path), size_bytes=path.stat().st_size)
    (folder / "manifest.json").write_bytes(encode_json(msgspec.structs.replace(manifest, files=files)))
    return folder


def least_seconds(work: Callable[[], object]) -> float:
    """Returns the least time of several runs."""
    times: list[float] = []
    for _ in range(RUNS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return round(min(times), 3)


def open_once(path: Path, key: Path) -> None:
    """Opens a bundle and checks every byte and the signature."""
    with opened_bundle(path, key=key):
        pass


def main() -> int:
    """Returns 1 if 100 MB took half a second or more to open as a folder."""
    report: dict[str, object] = {"overhead": [measure_overhead(Path(path)) for path in sys.argv[1:]]}
    with tempfile.TemporaryDirectory() as temporary:
        folder = make_large(Path(temporary) / "large")
        key = make_key(Path(temporary) / "key")
        sign_bundle(folder, Path(temporary) / "key")
        archive = Path(temporary) / "large.zip"
        write_archive(list_files(folder), archive, "zip")
        data = (folder / "tiny.onnx").read_bytes()
        alone = least_seconds(lambda: hashlib.sha256(data).digest())
        opened = least_seconds(lambda: open_once(folder, key))
        unpacked = least_seconds(lambda: open_once(archive, key))
    report["open_100_mb_s"] = {"folder": opened, "zip": unpacked, "sha256_alone": alone}
    print(json.dumps(report, indent=2))
    return 0 if opened < 0.5 else 1


if __name__ == "__main__":
    sys.exit(main())
