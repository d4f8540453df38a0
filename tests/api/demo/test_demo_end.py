"""How a demo ends: interrupted early, its terminal closed, its store lost, a rank dead, killed."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.redis_servers import RedisProcess

EPLB = Path(sys.executable).with_name("eplb")

StartDemo = Callable[..., Any]


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary files of all processes that a test starts.

    Its path is short: processes have sockets in it, whose paths are limited to 107 bytes.
    """
    with tempfile.TemporaryDirectory(prefix="eplb-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


@pytest.mark.parametrize("library", ["libpython", "_multiarray_umath", "libtorch_cpu"])
@pytest.mark.slow
def test_interrupt_during_the_imports_ends_in_one_line(
    temporary: Path, tmp_path: Path, library: str
) -> None:
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
    assert list(temporary.glob("pymp-*")) == []


@pytest.mark.system
def test_demo_with_a_temporary_folder_too_long_for_sockets_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 80)
    folder.mkdir()
    command = [EPLB, "demo", "--port", "0", "--state-dir", str(tmp_path / "state")]

    ended = subprocess.run(
        command,
        env=os.environ | {"TMPDIR": str(folder)},
        capture_output=True,
        text=True,
    )

    assert ended.returncode == 2
    assert ended.stderr.startswith("eplb: TMPDIR")
    assert str(folder) in ended.stderr
    assert "at most 75 characters" in ended.stderr


@pytest.mark.slow
def test_demo_whose_terminal_closes_writes_its_summary(
    temporary: Path, tmp_path: Path, start_demo: StartDemo
) -> None:
    demo = start_demo(tmp_path, "--serve")
    demo.wait_for_line("window=1")

    os.killpg(demo.process.pid, signal.SIGHUP)  # as the kernel does, to all of the session

    assert demo.ends() == 0, demo.output_text()
    assert demo.errors == ""
    assert demo.summary()["missing"] == []
    assert list(temporary.glob("pymp-*")) == []


@pytest.mark.slow
def test_demo_ended_by_a_rank_exit_writes_a_partial_summary(
    tmp_path: Path, start_demo: StartDemo
) -> None:
    demo = start_demo(tmp_path, "--serve", restart_after_death=0)
    demo.wait_for_line("window=1")

    demo.kill("rank 1")

    assert demo.ends() == 2, demo.output_text()
    summary = demo.summary()
    assert "rank 1 was killed by SIGKILL" in summary["missing"][0]
    assert summary["imbalance_series"]
    assert summary["samples_lost"] is None


@pytest.mark.slow
def test_demo_that_is_killed_leaves_no_temporary_folder(
    temporary: Path, tmp_path: Path, start_demo: StartDemo
) -> None:
    demo = start_demo(tmp_path, "--serve")
    demo.wait_for_line("window=1")
    assert list(temporary.glob("pymp-*"))

    demo.process.kill()
    demo.process.wait()
    demo.leaves_nothing()

    assert list(temporary.glob("pymp-*")) == []


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
