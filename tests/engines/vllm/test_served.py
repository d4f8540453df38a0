"""vLLM serves on a CPU while the plug-in changes its maps: the answers stay the same.

The engine is vLLM's CPU build with the Python files of the release that the plug-in is for, in an
environment of its own (``make test-engines-served``). What the CPU build lacks for EPLB is lent by
``tests/support/engines/served_on_cpu.py``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 800.0
CONFIG = """
[deployment]
name = "served"
store = "sqlite:{folder}/store.db"
[engine]
max_moved = 1.0
[planner]
pay_back_s = 1e9
target_imbalance = 1.0
"""
PLUGIN = "[vllm.general_plugins]\nserved_on_cpu = tests.support.engines.served_on_cpu:register\n"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None
        or importlib.util.find_spec("vllm._C_AVX2") is None,
        reason="run `make test-engines-served`: it has vLLM's CPU build in .venv-served",
    ),
]


def serve(folder: Path, way: str) -> dict[str, Any]:
    """Serve in processes of their own; what they printed."""
    plugin = folder / "lent/served_on_cpu-0.dist-info"
    plugin.mkdir(parents=True)
    (plugin / "entry_points.txt").write_text(PLUGIN)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: served-on-cpu\nVersion: 0\n")
    (folder / "eplb.toml").write_text(CONFIG.format(folder=folder))
    variables = {
        "PYTHONPATH": f"{ROOT}:{plugin.parent}:{os.environ.get('PYTHONPATH', '')}",
        "EPLB_CONFIG": str(folder / "eplb.toml"),
        "EPLB_SERVED_ON_CPU": "1",
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    with (folder / "log").open("wb") as log:
        subprocess.run(
            [sys.executable, "-m", "tests.support.engines.served_on_cpu", str(folder), way],
            env={**os.environ, **variables},
            stdout=log,
            stderr=log,
            timeout=DEADLINE_S,
            check=False,
        )
    path = folder / "served.json"
    assert path.exists(), (folder / "log").read_text()[-4000:]
    result: dict[str, Any] = json.loads(path.read_text())
    return result


@pytest.mark.parametrize("way", ["sync", "async"])
def test_answers_are_those_of_the_start_while_maps_change(tmp_path: Path, way: str) -> None:
    result = serve(tmp_path, way)

    assert result["maps"] >= 4
    assert result["equal"] == result["answers"]
    assert result["broken_equal"] < result["broken_answers"] / 2, "a transfer that moves nothing"
