"""The README of a group, for the developer of an app: which graph runs when, and what feeds it."""

from collections.abc import Iterator, Mapping

from edgekit.bundle.group.wiring import Stage, Tokens, Wiring
from edgekit.bundle.snippets import plain

_WINDOWS = (
    "What is longer than the input that it feeds gives its last rows; the rows of what is shorter are appended to the"
    " input, whose oldest go."
)


def render_group_readme(name: str, target: str, wiring: Wiring, models: Mapping[str, str]) -> str:
    """Returns the README; `models` names the file to load of each member."""
    lines = [
        f"# {plain(name)} for {plain(target)}",
        "",
        "Made by edgekit. Each folder in `members/` has the manifest of one graph; `group.json` says what feeds what.",
        *(_tell_tokens(wiring.tokens) if wiring.tokens else ()),
        *([_WINDOWS] if any(stage.state for stage in wiring.stages) else []),
    ]
    for number, stage in enumerate(wiring.stages, 1):
        lines += ["", f"## {number}. {plain(stage.run)}", "", f"Load `{plain(models[stage.run])}`. {_tell_turn(stage)}"]
        lines += [
            "",
            "| input | is fed by |",
            "|---|---|",
            *(f"| `{plain(a)}` | {b} |" for a, b in _tell_inputs(stage)),
        ]
    return "\n".join((*lines, ""))


def _tell_tokens(tokens: Tokens) -> Iterator[str]:
    start = f"`{plain(tokens.start)}`" if isinstance(tokens.start, str) else ", ".join(map(str, tokens.start))
    end = "" if tokens.end is None else f", or until token {tokens.end}"
    yield f"A text begins with the tokens {start} and goes on for at most {tokens.most} more{end}."


def _tell_turn(stage: Stage) -> str:
    if stage.crop is not None:
        return f"It runs once for each box; the largest of `{plain(stage.crop.result)}` is the class."
    turn = "It runs until the text ends" if stage.repeat else "It runs once"
    return f"{turn}; the largest of `{plain(stage.text.scores)}` is the next token." if stage.text else f"{turn}."


def _tell_inputs(stage: Stage) -> Iterator[tuple[str, str]]:
    if stage.text is not None:
        side = stage.text.align or "left"
        yield stage.text.input, f"the tokens, at the {side}"
        if stage.text.mask:
            yield stage.text.mask, "1 where a token stands or stood, else 0"
        if stage.text.positions:
            yield stage.text.positions, "the position of each token, from 0"
    if stage.crop is not None:
        crop = stage.crop
        yield crop.input, f"the box cut out of `{plain(crop.image)}` and resized; boxes from `{plain(crop.boxes)}`"
    for name, source in sorted(stage.feeds.items()):
        later = f", then `{plain(stage.state[name])}` of the run before" if name in stage.state else ""
        yield name, f"`{plain(source)}`{later}"
    for name in sorted(stage.state.keys() - stage.feeds.keys()):
        yield name, f"zeros, then `{plain(stage.state[name])}` of the run before"
