"""What a wiring leaves out, found by names: an input is fed by what bears its name, state by what comes next."""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from edgekit.bundle.group.wiring import DATA, Interface, Stage, Wiring
from edgekit.model.state import match_state


def settle_wiring(wiring: Wiring, members: Mapping[str, Interface]) -> Wiring:
    """Returns the wiring with every source written out; what stands in it is left as it is.

    An input that nothing fills is fed by the output of its name of the nearest stage before it, else by one that
    `match_state` finds there, else by the group's input of its name. A stage that repeats feeds its own outputs back as
    `match_state` finds them. Text stands at the right where any stage has state.
    """
    stages: list[Stage] = []
    for stage in wiring.stages:
        mine = members.get(stage.run)
        stages.append(stage if mine is None else _settle_stage(stage, mine, stages, members))
    align: Literal["left", "right"] = "right" if any(stage.state for stage in stages) else "left"
    return msgspec.structs.replace(wiring, stages=tuple(_align(stage, align) for stage in stages))


def _settle_stage(stage: Stage, mine: Interface, before: Sequence[Stage], members: Mapping[str, Interface]) -> Stage:
    state = dict(stage.state)
    if stage.repeat and not state:
        state = match_state(list(mine.inputs.values()), list(mine.outputs.values()))
    text, crop = stage.text, stage.crop
    roles = {text.input, text.mask, text.positions} if text else set[str]()
    roles |= {crop.input} if crop else set()
    feeds = dict(stage.feeds)
    for name in mine.inputs:
        if name in feeds or name in roles:
            continue
        source = _find_source(name, mine, before, members)
        # State that nothing begins begins with zeros.
        if source is not None or name not in state:
            feeds[name] = source or f"{DATA}.{name}"
    return msgspec.structs.replace(stage, feeds=feeds, state=state)


def _find_source(name: str, mine: Interface, before: Sequence[Stage], members: Mapping[str, Interface]) -> str | None:
    for stage in reversed(before):
        other = members.get(stage.run)
        if other is None or stage.repeat or stage.crop is not None:
            continue
        if name in other.outputs:
            return f"{stage.run}.{name}"
        found = match_state([mine.inputs[name]], list(other.outputs.values()))
        if name in found:
            return f"{stage.run}.{found[name]}"
    return None


def _align(stage: Stage, align: Literal["left", "right"]) -> Stage:
    if stage.text is None or stage.text.align is not None:
        return stage
    text = msgspec.structs.replace(stage.text, align=align)
    return msgspec.structs.replace(stage, text=text)
