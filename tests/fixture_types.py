"""What the fixtures `answer`, `refused` and `make_once` of conftest.py are."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

Answer = Callable[..., Any]
Refused = Callable[..., str]
MakeOnce = Callable[[str, Callable[[Path], object]], Path]
