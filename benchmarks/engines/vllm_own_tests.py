"""vLLM's own tests of its balancer, without and with the plug-in loaded by vLLM's entry point.

    .venv-vllm/bin/python -m benchmarks.engines.vllm_own_tests FOLDER

FOLDER is the source distribution of the vLLM that is installed, unpacked outside this repository
(``pip download --no-deps --no-binary :all: vllm==0.33.0``). Its ``tests`` run against the installed
wheel, without their conftest, which needs more packages.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

FILES = (
    "distributed/test_eplb_algo.py",
    "distributed/test_eplb_events.py",
    "distributed/test_eplb_execute.py",
    "distributed/test_eplb_migration_scheduler.py",
    "distributed/test_eplb_utils.py",
    "distributed/test_eplb_spec_decode.py",
    "distributed/test_eplb_quant_scale_consistency.py",
    "distributed/test_eplb_fused_moe_layer.py",
    "v1/worker/test_gpu_model_runner_v2_eplb.py",
)
OUTCOMES = {"passed": "", "failed": "failure", "error": "error", "skipped": "skipped"}
TIMEOUT_S = 60  # of a test: one that waits for a GPU would never end
# Ends the process after the report: a failed test may leave a thread that waits for ever. With a
# deployment, loads the plug-in as vLLM's processes do, and proves that it is there.
HELPER = """
import os

def pytest_configure(config):
    if "EPLB_CONFIG" in os.environ:
        from vllm.plugins import load_general_plugins
        load_general_plugins()
        from vllm.distributed.eplb.policy import EPLB_POLICIES
        found = EPLB_POLICIES["default"].__name__
        assert found == "EplbPlannerPolicy", f"the policy is {found}: the plug-in is not loaded"

def pytest_unconfigure(config):
    os._exit(0)
"""


def main(source: Path) -> None:
    """Print how many tests of each file have which outcome, and each that differs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tests").symlink_to(source / "tests", target_is_directory=True)
        (folder / "own_tests_helper.py").write_text(HELPER, encoding="utf-8")
        (folder / "eplb.toml").write_text("[deployment]\nname = 'own-tests'\n", encoding="utf-8")
        plain, loaded = (outcomes(folder, is_loaded=is_loaded) for is_loaded in (False, True))
    print("| file | without: passed, failed, error, skipped | with the plug-in |\n|---|---|---|")
    for file in FILES:
        print(f"| {file} | {counted(plain, file)} | {counted(loaded, file)} |")
    for test in sorted(plain.keys() | loaded.keys()):
        if plain.get(test) != loaded.get(test):
            print(f"{test}: {plain.get(test)} without, {loaded.get(test)} with")


Tests = dict[tuple[str, str], str]  # outcome by file and name


def outcomes(folder: Path, *, is_loaded: bool) -> Tests:
    """Run each file in a process of its own."""
    environ = os.environ | {"PYTHONPATH": f"{folder}"}
    environ.pop("EPLB_CONFIG", None)
    if is_loaded:
        environ["EPLB_CONFIG"] = str(folder / "eplb.toml")
    found: Tests = {}
    for file in FILES:
        report = folder / "report.xml"
        report.unlink(missing_ok=True)
        command = [
            *(sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", str(folder)),
            *(
                "-p",
                "own_tests_helper",
                "--noconftest",
                "-p",
                "no:cacheprovider",
                "--timeout",
                str(TIMEOUT_S),
            ),
            *("-q", f"--junitxml={report}", f"tests/{file}"),
        ]
        ended = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
        if not report.is_file():
            raise SystemExit(f"no report of {' '.join(command)}:\n{ended.stdout}\n{ended.stderr}")
        for case in ElementTree.parse(report).iter("testcase"):
            tags = {child.tag for child in case}
            outcome = next((word for word, tag in OUTCOMES.items() if tag in tags), "passed")
            found[file, case.get("name", "")] = outcome
            reason = next((child.get("message", "") for child in case), "")
            print(
                f"{file} {case.get('name')}: {outcome} {reason.splitlines()[:1]}", file=sys.stderr
            )
    return found


def counted(tests: Tests, file: str) -> str:
    """Tests of a file by outcome."""
    count = Counter(outcome for (name, _), outcome in tests.items() if name == file)
    return ", ".join(str(count[outcome]) for outcome in OUTCOMES)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(str(__doc__))
    main(Path(sys.argv[1]))
