#!/bin/sh
# Runs what depends on ONNX Runtime's version against each: tools/try_versions.sh [VERSION...], else all tested ones.
#
# Each gets a folder of wheels of its own in build/versions, before the virtual environment's in the path. The tests are
# those of the rooms that ask ONNX Runtime, without what needs an emulator; then the demo's four bundles, and QNN's
# placement against its prediction. TESTS and SEEDS choose others.
set -eu
cd "$(dirname "$0")/.."
tests=${TESTS:-tests/test_doors.py tests/model tests/prepare tests/check tests/convert tests/quantize tests/verify tests/bench tests/profile tests/tune}
python=$PWD/.venv/bin/python
[ $# -gt 0 ] || set -- $($python -c 'from edgekit._ort import TESTED_VERSIONS; print(*TESTED_VERSIONS)')
failed=
for version in "$@"; do
    wheels=$PWD/build/versions/$version
    test -d "$wheels/onnxruntime" || $python -m pip install --quiet --no-deps --target "$wheels" "onnxruntime==$version"
    export PYTHONPATH="$wheels" PYTHONDONTWRITEBYTECODE=1
    echo "ONNX Runtime $($python -c 'import onnxruntime; print(onnxruntime.__version__)')"
    # shellcheck disable=SC2086 # several paths
    $python -m pytest -n auto --dist worksteal -q -p no:cacheprovider -m 'not slow and not faults' \
        $(for path in $tests; do test ! -e "$path" || echo "$path"; done) || failed="$failed $version:tests"
    rm -rf "$wheels/demo"
    $python -m edgekit demo --quiet --out "$wheels/demo" || failed="$failed $version:demo"
    (cd tools && $python placement_agreement.py --target qnn --source generated --seeds 0 "${SEEDS:-25}" --work "$wheels/placement") ||
        failed="$failed $version:placement"
done
test -z "$failed" || { echo "failed:$failed" >&2; exit 1; }
