"""Kernels of just-in-time replicas agree with numpy where triton can be had."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

INTERPRETED = Path(__file__).with_name("interpreted_pulls.py")


@pytest.mark.system
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_pull_kernels_agree_with_the_decision_and_the_redirect() -> None:
    # In a process of its own: triton decides at import whether its interpreter runs the kernels.
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(INTERPRETED)],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=INTERPRETED.parents[2],
        capture_output=True,
        text=True,
    )

    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
