"""Damages any file or bundle, in a way that fits its name."""

import hashlib
import io
import json
import os
import re
import sqlite3
import stat
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random

import numpy as np
from mutate_model import mutate_model
from mutate_text import mutate_json, mutate_toml, spell_json
from nasty import damage_bytes, draw_integer, draw_text

Damage = Callable[[Random, bytes], bytes]


def mutate_path(rng: Random, path: Path) -> None:
    """Damages a file, a bundle or a folder, in place."""
    if path.is_symlink() or not path.exists():
        return
    if path.is_dir():
        _mutate_folder(rng, path)
    elif path.suffix == ".sqlite":
        _mutate_history(rng, path)
    else:
        _rewrite(path, _DAMAGE.get(path.suffix, damage_bytes)(rng, path.read_bytes()))


def _rewrite(path: Path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)


def _mutate_folder(rng: Random, folder: Path) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    if not files:
        return
    chosen = rng.choice(files)
    manifest = folder / "manifest.json"
    if manifest in files and rng.random() < 0.3:
        chosen = manifest
    if rng.random() < 0.1:
        _mutate_entry(rng, chosen)
    else:
        mutate_path(rng, chosen)
    # An adversary would correct the digests too; otherwise nothing after the check of the files would be reached.
    if manifest in files and rng.random() < 0.75:
        _forge_digests(folder)


def _forge_digests(folder: Path) -> None:
    manifest = folder / "manifest.json"
    if manifest.is_symlink() or not manifest.is_file():
        return
    try:
        tree = json.loads(manifest.read_bytes())
        files = tree["files"]
        for name in files:
            place = folder / name
            if place.is_file() and not place.is_symlink():
                data = place.read_bytes()
                files[name] = {"sha256": hashlib.sha256(data).hexdigest(), "size_bytes": len(data)}
        _rewrite(manifest, spell_json(tree))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return


def _mutate_entry(rng: Random, path: Path) -> None:
    """Replaces a file by something else: nothing, an empty file, a link, a folder, a pipe that nobody writes to."""
    path.unlink()
    kind = rng.randrange(6)
    if kind == 0:
        path.write_bytes(b"")
    elif kind == 1:
        path.symlink_to(rng.choice(("manifest.json", "/dev/zero", "nowhere", "/etc/hostname", path.name)))
    elif kind == 2:
        path.mkdir()
    elif kind == 3:
        os.mkfifo(path)
    elif kind == 4:
        path.with_name(f"{path.name}{draw_text(rng)[:40].translate(_NO_PATH)}x").write_bytes(b"x")


_NO_PATH = dict.fromkeys(map(ord, "/\0"))


def _mutate_history(rng: Random, path: Path) -> None:
    """Damages the bytes of a history, or the content of its rows."""
    if rng.random() < 0.4:
        _rewrite(path, damage_bytes(rng, path.read_bytes()))
        return
    with sqlite3.connect(path) as database:
        tables = [
            row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name = 'runs'")
        ]
        table = rng.choice(tables)
        columns = [row[1] for row in database.execute(f'PRAGMA table_info("{table}")')]
        column = rng.choice(columns)
        kind = rng.randrange(4)
        if kind == 0:
            database.execute(f'ALTER TABLE "{table}" RENAME COLUMN "{column}" TO "other"')
        elif kind == 1:
            database.execute(f'DELETE FROM "{table}"')
        else:
            (old,) = database.execute(f'SELECT "{column}" FROM "{table}"').fetchone()
            text = mutate_json(rng, old.encode()) if isinstance(old, str) and old.startswith("{") else None
            new = draw_integer(rng) if text is None else text.decode(errors="replace")
            database.execute(f'UPDATE OR IGNORE "{table}" SET "{column}" = ?', [new])
    database.close()


def mutate_npy(rng: Random, data: bytes) -> bytes:
    """Damages the header of an array: its type, order, shape, length, version; or its bytes."""
    kind = rng.randrange(6)
    if kind == 0 or not data.startswith(b"\x93NUMPY"):
        return damage_bytes(rng, data)
    if kind == 1:
        return data[:6] + bytes(rng.choice(((1, 0), (2, 0), (3, 0), (9, 9)))) + data[8:]
    size = int.from_bytes(data[8:10], "little")
    header, body = data[10 : 10 + size].decode("latin1"), data[10 + size :]
    shape = rng.choice(("()", "(0,)", "(-1, 3)", "(1000000000000,)", "(2, None)", "(1.5,)", "3", "(" * 300, "(2,)*3"))
    descr = rng.choice(
        ("'|O'", "'<f8'", "'<M8'", "'|V0'", "'<U5'", "[('a', '<f4')]", "'" + "x" * 99 + "'", "None", "'>f4'")
    )
    if kind == 2:
        header = re.sub(r"'shape': [^}]*", lambda _: f"'shape': {shape}, ", header)
    elif kind == 3:
        header = re.sub(r"'descr': [^,]*", lambda _: f"'descr': {descr}", header)
    elif kind == 4:
        extra = (
            "{",
            "}",
            "'''",
            "\\\n",
            "\t\n  x",
            "__import__('os')",
            "1" * 5000,
            "\x00",
            "'",
            "lambda: 0",
            "{'a': {",
        )
        at = rng.randrange(len(header))
        header = header[:at] + rng.choice(extra) + header[at:]
    else:
        header = rng.choice(("", "{}", "None", "[]", "{'descr': '<f4'}", "(" * 500, header.replace("False", "True")))
    raw = header.encode("latin1", errors="replace")
    return data[:8] + min(len(raw), 65535).to_bytes(2, "little") + raw + body


