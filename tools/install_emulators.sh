#!/bin/sh
# Installs the emulators that this machine can hold; a build says which it had to skip, and how to get it.
set -eu
status=0 android=""
# Side by side: one mostly compiles, the other mostly unpacks Debian's packages.
if command -v g++ >/dev/null 2>&1 || .venv/bin/python -c 'import ziglang' 2>/dev/null; then
    .venv/bin/edgekit devices install android &
    android=$!
else
    echo "no C++ compiler: bundles for nnapi and xnnpack are not verified; apt-get install g++, or .venv/bin/pip install ziglang"
fi
if command -v qemu-aarch64-static >/dev/null 2>&1 && command -v mmdebstrap >/dev/null 2>&1; then
    .venv/bin/edgekit devices install arm64 || status=$?
fi
if [ -n "$android" ]; then wait "$android" || status=$?; fi
exit "$status"
