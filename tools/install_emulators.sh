#!/bin/sh
# Installs the emulators that this machine can hold; a build says which it had to skip, and how to get it.
set -eu
.venv/bin/edgekit devices install xnnpack-wasm
if command -v g++ >/dev/null 2>&1 || .venv/bin/python -c 'import ziglang' 2>/dev/null; then
    .venv/bin/edgekit devices install android
fi
if command -v qemu-aarch64-static >/dev/null 2>&1 && command -v mmdebstrap >/dev/null 2>&1; then
    .venv/bin/edgekit devices install arm64
fi
