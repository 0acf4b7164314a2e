"""A `group.toml`: which models belong together, what feeds what, and by which metric the whole is judged."""

import re
from pathlib import Path
from typing import Annotated

import msgspec

from edgekit.bundle.group.wiring import MOST_MEMBERS, Crop, Stage, Text, Tokens, Wiring
from edgekit.bundle.manifest.names import find_fault
from edgekit.errors import UsageError, suggest_name
from edgekit.plain import read_toml
from edgekit.recipe import PrecisionChoice
from edgekit.target import TaskLimit

DEFAULT_METRIC = TaskLimit(name="exact-match", decoder="strings", max_drop=5.0, gate="estimate")
"""How many results are exactly those of the float models, where a group states no metric."""


class MemberFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model of the group, seen from the file; `dims` gives its dynamic dimensions their sizes."""

    model: str
    dims: dict[str, int] = {}
    precision: PrecisionChoice | None = None


class GroupFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a `group.toml` says; what `stages` leave out is found by names."""

    members: Annotated[dict[str, MemberFile], msgspec.Meta(min_length=1, max_length=MOST_MEMBERS)]
    stages: Annotated[tuple[Stage, ...], msgspec.Meta(min_length=1, max_length=MOST_MEMBERS)]
    tokens: Tokens | None = None
    metric: TaskLimit = DEFAULT_METRIC
    name: str = ""

    @property
    def wiring(self) -> Wiring:
        """The stages and tokens as they stand in the file."""
        return Wiring(stages=self.stages, tokens=self.tokens)


_TABLES = (GroupFile, MemberFile, Stage, Text, Crop, Tokens, TaskLimit)


def read_group_file(path: Path) -> GroupFile:
    """Reads a `group.toml`; the name of a group without one is that of the file.

    Raises:
        UsageError: the file cannot be read, is malformed, has an unknown key, or a name that is no file's.
    """
    try:
        found = read_toml(path, GroupFile)
    except OSError as error:
        raise UsageError(f"cannot read '{path}': {error.strerror}", hint="a group is a .toml file") from error
    except msgspec.DecodeError as error:
        raise UsageError(f"'{path}' is malformed: {error}", hint=_suggest_key(str(error))) from error
    found = msgspec.structs.replace(found, name=found.name or path.stem)
    fault = "has a folder in it" if "/" in found.name else find_fault(found.name)
    if fault is not None:
        raise UsageError(f"the name {found.name[:99]!r} in '{path}' {fault}", hint='name = "speech"')
    return found


def _suggest_key(said: str) -> str:
    """Returns a hint for what is wrong in a file: the key that may be meant, of any table, or those of the file."""
    unknown = re.search(r"unknown field `([^`]*)`", said)
    if unknown is None:
        return f"the keys are {', '.join(GroupFile.__struct_fields__)}"
    return suggest_name(unknown[1], {key for table in _TABLES for key in table.__struct_fields__})
