"""What `prepare --fix` and `check` would do about the nodes that cost the most."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from edgekit._ort import CPU_PROVIDER
from edgekit.check.check import check_model
from edgekit.model.model import Model
from edgekit.model.skim import skim_model
from edgekit.prepare.fix import FIXES, apply_rewrites
from edgekit.prepare.tidy import merge_domains, name_nodes
from edgekit.profile.report import Cause, NodeTime
from edgekit.target import Target, load_target, target_names

_WORTH = 0.01


def give_advice(model: Model, target: Target, nodes: Sequence[NodeTime]) -> tuple[Cause, ...]:
    """Returns the changes to a model that touch nodes worth a hundredth of the time or more, the largest part first.

    Those are the rewrites that serve every provider, and what `check` advises for a target with a provider of its own.

    Raises:
        EdgekitError: the model cannot be read, or the target's rules.
    """
    found = [*_list_fixes(model, nodes), *_list_checks(model, target, nodes)]
    whole = sum(node.self_ms for node in nodes)
    worth = [cause for cause in found if cause.milliseconds >= _WORTH * whole]
    return tuple(sorted(worth, key=lambda cause: -cause.milliseconds))


def _list_fixes(model: Model, nodes: Sequence[NodeTime]) -> Iterator[Cause]:
    proto = skim_model(model.path)
    merge_domains(proto)
    name_nodes(proto.graph)
    for fix in apply_rewrites(proto, tuple(FIXES)):
        yield _name_cause(
            nodes,
            fix.nodes,
            rule=fix.id,
            message=f"'{fix.id}' of prepare changes {len(fix.nodes)} nodes that take",
            advice=f"edgekit prepare {model.path.name} --fix --out FILE",
        )


def _list_checks(model: Model, target: Target, nodes: Sequence[NodeTime]) -> Iterator[Cause]:
    ruled = _find_rules(target)
    if target.provider == CPU_PROVIDER or ruled is None:
        return
    for advice in check_model(model, ruled).advice:
        yield _name_cause(
            nodes,
            advice.nodes,
            rule=advice.id,
            message=f"{advice.message} ({advice.subject}): elsewhere run",
            advice=f"edgekit check {model.path.name} --target {target.name}",
        )


def _find_rules(target: Target) -> Target | None:
    """Returns a target with its rules: that of a bundle has no folder, but is mostly one that edgekit ships."""
    if target.folder != Path():
        return target
    if target.name not in target_names():
        return None
    return msgspec.structs.replace(target, folder=load_target(target.name).folder)


def _name_cause(nodes: Sequence[NodeTime], names: Iterable[str], *, rule: str, message: str, advice: str) -> Cause:
    """Returns a cause that is about the nodes with these names in the model: its message ends in their time."""
    wanted = frozenset(names)
    touched = [node for node in nodes if node.source in wanted]
    milliseconds = sum(node.self_ms for node in touched)
    return Cause(
        id=rule,
        message=f"{message} {milliseconds:.3g} ms",
        milliseconds=milliseconds,
        advice=advice,
        nodes=tuple(node.name for node in touched),
    )
