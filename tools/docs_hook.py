"""Lets `mkdocs build` add the pages that are generated from the code; mkdocs.yml names this file in `hooks`."""

import re
import shutil
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).parent))

from docs_messages import render_messages
from docs_reference import render_reference
from docs_targets import ROOT, render_target
from docs_texts import list_messages

_TARGET = re.compile(r"<!-- target (\w+) -->")


def on_files(files: Any, config: Any) -> Any:
    """Adds the reference, all messages, and for each target the notes on the sources of its facts."""
    notes = {f"targets/{path.parent.name}-notes.md": path.read_text() for path in ROOT.glob("targets/*/NOTES.md")}
    for path, text in {
        **render_reference(),
        "reference/messages.md": render_messages(list_messages()),
        **notes,
    }.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:  # noqa: ARG001 - mkdocs' signature
    """Inserts the tables of a target where its page asks for them."""
    return _TARGET.sub(lambda found: render_target(found[1]), markdown)


# On a page that is opened from the file system, browsers start no worker, which the search needs: this file replaces
# it.
_SHIM = Path(__file__).parent / "docs/node_modules/iframe-worker/shim/index.js"
_SHIM_URL, _SHIM_PLACE = "https://unpkg.com/iframe-worker/shim", "assets/javascripts/iframe-worker.js"


def on_post_page(output: str, page: Any, config: Any) -> str:  # noqa: ARG001 - mkdocs' signature
    """Replaces an address from which Material's offline plugin would load a script by a file next to the pages."""
    return output.replace(_SHIM_URL, "../" * page.url.count("/") + _SHIM_PLACE)


def on_post_template(output_content: str, template_name: str, config: Any) -> str:  # noqa: ARG001 - mkdocs' signature
    """Does the same for pages without text of their own."""
    return output_content.replace(_SHIM_URL, f"/{_SHIM_PLACE}")


def on_post_build(config: Any) -> None:
    """Copies that file next to the pages."""
    shutil.copy(_SHIM, Path(config["site_dir"]) / _SHIM_PLACE)
