#!/bin/sh
# Makes .venv from a lock file, every package checked against its hash: tools/install_python.sh PYTHON LOCK
set -eu
python=$1 lock=$2
"$python" -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else 1)' ||
    { echo "edgekit needs Python 3.11 or newer; try: make PYTHON=python3.12 demo" >&2; exit 2; }
test -x .venv/bin/python || "$python" -m venv --without-pip .venv || exit 2
pip() {
    .venv/bin/python -c 'import pip' 2>/dev/null || .venv/bin/python -m ensurepip >/dev/null 2>&1 ||
        { echo "this Python cannot make virtual environments; on Debian: apt-get install python3-venv" >&2; exit 2; }
    .venv/bin/python -m pip --quiet --disable-pip-version-check "$@"
}
# The pip of PYTHON can fill .venv too: unpacking another there would take longer than uv takes for all packages.
"$python" -m pip --python .venv/bin/python --quiet --disable-pip-version-check install --require-hashes \
    -r tools/lock/install.txt 2>/dev/null || pip install --require-hashes -r tools/lock/install.txt
# uv is many times as fast, but reads no pip.conf: the address of a mirror is handed on, and pip stands in where uv fails.
mirror=$("$python" -m pip config list 2>/dev/null | sed -n "s/^[a-z:]*\.index-url='\(.*\)'$/\1/p" | tail -n 1)
uv() {
    UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-${mirror:-https://pypi.org/simple}} UV_NATIVE_TLS=${UV_NATIVE_TLS:-1} \
        .venv/bin/python -m uv pip install --no-config --quiet --python .venv/bin/python "$@"
}
uv --require-hashes -r "$lock" ||
    { echo "uv could not install $lock; trying pip" >&2; pip install --require-hashes -r "$lock"; }
uv --no-deps --no-build-isolation --editable . || pip install --no-deps --no-build-isolation --editable .
