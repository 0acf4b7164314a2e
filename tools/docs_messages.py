"""Renders the page of all messages: each error with its next step, and the sentences of reports, by subpackage."""

import re
from collections.abc import Iterator, Mapping, Sequence

from docs_texts import Message

from edgekit import errors

# The search of the site ranks parts of long pages low, but a user who pastes a message looks for this page.
_HEAD = """---
search:
  boost: 2
---

<!-- made by tools/docs_messages.py -->
# Messages

This page lists every message that edgekit prints. `…` stands for a name or a number of yours. To find your message,
search the page for a few of its words that are no names. [Troubleshooting](../troubleshooting.md) explains the messages
that people meet most often.

Each part of the page belongs to one stage, and has two lists:

- **Errors.** The command stopped with exit code 2 and printed `edgekit: error: MESSAGE (NEXT STEP)`. Where the next
  step depends on the cause, the table has all of them, with a `/` between them. In Python an error is an exception,
  whose class says what kind of thing is wrong.
- **In reports.** These sentences are no errors. The command did its work, and this is what it found, or a part of it.
  The report's verdict says whether a finding fails a bundle; [Gates](../concepts/gates.md) lists what is judged.

"""
_NO_STEP = "the next step depends on the cause: it stands in brackets behind the message"

ROOMS: Mapping[str, tuple[str, str]] = {
    "model": ("Reading a model", "[Fix shapes and names](../how-to/shapes.md)"),
    "data": ("Samples and labels", "[Give it your samples](../how-to/data.md)"),
    "prepare": ("Preparing a model", "[Rewrites](rewrites.md)"),
    "graph": ("Reading a graph", "[Fix shapes and names](../how-to/shapes.md)"),
    "check": ("What a target takes", "[It fell back to the CPU](../how-to/cpu-fallback.md)"),
    "quantize": ("Calibration and quantization", "[My INT8 model collapsed](../how-to/int8-collapsed.md)"),
    "convert": ("Conversion", "[Which files do I ship?](../how-to/which-files.md)"),
    "bundle": ("Bundles and groups", "[Bundles and digests](../concepts/bundles.md)"),
    "package": ("Packages", "[Packages](../how-to/package.md)"),
    "jobs": ("Builds", "[The pipeline](../concepts/pipeline.md)"),
    "verify": ("Verification", "[Gates](../concepts/gates.md)"),
    "devices": ("Devices", "[Devices](devices.md)"),
    "bench": ("Measuring time", "[Measure time](../how-to/time.md)"),
    "profile": ("Where the time goes", "[See where the time goes](../how-to/profile.md)"),
    "tune": ("Tuning a session", "[Tune a session](../how-to/tune.md)"),
    "forecasts": ("Forecasts", "[Forecast time on a phone](../how-to/forecast.md)"),
    "app": ("edgekit run and edgekit init", "[One file for an app](../how-to/app.md)"),
    "inspect": ("Looking into files", "[Commands](commands.md)"),
    "report": ("Reports", "[Files that edgekit writes](reports.md)"),
    "cli": ("The command line", "[Commands](commands.md)"),
    "": ("Files, targets and libraries", "[Files that you write](files.md)"),
}
"""The subpackages of edgekit in the order of the page: the heading of each, and the page that says more."""


def render_messages(messages: Sequence[Message]) -> str:
    """Returns the page of all messages."""
    lines = [_HEAD, *_render_kinds(messages)]
    for room, (title, page) in ROOMS.items():
        lines += _render_room([message for message in messages if message.room == room], title, page)
    return "\n".join(lines) + "\n"


def _render_kinds(messages: Sequence[Message]) -> Iterator[str]:
    yield "| class of an error | what it means |\n|---|---|"
    for name in sorted({message.kind for message in messages if message.kind}):
        yield f"| `{name}` | {(getattr(errors, name).__doc__ or '').strip()} |"


def _render_room(messages: Sequence[Message], title: str, page: str) -> Iterator[str]:
    raised = [message for message in messages if message.kind]
    told = [message for message in messages if not message.kind]
    yield f"\n## {title}\n\nThis page says more: {page}.\n"
    if raised:
        yield '<div class="messages" markdown>\n\n| error | next step | class |\n|---|---|---|'
        yield from (f"| {_code(each.text)} | {_prose(each.hint or _NO_STEP)} | `{each.kind}` |" for each in raised)
        yield "\n</div>\n"
    if told:
        yield f"### {title}: in reports\n"
        yield from (f"- {_code(each.text)}" for each in told)


def _code(text: str) -> str:
    """Returns a message as code, so that it can be searched; as prose if it contains code itself."""
    return _prose(text) if "`" in text else f"`{_cell(text)}`"


def _prose(text: str) -> str:
    return re.sub(r"([*_<\[\]])", r"\\\1", _cell(text))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
