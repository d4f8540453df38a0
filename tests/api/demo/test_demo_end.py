"""How a demo ends: interrupted early, its terminal closed, its store lost, a rank dead, killed."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.redis_servers import RedisProcess

EPLB = Path(sys.executable).with_name("eplb")

StartDemo = Callable[..., Any]


@pytest.mark.parametrize("library", ["libpython", "_multiarray_umath", "libtorch_cpu"])
@pytest.mark.slow
def test_interrupt_during_the_imports_ends_in_one_line(tmp_path: Path, library: str) -> None:
    command = [EPLB, "demo", "--port", "0", "--state-dir", str(tmp_path / "state")]
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        maps = Path(f"/proc/{process.pid}/maps")
        # Without a shared libpython the first moment that can be seen is that of the handler.
        mark = library if library != "libpython" else "_heapq"
        while mark not in maps.read_text():
            assert process.poll() is None, "it ended by itself"
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, errors = process.communicate()

    assert (process.returncode, errors) == (130, "eplb: interrupted\n")


@pytest.mark.slow
def test_demo_whose_terminal_closes_writes_its_summary(
    tmp_path: Path, start_demo: StartDemo
) -> None:
    demo = start_demo(tmp_path, "--serve")
    demo.wait_for_line("window=1")

    os.killpg(demo.process.pid, signal.SIGHUP)  # as the kernel does, to all of the session

    assert demo.ends() == 0, demo.output_text()
    assert demo.errors == ""
    assert demo.summary()["missing"] == []


@pytest.mark.slow
def test_demo_ended_by_a_launcher_exit_writes_a_partial_summary(
    tmp_path: Path, start_demo: StartDemo
) -> None:
    demo = start_demo(tmp_path, "--serve")
    demo.wait_for_line("window=1")

    demo.kill("launch 0", signal.SIGTERM)

    assert demo.ends() == 2, demo.output_text()
    summary = demo.summary()
    assert "the launcher of host" in summary["missing"][0]
    assert summary["imbalance_series"]
    assert summary["samples_lost"] is None


@pytest.mark.slow
def test_demo_whose_store_is_lost_at_the_end_writes_its_summary(
    tmp_path: Path, start_demo: StartDemo
) -> None:
    (tmp_path / "redis").mkdir()
    with RedisProcess(tmp_path / "redis") as server:
        demo = start_demo(tmp_path, "--serve", store=server.url)
        demo.wait_for_line("window=3")
    os.killpg(demo.process.pid, signal.SIGINT)

    assert demo.ends() != 0, demo.output_text()
    summary = demo.summary()
    assert any("number of samples" in sentence for sentence in summary["missing"])
    assert summary["imbalance_series"]
    assert (summary["samples_written"], summary["samples_lost"]) == (None, None)
