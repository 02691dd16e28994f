#!/usr/bin/env bash
# Build the wheel of a commit or tag, to the same bytes wherever it is built, and print its SHA-256.
#
# docker/wheel.sh REVISION FOLDER
#
# The bytes follow from the commit alone: its files and their modes, its time, and setuptools in the version of
# docker/hashes/build.txt. PYTHON names a Python that has it; without, an environment is made from the package index.
set -euo pipefail
if [ $# != 2 ]; then
    echo "usage: docker/wheel.sh REVISION FOLDER, found $# arguments" >&2
    exit 2
fi
root=$(cd "$(dirname "$0")/.." && pwd)
revision=$(git -C "$root" rev-parse --verify "$1^{commit}")
mkdir -p "$2"
folder=$(cd "$2" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
umask 022
git -C "$root" -c tar.umask=022 archive --prefix=source/ "$revision" | tar -x -C "$work"
wanted=$(sed -n 's/^setuptools==\([^ ]*\).*/\1/p' "$work/source/docker/hashes/build.txt")
python=${PYTHON:-}
if [ -z "$python" ]; then
    python3 -m venv "$work/environment"
    python=$work/environment/bin/python
    "$python" -m pip install --quiet --require-hashes --requirement "$work/source/docker/hashes/build.txt"
fi
found=$("$python" -c 'import setuptools; print(setuptools.__version__)')
if [ "$found" != "$wanted" ]; then
    echo "docker/wheel.sh: $python: found setuptools $found, allowed $wanted" >&2
    exit 1
fi
SOURCE_DATE_EPOCH=$(git -C "$root" log -1 --format=%ct "$revision") "$python" -m pip wheel --quiet \
    --disable-pip-version-check --no-deps --no-build-isolation --no-index --wheel-dir "$folder" "$work/source"
cd "$folder"
sha256sum perennial_fl-*.whl
