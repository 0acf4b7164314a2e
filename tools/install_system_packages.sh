#!/bin/sh
# Installs the Debian packages that the tests use, where this user may; each test that lacks one says so otherwise.
set -eu
packages="qemu-user-static mmdebstrap adb openssh-client openssh-server g++-aarch64-linux-gnu chromium chromium-driver cmake ninja-build clang openjdk-17-jdk-headless maven"
command -v apt-get >/dev/null 2>&1 || { echo "no apt-get here: tests that lack a program are skipped by name"; exit 0; }
missing=""
for package in $packages; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing="$missing $package"
done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" -ne 0 ]; then
    echo "not root: tests that lack one of these are skipped by name; to run them: sudo apt-get install$missing"
    exit 0
fi
apt-get update -qq
# shellcheck disable=SC2086
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
