"""Networks published by others: generated once, built for five targets, and each verdict compared with the truth.

    python tools/corpus/corpus.py make [--only WORD]
    python tools/corpus/corpus.py bench [--only WORD] [--label NAME] [--held-out]
    python tools/corpus/corpus.py show LABEL

`make` installs PyTorch and libraries of architectures below $EDGEKIT_CACHE/corpus (6 GB), writes the networks of
nets.toml with both exporters, and takes trained ones out of packages. `bench` (`make bench GROUP=corpus`) builds and
verifies the networks that are there. It returns 1 if more than 1 % of the verdicts are wrong, if a network ends in a
traceback or costs more than 120 CPU seconds, or if a shipped file does not start or contradicts its description.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import msgspec
from confusion import MOST_CPU_S, Row, format_matrix, judge_net, read_rows, run_corpus
from make import list_made, make_corpus
from oracle import DEVICES
from table import list_nets

from edgekit.devices.find import find_device
from edgekit.target import load_target


def main() -> int:
    """Runs the subcommand."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["make", "bench", "show", "judge"])
    parser.add_argument("name", nargs="?", default="")
    parser.add_argument("--only", default="", metavar="WORD", help="networks whose name contains it")
    parser.add_argument("--label", default="", help="the run that is begun or goes on; else the commit")
    parser.add_argument("--held-out", action="store_true", help="also those that nobody looks at before the end")
    parser.add_argument("--targets", default=",".join(DEVICES))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=3600.0, metavar="SECONDS", help="for one network")
    parser.add_argument("--most", type=int, default=0, help="networks of this run")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.action == "make":
        failures = list(make_corpus(options.only))
        print("\n".join((*failures, f"{len(list_made(list_nets()))} of {len(list_nets())} networks are there")))
        return int(bool(failures))
    if options.action == "show":
        return report(read_rows(options.name))
    if options.action == "judge":
        (net,) = [net for net in list_nets() if net.name == options.name]
        row = judge_net(net, options.targets.split(","), options.out)
        print(msgspec.json.encode(row).decode())
        return 0
    return bench(options)


def bench(options: argparse.Namespace) -> int:
    """Runs the requested networks that are there."""
    made = list_made(list_nets())
    nets = [net for net in made if options.only in net.name and (options.held_out or not net.held_out)]
    if not nets:
        print("there are no such networks yet: python tools/corpus/corpus.py make")
        return 2
    targets = options.targets.split(",")
    for target in targets:
        if missing := find_device(DEVICES[target], load_target(target)).find_missing():
            print(f"'{DEVICES[target]}' cannot run here: {missing.reason} ({missing.command})")
            return 2
    # The small ones first, so that a stopped run has covered many.
    nets = sorted(nets, key=lambda net: (net.folder / "model.onnx").stat().st_size)[: options.most or None]
    rows = list[Row]()
    label = options.label or _read_commit()
    for row in run_corpus(nets, targets, label, options.jobs, options.timeout):
        rows.append(row)
        said = ", ".join(f"{each.target} {each.verdict}/{each.state}" for each in row.findings) or row.failure
        print(f"{len(rows)}/{len(nets)} {row.net}: {said}; {row.cpu_s:.0f} CPU s", file=sys.stderr, flush=True)
    return report(rows)


def report(rows: list[Row]) -> int:
    """Prints the matrix, separately for held-out networks, and returns 1 if a promise is broken."""
    for held_out in (False, True):
        if own := [row for row in rows if row.held_out is held_out]:
            print("\nheld out:" if held_out else "", *format_matrix(own), sep="\n")
    findings = [finding for row in rows for finding in row.findings]
    broken = any(
        finding.verdict == "traceback" or finding.state == "does not start" or finding.untrue for finding in findings
    )
    wrong = sum(finding.is_wrong for finding in findings)
    dear = any(row.cpu_s > MOST_CPU_S or row.failure for row in rows)
    return int(broken or dear or wrong > 0.01 * len(findings))


def _read_commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