def _mutate_npz(rng: Random, data: bytes) -> bytes:
    """Damages one array of an archive, the archive's list of members, or its bytes."""
    if rng.random() < 0.25:
        return damage_bytes(rng, data)
    arrays: dict[str, bytes] = {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        arrays = {name: archive.read(name) for name in archive.namelist()}
    if not arrays:
        return damage_bytes(rng, data)
    chosen = rng.choice(sorted(arrays))
    kind = rng.randrange(8)
    if kind < 4:
        arrays[chosen] = mutate_npy(rng, arrays[chosen])
    elif kind == 4:
        arrays[rng.choice((draw_text(rng) or "x", "x.shapes.npy", "x", "../x.npy"))] = arrays.pop(chosen)
    elif kind == 5:
        arrays[f"{chosen.removesuffix('.npy')}.shapes.npy"] = _encode_array(np.full((2,), draw_integer(rng), np.int64))
    elif kind == 6:
        arrays[chosen] = _encode_array(rng.choice(_ARRAYS))
    else:
        del arrays[chosen]
    return _write_zip(arrays, rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)))


_ARRAYS = (
    np.zeros((0, 3), np.float32), np.full((2, 1, 3, 8, 8), np.nan, np.float32), np.zeros((3, 1, 8, 8), np.float32),
    np.array(["a", "b"]), np.zeros((2, 1, 3, 8, 8), np.float64), np.zeros((2, 1, 3, 8, 8), np.complex64),
    np.full((2, 1, 3, 8, 8), 3e38, np.float32), np.zeros((1,), bool), np.array(5.0), np.zeros((2, 70000), np.int8),
)  # fmt: skip


def _encode_array(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def _write_zip(members: Mapping[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name.replace("\0", "0")), data, method)
    return buffer.getvalue()


def _mutate_zip(rng: Random, data: bytes) -> bytes:
    """Adds a hostile member, duplicates one, damages one, appends bytes; or damages the bytes."""
    kind = rng.randrange(6)
    if kind == 0:
        return damage_bytes(rng, data)
    if kind == 1:
        return rng.choice((data + data, data + b"tail", b"head" + data, data[:-10]))
    buffer = io.BytesIO(data)
    with zipfile.ZipFile(buffer, "a") as archive:
        names = archive.namelist()
        entry = zipfile.ZipInfo((draw_text(rng) or "x") if rng.random() < 0.7 else rng.choice(names) + "/x")
        kinds = (stat.S_IFLNK, stat.S_IFBLK, stat.S_IFIFO, stat.S_IFDIR, stat.S_IFREG)
        entry.external_attr = (rng.choice(kinds) | 0o777) << 16
        if kind > 3:
            entry.compress_type = zipfile.ZIP_DEFLATED
        archive.writestr(entry, rng.choice((b"../../loot", b"", b"\0" * (1 << 20 if kind > 3 else 99))))
    return buffer.getvalue()


def _mutate_tar(rng: Random, data: bytes) -> bytes:
    """Adds a hostile member, appends bytes, or damages a header or the bytes."""
    kind = rng.randrange(5)
    if kind == 0:
        return damage_bytes(rng, data)
    if kind == 1:
        return rng.choice((data + data, data + b"tail" * 200, data[:-700], data[: len(data) // 2]))
    if kind == 2:
        at = 512 * rng.randrange(max(1, len(data) // 512)) + rng.randrange(300)
        return (
            data[:at] + rng.choice((b"\xff" * 12, b"77777777777\0", b"-1\0", b"\0" * 40, b"../x\0")) + data[at + 12 :]
        )
    buffer = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(data)) as old, tarfile.open(fileobj=buffer, mode="w") as new:
        for member in old:
            new.addfile(member, old.extractfile(member))
        entry = tarfile.TarInfo(draw_text(rng).replace("\0", "0") or "x")
        entry.type = rng.choice((tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.REGTYPE))
        entry.linkname = draw_text(rng).replace("\0", "0")
        new.addfile(entry)
    return buffer.getvalue()


_DAMAGE: Mapping[str, Damage] = {
    ".onnx": mutate_model,
    ".json": mutate_json,
    ".toml": mutate_toml,
    ".npy": mutate_npy,
    ".npz": _mutate_npz,
    ".zip": _mutate_zip,
    ".tar": _mutate_tar,
}
