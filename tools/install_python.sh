#!/bin/sh
# Makes .venv from a lock file, every package checked against its hash: tools/install_python.sh PYTHON LOCK
set -eu
python=$1 lock=$2
"$python" -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else 1)' ||
    { echo "edgekit needs Python 3.11 or newer; try: make PYTHON=python3.12 demo" >&2; exit 2; }
test -x .venv/bin/python || "$python" -m venv .venv ||
    { echo "this Python cannot make virtual environments; on Debian: apt-get install python3-venv" >&2; exit 2; }
.venv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r "$lock"
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
