"""Reports that several commands print: builds, verifications, devices, comparisons."""

from collections.abc import Sequence

from rich.text import Text

from edgekit.cli.screen import print_table, show_line, show_remarks
from edgekit.devices.device import DeviceStatus
from edgekit.devices.local.provider import OfferedProvider
from edgekit.devices.self_test import SelfTest
from edgekit.report import text
from edgekit.report.summary import BuildReport
from edgekit.verify.layers.comparison import Located
from edgekit.verify.report import VerifyReport
from edgekit.verify.two_models import ModelComparison


def show_build(report: BuildReport) -> None:
    """Prints a build: the table, what must be known, and where the report is."""
    print_table(text.table_build(report))
    if not report.passed:
        show_line(text.headline_build(report))
    show_remarks(text.list_remarks(report))
    show_line(f"report: {report.report}")


def show_verify(report: VerifyReport) -> None:
    """Prints a verification: the table, each failure, each device that was skipped."""
    if report.chance:
        print_table(Text(report.chance, "bold"))
    print_table(text.table_verify(report))
    if report.comparison:
        print_table(text.table_device_figures(report))
    if report.verdict != "pass":
        show_line(text.headline_verify(report))
    show_remarks(text.list_verify_remarks(report))
    show_line(f"{report.bundle}: {report.verdict}")


def show_self_test(test: SelfTest) -> None:
    """Prints what was tried on a device."""
    print_table(text.table_self_test(test))
    if test.skipped is not None:
        show_line(f"- not tried: {test.skipped}" + (f"; to run it: {test.command}" if test.command else ""))
    show_line(f"{test.device}: {'pass' if test.passed else 'fail'}")


def show_devices(statuses: Sequence[DeviceStatus], offered: Sequence[OfferedProvider] = ()) -> None:
    """Prints devices as a table, and another of the providers that are installed."""
    print_table(text.table_devices(statuses))
    if offered:
        print_table(text.table_providers(offered))


def show_comparison(report: ModelComparison, min_sqnr_db: float | None = None) -> None:
    """Prints how far two models lie apart, why that is too far, and where it begins."""
    print_table(text.table_outputs(report))
    if report.layers:
        print_table(text.table_layers(report.layers))
        show_line(f"first bad layer: {report.first_bad_layer or 'none'}")
    show_remarks(text.list_comparison_remarks(report, min_sqnr_db))
    if report.located is not None:
        show_located(report.located, str(report.device))


def show_located(found: Located, device: str) -> None:
    """Prints the layers of a model as a device computes them, and the first that it computes otherwise."""
    if found.layers:
        show_line(f"on {device} against this machine, each layer fed as it was there:")
        print_table(text.table_layers(found.layers))
    first, *notes = text.list_located(found)
    show_line(f"{device}: {first}")
    show_remarks(notes)
