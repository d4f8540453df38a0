"""The deployment page, as printed: two hosts with Redis, four ranks, the commands, the outputs."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from deployments import CommandProcess, clean_environ
from documents import Block, blocks, files_of
from repository import ROOT
from two_hosts import ADDRESSES, TwoHosts, folders

from telemetry.stores.redis.connection.local_server import find_redis_server

PAGE = "docs/deployment.md"
BLOCKS = list(blocks(PAGE))
MOST_ENGINE_LINES = 100


def output_after(command: str) -> list[str]:
    """The lines that the page prints after a command."""
    at = next(n for n, block in enumerate(BLOCKS) if command in block.code.splitlines())
    after: Block = BLOCKS[at + 1]
    assert after.language == "output", f"no output after {command}"
    return after.code.splitlines()


def is_as_printed(found: str, printed: str) -> bool:
    return re.fullmatch(re.escape(printed).replace(r"\.\.\.", ".*"), found) is not None


def wait_for_printed(process: CommandProcess, printed: list[str]) -> None:
    for line in printed:
        process.wait_for(line.partition("...")[0])
    found = [one for one in process.lines if one.startswith(("eplb ", "engine:"))]
    for line in printed:
        assert any(is_as_printed(one, line) for one in found), f"{line!r} is not in {found}"


class Hosts:
    """The two hosts of the page, each with a folder that has its files."""

    def __init__(self, stack: ExitStack, root: Path) -> None:
        self._stack, self.folders = stack, folders(root)
        try:
            self._spaces = stack.enter_context(TwoHosts())
        except OSError as exc:
            pytest.skip(str(exc))
        self._environ = clean_environ(EPLB_CONFIG="eplb.toml", PYTHONPATH=str(ROOT))

    def start(self, host: int, *words: str) -> CommandProcess:
        entered = self._spaces.on(host, list(words))
        process = CommandProcess(entered, self.folders[host], self._environ)
        self._stack.callback(process.kill)
        return process

    def run(self, host: int, *words: str) -> tuple[int, list[str]]:
        process = self.start(host, *words)
        return process.ends(), process.lines

    def prepare(self) -> None:
        for name, code in files_of(PAGE).items():
            (self.folders[0] / name).write_text(code)
        first = next(block for block in BLOCKS if "> secret" in block.code)
        for script in (first.code, f"{sys.executable} weights.py"):
            status, lines = self.run(0, "bash", "-euc", script)
            assert status == 0, lines
        shutil.copytree(self.folders[0], self.folders[1], dirs_exist_ok=True)

    def start_redis(self) -> None:
        words = [str(find_redis_server()), "--bind", ADDRESSES[0], "--port", "6379", "--save", ""]
        redis = self.start(0, *words, "--protected-mode", "no")
        redis.wait_for("Ready to accept connections")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with ExitStack() as stack:
        made = Hosts(stack, tmp_path)
        made.prepare()
        made.start_redis()
        yield made


def test_engine_of_the_page_is_short() -> None:
    assert len(files_of(PAGE)["engine.py"].splitlines()) <= MOST_ENGINE_LINES


@pytest.mark.slow  # half a minute of two hosts
@pytest.mark.timeout(400)
def test_page_runs_as_printed_on_two_hosts(hosts: Hosts) -> None:
    status, lines = hosts.run(0, "eplb", "check")
    assert status == 0, lines
    printed = output_after("eplb check")
    assert len(lines) == len(printed), lines
    assert all(is_as_printed(*pair) for pair in zip(lines, printed, strict=True)), lines
    status, lines = hosts.run(1, "eplb", "check")
    assert status == 0, lines

    serve = hosts.start(0, "eplb", "serve")
    wait_for_printed(serve, output_after("eplb serve"))
    caches = [hosts.start(host, "eplb", "host-cache") for host in range(2)]
    for cache in caches:
        cache.wait_for("ready: 32 records")
    launch = ["eplb", "launch", "--", sys.executable, "engine.py"]
    first, second = (hosts.start(host, *launch) for host in range(2))
    wait_for_printed(first, output_after("eplb launch -- python engine.py"))

    status, lines = hosts.run(1, "eplb", "status")
    printed = output_after("eplb status")
    assert status == 0, lines
    assert all(is_as_printed(*pair) for pair in zip(lines, printed, strict=True)), lines
    curl = next(block.code for block in BLOCKS if block.code.startswith("curl "))
    status, lines = hosts.run(0, "bash", "-euc", curl)
    assert (status, '"decision"' in lines[0]) == (0, True), lines
    status, lines = hosts.run(1, "curl", "-s", f"http://{ADDRESSES[0]}:8765/api/v1/plan")
    assert '"status":401' in lines[0]
    reach = f"exec 3<>/dev/tcp/{ADDRESSES[0]}/29400"  # ranks have met: no stranger comes in
    assert hosts.run(1, "timeout", "2", "bash", "-c", reach)[0] == 124
    assert_no_secret_is_shown(hosts, [serve, *caches, first, second])

    assert second.ends(signal.SIGTERM) == 0, second.lines
    assert first.ends() == 0, first.lines
    printed_by_ranks = "".join(first.lines + second.lines)  # two may share a line
    ended = re.findall(r"rank (\d) ended, (\d+) of (\d+) wrong", printed_by_ranks)
    assert sorted(rank for rank, *_ in ended) == ["0", "1", "2", "3"]
    assert all(wrong == "0" and int(checked) > 0 for _, wrong, checked in ended), ended
    for process in (serve, *caches):
        assert process.ends(signal.SIGTERM) == 0, process.lines


def ranks_of(launch: CommandProcess) -> list[int]:
    """Process ids of the ranks that a launcher has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (path / "cmdline").read_bytes().split(b"\0")
            if os.getsid(int(path.name)) == launch.process.pid and words[1:2] == [b"engine.py"]:
                found.append(int(path.name))
    return found


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_ranks_of_both_hosts_serve_again_after_one_was_killed(hosts: Hosts) -> None:
    caches = [hosts.start(host, "eplb", "host-cache") for host in range(2)]
    for cache in caches:
        cache.wait_for("ready: 32 records")
    launch = ["eplb", "launch", "--", sys.executable, "engine.py"]
    first, second = (hosts.start(host, *launch) for host in range(2))
    first.wait_for("engine: generation 0 serves")

    os.kill(ranks_of(second)[0], signal.SIGKILL)
    for process in (first, second):
        process.wait_for("; starting the ranks of this host again")
    first.wait_for("engine: generation 0 serves", times=2)

    assert first.ends(signal.SIGTERM) == 0, first.lines
    assert second.ends() == 0, second.lines
    printed = "".join(first.lines + second.lines)
    assert len(re.findall(r"rank \d ended, 0 of \d+ wrong", printed)) == 4


def assert_no_secret_is_shown(hosts: Hosts, processes: list[CommandProcess]) -> None:
    secret = (hosts.folders[0] / "secret").read_text().strip()
    shown = subprocess.run(
        ["ps", "axeww"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    printed = "\n".join(line for process in processes for line in process.lines)

    assert "engine.py" in shown
    assert secret not in shown + printed
