"""Lets `mkdocs build` add the pages that are made from the code; mkdocs.yml names this file in `hooks`."""

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).parent))

from docs_reference import render_reference
from docs_targets import ROOT, render_target

_TARGET = re.compile(r"<!-- target (\w+) -->")


def on_files(files: Any, config: Any) -> Any:
    """Adds the reference, and of each target the notes on where its facts come from."""
    notes = {f"targets/{path.parent.name}-notes.md": path.read_text() for path in ROOT.glob("targets/*/NOTES.md")}
    for path, text in {**render_reference(), **notes}.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:  # noqa: ARG001 - mkdocs' signature
    """Puts the tables of a target where its page asks for them."""
    return _TARGET.sub(lambda found: render_target(found[1]), markdown)
