"""Which files of a bundle go into a package: what the loader opens and what its self-test reads, and more on demand."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from edgekit._files import digest_file
from edgekit.bundle.folder import GOLDEN, MANIFEST, Bundle
from edgekit.bundle.golden.expected import EXPECTED
from edgekit.bundle.golden.golden import INPUTS, OUTPUTS, read_inputs
from edgekit.bundle.golden.rows import write_rows
from edgekit.bundle.manifest.manifest import BundledFile
from edgekit.data.samples import select_samples
from edgekit.errors import UsageError, suggest_name
from edgekit.target import Form

Extra = Literal["all", "forms", "golden", "onnx"]
EXTRAS: tuple[Extra, ...] = ("all", "forms", "golden", "onnx")
"""What a package can carry besides: whole bundles, every form of the model, all golden samples, the ONNX form."""


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a bundle that a package carries, by their name below the bundle's folder, and how to test with them.

    `golden` is the folder of `inputs.npz`, of `samples` rows; several bundles may share it, and then it begins with
    `../`. The self-test compares with `reference`: the float model's outputs of every row, or what the bundle's own
    model gave for the rows `chosen`, which lies in the bundle's own `golden/`.
    """

    files: dict[str, Path]
    golden: str
    samples: int
    chosen: tuple[int, ...]
    reference: Literal["outputs", "expected"]

    def list_files(self) -> dict[str, BundledFile]:
        """Returns digest and size of each file, sorted by name."""
        return {
            name: BundledFile(sha256=digest_file(path), size_bytes=path.stat().st_size)
            for name, path in sorted(self.files.items())
        }


def parse_extras(given: Iterable[str]) -> tuple[Extra, ...]:
    """Returns names that may stand in one word with commas, each once, sorted.

    Raises:
        UsageError: there is no such extra.
    """
    words = sorted({word.strip() for text in given for word in text.split(",")})
    for word in words:
        if word not in EXTRAS:
            raise UsageError(f"--with '{word}': a package cannot carry that", hint=suggest_name(word, EXTRAS))
    return tuple(extra for extra in EXTRAS if extra in words)


def cut_bundles(bundles: Sequence[Bundle], extras: Collection[Extra], work: Path, *, share: bool) -> tuple[Cut, ...]:
    """Returns what a package carries of each bundle; golden samples are cut into files below the folder `work`.

    Of the golden samples those of the self-test go along, those of all bundles together, and with `share` only once. A
    bundle without a self-test of its own keeps them all: nothing less can prove it.

    Raises:
        UsageError: all samples of a bundle with open dimensions are to go along.
    """
    rows: dict[str, set[int]] = {}
    for bundle in bundles:
        rows.setdefault(_inputs(bundle), set()).update(sample.row for sample in bundle.manifest.golden.chosen)
    return tuple(_cut(bundle, extras, sorted(rows[_inputs(bundle)]), work, share=share) for bundle in bundles)


def _inputs(bundle: Bundle) -> str:
    return bundle.manifest.files[f"{GOLDEN}/{INPUTS}"].sha256


def _cut(bundle: Bundle, extras: Collection[Extra], rows: Sequence[int], work: Path, *, share: bool) -> Cut:
    manifest, files = bundle.manifest, _list_models(bundle, extras)
    files[MANIFEST] = bundle.folder / MANIFEST
    chosen = tuple(sample.row for sample in manifest.golden.chosen)
    if "all" in extras:
        files |= {name: bundle.folder / name for name in manifest.files}
    if chosen:
        files[f"{GOLDEN}/{EXPECTED}"] = bundle.folder / GOLDEN / EXPECTED
    if not chosen or {"all", "golden"} & set(extras):
        if manifest.open_dims:
            raise UsageError(
                f"golden samples of '{bundle.folder}' have several sizes, and a loader's self-test reads rows of one",
                hint="leave out --with: those of the self-test go along",
            )
        whole = {INPUTS: bundle.folder / GOLDEN / INPUTS, OUTPUTS: bundle.folder / GOLDEN / OUTPUTS}
        golden = _place(files, whole, share=share and "all" not in extras)
        return Cut(files=files, golden=golden, samples=manifest.golden.samples, chosen=chosen, reference="outputs")
    # One file for all bundles of the same samples.
    inputs = work / f"{_inputs(bundle)}.npz"
    if not inputs.exists():
        write_rows(inputs, select_samples(read_inputs(bundle.golden), rows))
    golden = _place(files, {INPUTS: inputs}, share=share)
    # The samples of other bundles lie in the file too: each bundle's own are told by their place in it.
    places = tuple(rows.index(row) for row in chosen)
    return Cut(files=files, golden=golden, samples=len(rows), chosen=places, reference="expected")


def _place(files: dict[str, Path], golden: Mapping[str, Path], *, share: bool) -> str:
    """Adds golden files to those of a bundle, beside its folder where they are shared, and returns their folder."""
    # By content: what is the same lies in one folder, whichever bundle it came from.
    folder = f"../{GOLDEN}-{digest_file(golden[INPUTS])[:12]}" if share else GOLDEN
    files.update({f"{folder}/{name}": path for name, path in golden.items()})
    return folder


def _list_models(bundle: Bundle, extras: Collection[Extra]) -> dict[str, Path]:
    manifest = bundle.manifest
    forms: set[Form] = {manifest.form, *(manifest.forms if "forms" in extras else ())}
    if "onnx" in extras and "onnx" in manifest.forms:
        forms.add("onnx")
    return {name: bundle.folder / name for form in sorted(forms) for name in manifest.forms[form]}
