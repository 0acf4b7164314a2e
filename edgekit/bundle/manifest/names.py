"""Names that mean the same file on every system, and nothing outside the folder they are in."""

import unicodedata
from collections.abc import Iterable
from itertools import pairwise

_MAX_NAME_BYTES = 512
# The longest name that ext4 (in bytes) and NTFS (in UTF-16 units) have room for.
_MAX_PART_BYTES = 255
_MAX_DEPTH = 16
_FORBIDDEN = frozenset('<>:"|?*\\')
# The superscript digits are devices too: Windows takes them for 1, 2 and 3 ("Naming files, paths, and namespaces").
_DEVICES = frozenset(
    {"con", "prn", "aux", "nul", "conin$", "conout$"}
    | {f"{kind}{digit}" for kind in ("com", "lpt") for digit in "123456789¹²³"}
)


def find_fault(name: str) -> str | None:
    """Returns why a name with `/` between folders is no safe file name, None if it is one.

    Safe is what Linux, macOS and Windows all take for the same file below the folder: see Microsoft's "Naming files,
    paths, and namespaces" for the characters, the final dots and spaces, and the names of devices.
    """
    if not name or len(name) > _MAX_NAME_BYTES:
        return "is empty or too long"
    try:
        size_bytes = len(name.encode())
    except UnicodeEncodeError:
        return "is no text"
    parts = name.split("/")
    if size_bytes > _MAX_NAME_BYTES or len(parts) > _MAX_DEPTH:
        return "is too long"
    return next((fault for part in parts if (fault := _find_fault_of_part(part))), None)


def find_clash(names: Iterable[str]) -> tuple[str, str] | None:
    """Returns two names that cannot both be files: equal but for case or Unicode form, or one a folder of the other."""
    # Split before sorting: as texts "a-b" would stand between "a" and "a/b", and the neighbours would not meet.
    folded = sorted((tuple(_fold(name).split("/")), name) for name in names)
    for (first, name), (second, other) in pairwise(folded):
        if second[: len(first)] == first:
            return name, other
    return None


def _find_fault_of_part(part: str) -> str | None:
    if part in {"", ".", ".."}:
        return "is absolute or climbs"
    if any(unicodedata.category(character).startswith("C") for character in part) or not _FORBIDDEN.isdisjoint(part):
        return "holds a character that is not allowed everywhere"
    if part[-1] in ". " or len(part.encode()) > _MAX_PART_BYTES:
        return "ends in a dot or a space, or is too long"
    # "nul.txt" is the device as well: Windows looks at what stands before the first dot.
    if part.partition(".")[0].rstrip().casefold() in _DEVICES:
        return "is the name of a device on Windows"
    return None


def _fold(name: str) -> str:
    # Twice, because folding the case may take a composed letter apart; macOS compares names without regard to either.
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
