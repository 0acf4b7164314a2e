"""Values with which programs often fail, and draws among them that depend only on the seed."""

from random import Random
from typing import Any

OUTSIDE = "@OUTSIDE@"
"""In drawn texts a placeholder for a folder that nobody may write to or read from; its path is known at run time."""

TEXTS = (
    "",
    "x",
    "a" * 5000,
    "../loot",
    f"{OUTSIDE}/loot",
    f"{OUTSIDE}/secret.bin",
    "\x00",
    "a\x00b",
    "\x1b[31mred\x1b]0;title\x07",
    "\u202etxt.exe",
    "é\u0301\ud7ff",
    "a\nb\tc",
    "a\\b",
    "golden/..",
    ".",
    "..",
    "nul",
    "C:x",
    "%s%n{0}{x}",
    "[bold]x[/bold]",
    "<script>alert(1)</script>",
    "-x",
    "--out",
    "nan",
    "1e999",
    "9" * 400,
    "os:system",
    "module:function",
    "host",
    "ssh:host",
    "ai.onnx",
)
INTEGERS = (0, 1, -1, 2, 3, 7, 8, 127, 255, 256, 65536, 10**6, 10**9, 2**31 - 1, 2**31, -(2**31), 2**63 - 1, -(2**63))
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 1e-300, 3.4e38, 1e308, float("inf"), float("-inf"), float("nan"))


def draw_text(rng: Random) -> str:
    """Returns a text from `TEXTS`, or a few letters of any kind."""
    if rng.random() < 0.8:
        return rng.choice(TEXTS)
    return "".join(
        chr(rng.choice((rng.randrange(32, 127), rng.randrange(0x20, 0xD7FF)))) for _ in range(rng.randrange(9))
    )


def draw_integer(rng: Random, *, near: int = 0) -> int:
    """Returns an integer from `INTEGERS`, or one close to `near`."""
    return rng.choice(INTEGERS) if rng.random() < 0.6 else near + rng.choice((-2, -1, 1, 2, 16))


def draw_json(rng: Random, depth: int = 3) -> Any:
    """Returns any value that JSON can hold, or NaN, which it cannot hold."""
    kind = rng.randrange(9 if depth else 6)
    if kind < 2:
        return draw_text(rng)
    if kind == 2:
        return draw_integer(rng)
    if kind == 3:
        return rng.choice(FLOATS)
    if kind < 6:
        return rng.choice((None, True, False, [], {}))
    if kind < 8:
        return [draw_json(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {draw_text(rng): draw_json(rng, depth - 1) for _ in range(rng.randrange(4))}


def damage_bytes(rng: Random, data: bytes) -> bytes:
    """Returns the bytes with some flipped, removed, inserted, duplicated or overwritten by extreme numbers."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at = rng.randrange(len(changed) + 1)
        kind = rng.randrange(8)
        if kind < 3 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 3:
            changed[at : at + 4] = rng.choice((b"\0\0\0\0", b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"\0\0\0\x80"))
        elif kind == 4:
            del changed[at : at + rng.choice((1, 2, 8, 64))]
        elif kind == 5:
            changed[at:at] = rng.randbytes(rng.choice((1, 2, 8, 64)))
        elif kind == 6:
            changed[at:at] = changed[at : at + rng.choice((4, 16, 256))]
        elif rng.random() < 0.3:
            del changed[at:]
    return bytes(changed)
