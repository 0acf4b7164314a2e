"""Manifests of older schema versions, brought to today's."""

from collections.abc import Sequence
from typing import Any, cast

_Table = dict[str, Any]

_TENSOR: _Table = {"layout": "", "value_range": None, "preprocessing": None, "postprocessing": None}
_GOLDEN: _Table = {"chosen": [], "tolerance": {}, "expected_from": ""}


def migrate_manifest(raw: Any) -> Any:
    """Returns a manifest of version 1 as one of version 2, and anything else as it is.

    What version 1 did not say is said to be unknown. What is malformed stays so, and is found by whoever reads it.
    """
    table = _table(raw)
    if table.get("schema_version") != 1:
        return raw
    versions, files = _table(table.get("versions")), _table(table.get("files"))
    placement: _Table = {"providers": {}, "node_list": _table(files.get("check.json")).get("sha256", "")}
    added: _Table = {
        "platforms": {},
        "tested": {"onnxruntime": versions.get("onnxruntime", ""), "qairt": versions.get("qairt"), "socs": []},
        "canonical_form": 1 if {"full", "runtime"} & _table(table.get("forms")).keys() else None,
        "provenance": {"command": "", "recipe": {}},
        "licence": {},
        "fallback": [],
        "evidence": "verify.json",
    }
    return {
        **added,
        **table,
        "schema_version": 2,
        "inputs": _widen(table.get("inputs")),
        "outputs": _widen(table.get("outputs")),
        "golden": _merge(_GOLDEN, table.get("golden")),
        "placement": _merge(placement, table.get("placement")),
    }


def _widen(tensors: Any) -> Any:
    return [_merge(_TENSOR, item) for item in cast("Sequence[Any]", tensors)] if isinstance(tensors, list) else tensors


def _merge(defaults: _Table, value: Any) -> Any:
    return {**defaults, **_table(value)} if isinstance(value, dict) else value


def _table(value: Any) -> _Table:
    return cast("_Table", value) if isinstance(value, dict) else {}
