"""From the kill of a rank to the verdict of the service, against a live cluster of two ranks.

    python -m benchmarks.operating.death

``eplb demo`` serves in a process of its own; one rank gets SIGKILL, and the state is asked for ten
times a second until the deployment serves again.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

EPLB = Path(sys.executable).with_name("eplb")
WORDS = "demo --ranks 2 --nodes 1 --layers 2 --experts 8 --top-k 2 --serve --seconds 5 --port 0"
DEADLINE_S = 420.0
LOOK_S = 0.1


def main() -> None:
    """Print each verdict with its time after the kill."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "output"
        command = [str(EPLB), *WORDS.split(), "--view", "plain", "--state-dir", f"{folder}/state"]
        with log.open("w") as output:
            demo = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        try:
            found = _until(lambda: re.search(r"http://[0-9.:]+", log.read_text()), "the address")
            _until(lambda: _state(found[0])["verdict"] == "serving", "the deployment to serve")
            _until(lambda: _state(found[0])["step"] > 100, "100 steps")
            watch(found[0], _rank_of(demo.pid))
        finally:
            demo.send_signal(signal.SIGINT)
            demo.wait(DEADLINE_S)


def watch(url: str, rank: int) -> None:
    """Kill a rank, and print the verdicts that follow until one is ``serving`` again."""
    begun, latest, was_stopped = time.monotonic(), "", False
    os.kill(rank, signal.SIGKILL)
    while time.monotonic() - begun < DEADLINE_S:
        state = _state(url)
        if state["verdict"] != latest:
            latest = state["verdict"]
            print(f"{time.monotonic() - begun:.2f} s: {latest}: {state['reason']}", flush=True)
        was_stopped = was_stopped or latest == "stopped"
        if was_stopped and latest == "serving":
            return
        time.sleep(LOOK_S)
    raise SystemExit(f"the deployment was not serving {DEADLINE_S:g} s after the kill")


def _state(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/api/v1/state", timeout=30.0) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def _until(ask: Callable[[], Any], what: str) -> Any:
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        if found := ask():
            return found
        time.sleep(LOOK_S)
    raise SystemExit(f"waited {DEADLINE_S:g} s for {what}")


def _rank_of(demo: int) -> int:
    """A rank among the processes of a demo's session, by the name of its thread."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(folder.name)) != demo:
                continue
            if any(one.read_text() == "rank 0\n" for one in folder.glob("task/*/comm")):
                return int(folder.name)
        except OSError:
            continue  # it has ended meanwhile
    raise SystemExit("no process of the demo is rank 0")


if __name__ == "__main__":
    main()
