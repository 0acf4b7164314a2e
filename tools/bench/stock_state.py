"""What ONNX Runtime's settings scored on a labelled model, kept in a folder, so that no run repeats another's work."""

import contextlib
import io
import json
from pathlib import Path

import numpy as np
import onnxruntime
from zoo_tasks import ZooTask

from edgekit._files import digest_bytes, digest_file, write_file
from edgekit.model.tensors import Tensors

_BETWEEN = "/"
"""Between the number of a sample and the name of an output."""


class StockState:
    """Scores of settings, and the outputs of the best one; `known` are the settings that need not be run again."""

    def __init__(self, path: Path) -> None:
        self._scores, self._rows = (path.with_name(path.name + suffix) for suffix in (".json", ".npz"))
        self._held: dict[str, float | str] = {}
        with contextlib.suppress(FileNotFoundError):
            self._held = json.loads(self._scores.read_text())

    @property
    def known(self) -> frozenset[str]:
        """Names of settings that were scored, or that failed."""
        return frozenset(self._held)

    @property
    def scored(self) -> int:
        """How many settings have a score."""
        return len(self._numbers())

    def fail(self, name: str, why: str) -> None:
        """Keeps that a setting gave no model."""
        self._write(name, why)

    def keep(self, name: str, score: float, rows: list[Tensors]) -> None:
        """Keeps the score of a setting, and its outputs if none is better."""
        if score > max(self._numbers().values(), default=-np.inf):
            packed = {f"{index}{_BETWEEN}{key}": value for index, row in enumerate(rows) for key, value in row.items()}
            memory = io.BytesIO()
            np.savez(memory, **packed)  # type: ignore[arg-type] # its stub takes the names for its own options
            write_file(self._rows, memory.getvalue())
        self._write(name, score)

    def best(self) -> tuple[str, list[Tensors]] | None:
        """Returns the setting that scored best and its outputs, sample by sample; None if all failed."""
        numbers = self._numbers()
        if not numbers:
            return None
        rows: dict[int, dict[str, np.ndarray]] = {}
        with np.load(self._rows) as held:
            for key in held.files:
                index, _, name = key.partition(_BETWEEN)
                rows.setdefault(int(index), {})[name] = held[key]
        name = max(numbers, key=lambda key: numbers[key])
        return name, [rows[index] for index in sorted(rows)]

    def _numbers(self) -> dict[str, float]:
        return {name: value for name, value in self._held.items() if isinstance(value, float)}

    def _write(self, name: str, value: float | str) -> None:
        self._held[name] = value
        write_file(self._scores, json.dumps(self._held, indent=1).encode())


def open_state(task: ZooTask, folder: Path) -> StockState:
    """Returns the state of a model, its calibration, what scores it, and the version of ONNX Runtime."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = [onnxruntime.__version__, digest_file(task.model), task.limit.name, repr(task.dims)]
    facts += [repr(task.labels) if task.limit.name != "psnr" else ""]
    for arrays in (task.calibration, task.scored):
        facts += [f"{key} {digest_bytes(np.ascontiguousarray(value).tobytes())}" for key, value in arrays.items()]
    return StockState(folder / f"{task.name}-{digest_bytes(' '.join(facts).encode())[:16]}")
