"""The manifests as source code: what a loader in C++, Java or Swift is compiled with."""

from collections.abc import Sequence
from pathlib import Path

from edgekit.bundle.snippets import make_environment
from edgekit.package.variant import Variant

_TEMPLATES = Path(__file__).parent / "templates"


def render_table(template: str, variants: Sequence[Variant], **values: object) -> bytes:
    """Returns a file of `templates/` filled with bundles; the same bundles give the same bytes.

    Templates see `variants` and `values`, and filters that write a string literal: `cpp`, `java`, `kotlin`, `swift`.
    """
    environment = make_environment(_TEMPLATES)
    environment.filters["java"] = quote_java
    return environment.get_template(template).render(variants=variants, **values).encode()


def quote_java(text: str) -> str:
    """Returns a Java string literal; javac reads Unicode escapes before anything else, so controls are octal."""
    return '"' + "".join(_java_character(character) for character in text) + '"'


def _java_character(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    if " " <= character <= "~":
        return character
    # Three octal digits reach up to \377.
    if ord(character) < 256:
        return f"\\{ord(character):03o}"
    # Java's strings are UTF-16: a letter beyond the first plane is two escapes.
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))
