"""Damages TOML and JSON: values, keys, depth and spelling."""

import json
from random import Random
from typing import Any

from nasty import damage_bytes, draw_integer, draw_json, draw_text

_VALUES = (
    "0", "-1", "1e999", "nan", "inf", "true", '""', "[]", "{}", "[[[[]]]]", "1979-05-27T07:32:00Z", "'x'", "0x7f",
    "[" * 3000 + "]" * 3000, "{a=" * 400 + "1" + "}" * 400, "9" * 5000, '"\\u0000"', '"\\u001b[31m"',
)  # fmt: skip


def mutate_toml(rng: Random, data: bytes) -> bytes:
    """Returns a TOML file with a line changed, added, duplicated or removed, or with its bytes damaged."""
    if rng.random() < 0.15:
        return damage_bytes(rng, data)
    lines = data.decode().splitlines()
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(lines)) if lines else 0
        kind = rng.randrange(7)
        if kind < 3 and lines and "=" in lines[at]:
            lines[at] = lines[at].partition("=")[0] + "= " + _draw_toml(rng)
        elif kind == 3 and lines:
            lines.insert(at, lines[at])
        elif kind == 4 and lines:
            del lines[at]
        elif kind == 5:
            lines.insert(
                at, rng.choice(("a" + ".a" * 2000 + " = 1", "[" + "x." * 800 + "x]", "[[x]]", "[", "=", "\ufeff"))
            )
        else:
            lines.insert(
                at, f"{rng.choice(('x', 'size', 'name', 'targets', 'dims.x', 'settings.x'))} = {_draw_toml(rng)}"
            )
    return "\n".join(lines).encode(errors="replace")


def _draw_toml(rng: Random) -> str:
    kind = rng.randrange(4)
    if kind == 0:
        return json.dumps(draw_text(rng))
    if kind == 1:
        return str(draw_integer(rng))
    return rng.choice(_VALUES)


def mutate_json(rng: Random, data: bytes) -> bytes:
    """Returns a JSON file with a value or key changed, in edgekit's spelling or another, or with its bytes damaged."""
    if rng.random() < 0.1:
        return damage_bytes(rng, data)
    if rng.random() < 0.03:
        return rng.choice(
            (b"[" * 100_000, b'{"a":' * 5000 + b"1" + b"}" * 5000, b"null", b"1" * 5000, b"\xef\xbb\xbf{}")
        )
    try:
        tree = json.loads(data)
    # After earlier damage it may not be JSON, or be too deep for Python.
    except (ValueError, RecursionError):
        return damage_bytes(rng, data)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        tree = change_tree(rng, tree)
    return spell_json(tree)


def spell_json(tree: object) -> bytes:
    """Returns JSON in the one spelling of bundles, so that its content is tested and not the spelling."""
    text = json.dumps(tree, indent=2, sort_keys=True, ensure_ascii=False)
    return text.encode(errors="surrogatepass") + b"\n"


def change_tree(rng: Random, tree: Any) -> Any:
    """Returns the tree with one place changed; lists and mappings are changed in place."""
    node = tree
    while isinstance(node, dict | list) and node:
        keys: list[Any] = sorted(node) if isinstance(node, dict) else list(range(len(node)))
        key = rng.choice(keys)
        inner = node[key]
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.15:
            _change_entry(rng, node, key)
            return tree
        node = inner
    return draw_json(rng)


def _change_entry(rng: Random, node: Any, key: Any) -> None:
    kind = rng.randrange(8)
    old = node[key]
    if kind == 0:
        del node[key]
    elif kind == 1 and isinstance(node, dict):
        node[draw_text(rng)] = node.pop(key)
    elif kind == 1:
        node.extend([old] * rng.choice((1, 2, 500)))
    elif kind < 5 and isinstance(old, int | float) and not isinstance(old, bool):
        near = int(old) if abs(old) < 1e18 else 0
        node[key] = rng.choice((draw_integer(rng, near=near), -old, old * 1e9, 0.5, float("nan"), 1e308))
    elif kind < 5 and isinstance(old, str):
        node[key] = rng.choice((draw_text(rng), old + "x", old[:-1], old.upper()))
    else:
        node[key] = draw_json(rng)
