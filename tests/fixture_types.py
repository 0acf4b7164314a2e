"""What the fixtures `answer` and `refused` of conftest.py are."""

from collections.abc import Callable
from typing import Any

Answer = Callable[..., Any]
Refused = Callable[..., str]
