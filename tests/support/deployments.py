"""Configurations of small deployments, and the commands of one as real processes."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from api.config.tree import load
from api.deploy.deployment import Deployment, address_of, resolve
from tests.support.limits import NEVER_S
from tests.support.repository import ROOT

EPLB = Path(sys.executable).with_name("eplb")
TOY_ENGINE = Path(__file__).parent / "models" / "toy_engine.py"

SMALL = {
    "model.layers": 2,
    "model.experts": 8,
    "model.top_k": 2,
    "model.hidden": 16,
    "model.intermediate": 8,
    "model.precision": "float32",
    "topology.ranks_per_node": 2,
    "topology.device": "cpu",
    "http.port": 0,
}


def deployment_in(
    folder: Path,
    environ: Mapping[str, str] | None = None,
    lookup: Callable[[str], str] = address_of,
    **changes: Any,
) -> Deployment:
    """Resolve a small deployment whose state lies in a folder; changes are named section__name."""
    named = SMALL | {"deployment.state_dir": folder / "state"}
    named |= {name.replace("__", "."): value for name, value in changes.items()}
    settings = load({}, config=None, environ={}, named=named)
    return resolve(settings, environ or {}, lookup=lookup)


def free_ports(number: int, host: str = "127.0.0.1") -> list[int]:
    """Ports that nothing listens on, from below those that connections are given."""
    found = list[int]()
    for port in random.SystemRandom().sample(range(10_000, 32_000), 1_000):
        if len(found) == number:
            break
        with suppress(OSError), socket.create_server((host, port)):
            found.append(port)
    assert len(found) == number, "a host with so few free ports can test nothing"
    return found


def clean_environ(**more: str) -> dict[str, str]:
    """The environment without settings of whoever runs the tests; programs of this one first."""
    kept = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(("EPLB_", "MASTER_")) and name not in ("RANK", "WORLD_SIZE")
    }
    return kept | {"PATH": f"{EPLB.parent}:{kept['PATH']}"} | more


class CommandProcess:
    """One command in a session of its own, and the lines that it prints."""

    def __init__(self, words: list[str], folder: Path, environ: Mapping[str, str]) -> None:
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._has_ended = False
        self.process = subprocess.Popen(
            words,
            cwd=folder,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None, "it was asked for"
        with self.process.stdout as printed:
            for line in printed:
                with self._changed:
                    self.lines.append(line.rstrip("\n"))
                    self._changed.notify_all()
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def wait_for(self, words: str, times: int = 1) -> str:
        """Wait for a line with these words; returns it, the last of so many."""

        def found() -> list[str]:
            return [line for line in self.lines if words in line]

        with self._changed:
            self._changed.wait_for(lambda: len(found()) >= times or self._has_ended)
            assert len(found()) >= times, f"no line {words!r} in:\n" + "\n".join(self.lines)
            return found()[times - 1]

    def ends(self, with_signal: int | None = None) -> int:
        """Wait for its end; returns the exit status."""
        if with_signal is not None:
            self.process.send_signal(with_signal)
        status = self.process.wait()
        self._reader.join()
        return status

    def kill(self) -> None:
        """End it with all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


# Of the engine at TOY_ENGINE, and of the checkpoint that tests write.
TOY_MODEL = """layers = 2
experts = 8
top_k = 2
hidden = 16
intermediate = 8
precision = "float32"
"""
# No deadline of the product fires because the machine is busy.
CONFIG = """
[deployment]
name = "{name}"
[model]
checkpoint = "{weights}"
{toy_model}
[topology]
ranks_per_node = 2
device = "cpu"
[network]
rendezvous_port = {port}
join_deadline_s = {deadline_s}
fill_deadline_s = 3600
[agent]
vote_deadline_s = 3600
plan_deadline_s = 3600
[supervision]
hung_after_s = 3600
start_deadline_s = 3600
[http]
port = 0
[planner]
pay_back_s = 1e9
[controller]
stage = "all"
lease_ttl_s = 3600
migration_deadline_s = 3600
"""


class OneHost:
    """A deployment of two ranks on this host, in a folder of its own."""

    def __init__(
        self, stack: ExitStack, folder: Path, weights: Path, deadline_s: float = NEVER_S
    ) -> None:
        self._stack, self.folder = stack, folder
        self.name, (self.port,) = f"west-{os.getpid()}-{folder.name}", free_ports(1)
        given = {"name": self.name, "weights": weights, "deadline_s": deadline_s}
        (folder / "eplb.toml").write_text(
            CONFIG.format(port=self.port, toy_model=TOY_MODEL, **given)
        )
        shutil.copy(TOY_ENGINE, folder / "engine.py")
        self.environ = clean_environ(EPLB_CONFIG="eplb.toml", PYTHONPATH=str(ROOT))

    def start(self, *words: str, **environ: str) -> CommandProcess:
        process = CommandProcess(list(words), self.folder, self.environ | environ)
        self._stack.callback(process.kill)
        return process

    def says(self, *words: str) -> str:
        """Run a command to its end; returns what it printed."""
        process = self.start(*words)
        process.ends()
        return "\n".join(process.lines)

    def start_cache(self) -> CommandProcess:
        cache = self.start("eplb", "host-cache")
        cache.wait_for("ready: 16 records")
        return cache
