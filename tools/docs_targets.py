"""Renders the tables of a target's page from its `target.toml`."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from docs_reference import render_table

from edgekit.target import Parameter, Quantization, Target, load_target

ROOT = Path(__file__).parents[1]


def render_target(name: str) -> str:
    """Returns the tables of a target: parameters, quantization, files, session, verification, limits."""
    target = load_target(name)
    return "\n".join((*_render_facts(target), *_render_session(target), *_render_proof(target)))


def _render_facts(target: Target) -> Iterator[str]:
    yield f"## What edgekit builds for it\n\n{target.title}.\n"
    yield render_table(
        ("", ""),
        [
            ("provider", f"`{target.provider}`"),
            ("precisions, the first by default", ", ".join(target.precisions)),
            ("why", target.precision_reason),
            ("files, the first is the one to load", ", ".join(target.conversion.forms)),
            ("why these", target.conversion.reason),
            ("ONNX Runtime", f"{target.minimum_ort} or newer: {target.runtime}"),
            ("where it cannot run", ", then ".join(target.fallback) or "there is nothing below it"),
        ],
    )
    yield "### Quantization\n\n" + render_table(("", ""), list(_describe_quantization(target.quantization)))
    if target.parameters:
        rows = [(f"`{key}`", one.default, _allowed(one), one.description) for key, one in target.parameters.items()]
        yield "### Parameters\n\n" + render_table(("`--set`", "default", "allowed", "what it is"), rows)


def _describe_quantization(rules: Quantization) -> Iterator[tuple[str, str]]:
    yield "activations", rules.activation + (", symmetric" if rules.activation_symmetric else "")
    yield "weights", rules.weight + (", 7 bits" if rules.reduce_range else "")
    yield "a scale for each channel", ", ".join(rules.per_channel_ops) or "no: one for all weights of a node"
    for key, names in (
        ("weights stored as uint8", rules.unsigned_ops),
        ("float only", rules.float_ops),
        ("one scale for all inputs and outputs", rules.shared_ops),
    ):
        if names:
            yield key, ", ".join(names)


def _allowed(parameter: Parameter) -> str:
    if parameter.choices:
        return ", ".join(parameter.choices)
    return f"{parameter.minimum} to {parameter.maximum}" if parameter.minimum is not None else "any"


def _render_session(target: Target) -> Iterator[str]:
    session = target.session
    rows: Sequence[tuple[str, str, str]] = [
        *(("provider option", f"`{key}`", f"`{value}`") for key, value in session.provider_options.items()),
        *(("session entry", f"`{key}`", f"`{value}`") for key, value in session.config.items()),
    ]
    yield "## What an app must pass\n"
    yield render_table(("", "key", "value"), rows) or "Nothing but the provider's name.\n"
    yield f"Systems: {', '.join(session.platforms)}. `manifest.json` and `app/` of a bundle hold this filled in.\n"


def _render_proof(target: Target) -> Iterator[str]:
    limits = {name: getattr(target.thresholds, name) for name in target.thresholds.__struct_fields__}
    yield "## How it is verified\n"
    yield render_table(
        ("device", "file", "samples at most"),
        [(f"`{one.device}`", one.form, str(one.samples)) for one in target.verification],
    )
    yield render_table(
        ("limit", "value"),
        [(f"`{name}`", f"{value}") for name, value in limits.items() if value is not None and value is not False],
    )
