#!/bin/sh
# Writes tools/lock/*.txt: every package that edgekit installs, pinned and hashed, for Python 3.11 and later.
set -eu
cd "$(dirname "$0")/.."
compile() { uv pip compile pyproject.toml --universal --generate-hashes --no-annotate --custom-compile-command "make lock" --quiet "$@"; }
compile --python-version 3.11 --extra qnn --extra nnapi --group build --output-file tools/lock/demo.txt
compile --python-version 3.11 --group build --group docs --output-file tools/lock/docs.txt
compile --python-version 3.11 --extra qnn --extra nnapi --extra sign --extra metrics --extra sweep --extra webgpu --group build --group dev --output-file tools/lock/dev.txt
compile --python-version 3.11 --extra qnn --extra nnapi --extra sign --extra metrics --extra sweep --extra webgpu --group build --group dev --group train --output-file tools/lock/train.txt
# What only the long tests need: zig, the site and notebooks would be half of all files that are unpacked.
compile --python-version 3.11 --extra android --group build --group long --constraints tools/lock/dev.txt --constraints tools/lock/docs.txt --output-file tools/lock/long.txt
compile --python-version 3.11 --extra openvino --output-file tools/lock/openvino.txt
uv pip compile --group pyproject.toml:install --constraints tools/lock/dev.txt --universal --python-version 3.11 --generate-hashes --no-annotate --custom-compile-command "make lock" --quiet --output-file tools/lock/install.txt
uv pip compile --group pyproject.toml:corpus --python-version 3.11 --python-platform linux --generate-hashes --no-annotate --custom-compile-command "make lock" --quiet --output-file tools/lock/corpus.txt
