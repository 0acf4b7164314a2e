"""Files appear whole or not at all."""

from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from edgekit._files import (
    one_at_a_time,
    replacing_file,
    require_place,
    safe_join,
    staged_entries,
    staged_folder,
    work_folder,
    write_file,
)
from edgekit.errors import BundleError, OutputError


def test_a_failed_block_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), staged_folder(tmp_path / "out") as folder:
        (folder / "half").write_text("half")
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match="stop"), replacing_file(tmp_path / "file") as file:
        file.write_text("half")
        raise ValueError("stop")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    for name in ("old", "new"):
        with staged_folder(tmp_path / "out") as folder:
            (folder / name).write_text(name)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_second_process_waits_for_the_lock(tmp_path: Path) -> None:
    order: list[str] = []

    def come_second() -> None:
        with one_at_a_time(tmp_path / "shared"):
            order.append("second")

    second = Thread(target=come_second)
    with one_at_a_time(tmp_path / "shared"):
        second.start()
        second.join(0.05)
        order.append("first")
    second.join()
    assert order == ["first", "second"]
    assert not (tmp_path / "shared").exists()


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    write_file(tmp_path / "file", b"")
    with pytest.raises(OutputError, match="cannot write"):
        write_file(tmp_path / "file" / "below", b"")
    with pytest.raises(OutputError, match="is a file"), staged_folder(tmp_path / "file"):
        pass


@pytest.mark.parametrize("name", ["../up", "/etc/passwd", "a/../../up", "", "link/file", "a\\b"])
def test_a_name_that_leads_out_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to(tmp_path)
    with pytest.raises(BundleError):
        safe_join(tmp_path / "root", name)


def test_a_place_where_nothing_can_be_written_is_refused_beforehand(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    require_place(tmp_path / "file")
    require_place(tmp_path / "new" / "folder" / "r.html")
    for place, reason in ((tmp_path, "it is a folder"), (tmp_path / "file" / "r.html", "file' is no folder")):
        with pytest.raises(OutputError, match=reason):
            require_place(place)


@pytest.mark.parametrize("way", [replacing_file, staged_folder, staged_entries, work_folder])
def test_empty_folders_of_a_failed_write_are_removed(tmp_path: Path, way: Callable[[Path], Any]) -> None:
    with pytest.raises(ValueError, match="stop"), way(tmp_path / "a/b/c"):
        raise ValueError("stop")
    assert list(tmp_path.iterdir()) == []
    # What was there stays, and so does what somebody else put into a new one meanwhile.
    (tmp_path / "kept").mkdir()
    with pytest.raises(ValueError, match="stop"), way(tmp_path / "kept/b/c"):
        (tmp_path / "kept/b/theirs").write_bytes(b"")
        raise ValueError("stop")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["b", "kept", "theirs"]
