"""Renders the README, code snippets and dependencies of a bundle for app developers, from the manifest."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import jinja2
import msgspec
from jinja2.sandbox import SandboxedEnvironment

from edgekit._ort import CPU_PROVIDER
from edgekit.bundle.manifest import Manifest
from edgekit.errors import TargetError, reraised
from edgekit.evidence import Evidence
from edgekit.model.tensors import TensorSpec
from edgekit.target import Target, read_version


class Dependency(msgspec.Struct, frozen=True, kw_only=True):
    """A Maven artifact; `runtime` is True if it is needed only at run time."""

    group: str
    artifact: str
    version: str
    runtime: bool = False

    @property
    def notation(self) -> str:
        """Gradle's notation: `group:artifact:version`."""
        return f"{self.group}:{self.artifact}:{self.version}"


ANDROID_RELEASE = "1.29.0"
"""The version of the archive for Android that edgekit downloads, and with which it verifies bundles."""

SWIFT_PACKAGE = "https://github.com/microsoft/onnxruntime-swift-package-manager"
"""ONNX Runtime for SwiftPM, by Microsoft; its product is `onnxruntime`."""

# By provider: group, artifact, its name in the manifest's `versions`, and the default version.
_PLUGINS = {
    "QNNExecutionProvider": (
        ("com.qualcomm.qti", "onnxruntime-android-qnn", "onnxruntime-qnn", "2.7.0"),
        ("com.qualcomm.qti", "qnn-runtime", "qairt", "2.51.0"),
    )
}


def choose_android_release(minimum_ort: str) -> str:
    """Returns the version of `onnxruntime-android` for a bundle: ANDROID_RELEASE, or a newer one that it needs.

    The ONNX Runtime that made the bundle is a wheel for desktops; not every such version has an archive for Android.
    """
    return max(ANDROID_RELEASE, minimum_ort, key=read_version)


def list_android_dependencies(provider: str, versions: Mapping[str, str], ort: str) -> tuple[Dependency, ...]:
    """Returns the dependencies of an Android app for a provider: ONNX Runtime of version `ort`, and its plug-ins.

    `versions` are those that the bundle was made with.
    """
    return (
        Dependency(group="com.microsoft.onnxruntime", artifact="onnxruntime-android", version=ort),
        *(
            Dependency(group=group, artifact=artifact, version=versions.get(key, known), runtime=True)
            for group, artifact, key, known in _PLUGINS.get(provider, ())
        ),
    )


NOTES = "notes.md"
"""The file with a target's notes for the README of its bundles."""


def render_snippets(target: Target, manifest: Manifest) -> Mapping[str, str]:
    """Returns the text of each snippet by file name; a target without templates has none.

    `notes.md` has the target's notes for the bundle's README; the others are code.

    Templates are the files `app/*.j2` of the target's folder. They see `manifest`, `runtime_version` (of the ONNX
    Runtime that the bundle was tested with), `interface` (a table of inputs and outputs), and filters that make a
    value safe: `kotlin`, `swift` and `cpp` write a string literal, `plain` text for Markdown.

    Raises:
        TargetError: a template is malformed, or uses a value that does not exist.
    """
    folder = target.folder / "app"
    environment = make_environment(folder)
    version = manifest.versions.get("onnxruntime", manifest.minimum_ort)
    values = {"manifest": manifest, "interface": describe_interface(manifest), "runtime_version": version}
    snippets: dict[str, str] = {}
    for path in sorted(folder.glob("*.j2")):
        malformed = TargetError(f"template '{path}' is malformed", hint="mend the template")
        with reraised((jinja2.TemplateError, UnicodeDecodeError), malformed, quote=True):
            snippets[path.name.removesuffix(".j2")] = environment.get_template(path.name).render(values)
    return snippets


def quote(text: str, escape: Callable[[str], str], unsafe: str = '"\\') -> str:
    """Returns a string literal in double quotes; `escape` spells characters beyond printable ASCII, or in `unsafe`."""
    return '"' + "".join(one if " " <= one <= "~" and one not in unsafe else escape(one) for one in text) + '"'


def quote_kotlin(text: str) -> str:
    """Returns a Kotlin string literal; other characters than printable ASCII are written as UTF-16 code units."""
    # $ begins a template in Kotlin's strings.
    return quote(text, lambda one: f"\\{one}" if one in '"\\$' else spell_utf16(one), '"\\$')


