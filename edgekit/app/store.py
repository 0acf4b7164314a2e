"""Where machines share what runs need and find: a folder, or any place that fsspec opens (S3, GCS, HTTP)."""

import importlib
import shutil
from pathlib import Path
from typing import Any, Protocol

import msgspec

from edgekit._files import replacing_file, writing
from edgekit.errors import DeviceError, MissingExtraError, UsageError, quote_error

_FILE = "file://"


class Store(Protocol):
    """Objects under names with `/`; one that is there is whole."""

    @property
    def place(self) -> str:
        """How another process opens the same store."""
        ...

    def has(self, name: str) -> bool:
        """Returns True if there is such an object."""
        ...

    def get(self, name: str, path: Path) -> bool:
        """Copies an object into a file; returns False if there is none."""
        ...

    def put(self, name: str, path: Path) -> None:
        """Copies a file into an object, whole or not at all; one that was there is replaced."""
        ...


class FolderStore(msgspec.Struct, frozen=True):
    """A store in a folder, which machines may mount."""

    folder: Path

    @property
    def place(self) -> str:
        """The folder, absolute."""
        return str(self.folder.absolute())

    def has(self, name: str) -> bool:
        """Returns True if there is such an object."""
        return (self.folder / name).is_file()

    def get(self, name: str, path: Path) -> bool:
        """Copies an object into a file; returns False if there is none."""
        if not self.has(name):
            return False
        with writing(path):
            shutil.copyfile(self.folder / name, path)
        return True

    def put(self, name: str, path: Path) -> None:
        """Copies a file into an object."""
        with replacing_file(self.folder / name) as temporary, writing(temporary):
            shutil.copyfile(path, temporary)


class RemoteStore(msgspec.Struct, frozen=True):
    """A store that fsspec opens by its URL; over HTTP it is only read.

    An upload becomes visible at its end: S3 and GCS promise it for an object, and what fsspec does is one upload.
    """

    url: str
    files: Any
    root: str

    @property
    def place(self) -> str:
        """The URL."""
        return self.url

    def has(self, name: str) -> bool:
        """Returns True if there is such an object."""
        return bool(self._ask("look into", self.files.exists, f"{self.root}/{name}"))

    def get(self, name: str, path: Path) -> bool:
        """Copies an object into a file; returns False if there is none."""
        if not self.has(name):
            return False
        self._ask("read", self.files.get_file, f"{self.root}/{name}", str(path))
        return True

    def put(self, name: str, path: Path) -> None:
        """Copies a file into an object; where that is not possible by nature (HTTP), nothing happens."""
        place = f"{self.root}/{name}"
        try:
            self._ask("write", self.files.makedirs, place.rpartition("/")[0], True)  # noqa: FBT003 - fsspec's exist_ok
            self._ask("write", self.files.put_file, str(path), place)
        except NotImplementedError:
            return

    def _ask(self, what: str, call: Any, *words: object) -> Any:
        try:
            return call(*words)
        except NotImplementedError:
            raise
        except Exception as error:
            reason = quote_error(error)
            raise DeviceError(
                f"cannot {what} store '{self.url}': {reason}", hint="is it there, and may you?"
            ) from error


def open_store(place: str) -> Store:
    """Opens a store by the path of a folder or by a URL of fsspec, for example `s3://bucket/edgekit`.

    Raises:
        MissingExtraError: fsspec, or the package that it needs for this kind of URL, is not installed.
        UsageError: there is no such kind of URL.
    """
    if "://" not in place or place.startswith(_FILE):
        return FolderStore(Path(place.removeprefix(_FILE)))
    try:
        files, root = importlib.import_module("fsspec.core").url_to_fs(place)
    except ImportError as error:
        wanted = "fsspec" if error.name == "fsspec" else quote_error(error)
        raise MissingExtraError(f"store '{place}' needs {wanted}", hint="pip install fsspec s3fs, or gcsfs") from error
    except (ValueError, OSError) as error:
        raise UsageError(
            f"cannot open store '{place}': {quote_error(error)}", hint="a folder, or a URL that fsspec opens"
        ) from error
    return RemoteStore(url=place, files=files, root=str(root).rstrip("/"))