def quote_swift(text: str) -> str:
    """Returns a Swift string literal; other characters than printable ASCII are written as Unicode scalars."""
    return quote(text, lambda one: f"\\{one}" if one in '"\\' else f"\\u{{{ord(one):x}}}")


def quote_cpp(text: str) -> str:
    """Returns a C++ string literal in UTF-8; other bytes than printable ASCII are three-digit octal escapes."""
    # "?" is escaped because of trigraphs; a hex escape would include digits that follow it.
    return quote(text, lambda one: "".join(f"\\{byte:03o}" for byte in one.encode()), '"\\?')


def spell_utf16(one: str) -> str:
    """Returns a character as escapes of UTF-16 code units, two of them for a surrogate pair."""
    units = one.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))


def clean_line(text: str) -> str:
    """Returns text for Markdown, with spaces in place of control characters and line ends."""
    return "".join(character if character.isprintable() else " " for character in text)


def describe_interface(manifest: Manifest) -> str:
    """Returns the inputs and outputs as a Markdown table."""
    rows = [("input", spec) for spec in manifest.inputs] + [("output", spec) for spec in manifest.outputs]
    lines = [f"| {side} | `{clean_line(spec.name)}` | {spec.dtype} | [{_dims(spec)}] |" for side, spec in rows]
    return "\n".join(("| | name | type | shape |", "|---|---|---|---|", *lines, ""))


@functools.lru_cache
def make_environment(folder: Path) -> SandboxedEnvironment:
    """Returns the environment of the templates in a folder, with the filters that make a value safe.

    It is cached; a template is compiled again only if its file changed.
    """
    # The templates of a target may be untrusted: the sandbox gives them values, but not Python's internals.
    environment = SandboxedEnvironment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        # Code and Markdown, not HTML: the filters below quote for each language.
        autoescape=False,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update({"kotlin": quote_kotlin, "swift": quote_swift, "cpp": quote_cpp, "plain": clean_line})
    return environment


def _dims(spec: TensorSpec) -> str:
    return ", ".join("depends on the data" if dim is None else clean_line(str(dim)) for dim in spec.shape or ())


README = "README.md"
EVIDENCE_LEVELS: dict[str, Evidence] = {
    "android": Evidence.SAME_BINARY, "android:x86_64": Evidence.SAME_EP, "arm64": Evidence.SAME_ARCH,
    "coreml": Evidence.DEVICE, "emulated": Evidence.EMULATED, "host": Evidence.EMULATED, "host:cuda": Evidence.DEVICE,
    "host:directml": Evidence.DEVICE, "host:tensorrt": Evidence.DEVICE, "ios-sim": Evidence.SAME_EP,
    "openvino": Evidence.SAME_EP, "qnn-htp-sim": Evidence.SIMULATOR, "webgpu": Evidence.SAME_EP,
}  # fmt: skip
"""The evidence level of each device that targets name."""

_TEMPLATES = Path(__file__).parent / "templates"


def render_readme(target: Target, manifest: Manifest, notes: str, snippets: Mapping[str, str]) -> str:
    """Returns the README; `notes` are those of the target, `snippets` are the files of `app/`.

    It has nothing that differs from run to run: measured figures are in `verify.json`.
    """
    release = choose_android_release(manifest.minimum_ort)
    same = Evidence.SAME_EP if manifest.provider == CPU_PROVIDER else None
    levels = [(entry.device, same or EVIDENCE_LEVELS.get(entry.device)) for entry in manifest.verification]
    return render_template(
        "README.md.j2",
        manifest=manifest,
        title=target.title,
        notes=notes.strip(),
        snippets=sorted(snippets),
        interface=describe_interface(manifest),
        dependencies=list_android_dependencies(manifest.provider, manifest.versions, release),
        swift_package=SWIFT_PACKAGE,
        evidence=[
            (device, level.value, level.meaning) if level else (device, "by device", "see verify.json")
            for device, level in levels
        ],
    )


def render_template(name: str, /, **values: object) -> str:
    """Returns a template of `templates/`, rendered with values."""
    return make_environment(_TEMPLATES).get_template(name).render(values)
