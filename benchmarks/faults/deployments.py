"""Deployments that faults are injected into, as real processes: on one host, and on two.

    one     eplb serve, eplb host-cache, eplb launch (all ranks), a checker; SQLite

    10.0.0.1   redis-server, eplb serve, eplb host-cache, eplb launch (ranks 0, 1), a checker
    10.0.0.2                             eplb host-cache, eplb launch (ranks 2, 3), a checker

Two hosts are network namespaces with a cable between them, each with a state folder that is a small
file system of its own. There a process that ends is started again after RESTART_S, as by a unit of
``Restart=on-failure``, ``RestartSec=20``, ``RestartPreventExitStatus=2``: status 2 is a refusal,
and waits for a human. Weights, configuration and engine file are those of ``eplb demo``.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event
from types import MappingProxyType
from typing import Any

import httpx

from api.config.tree import load
from api.demo.checking import CheckedStep, checks_in
from api.demo.options import DEFAULTS, Options
from api.demo.setup import Prepared, prepare
from api.demo.state_dir import StateDir
from api.monitor.verdict import LEAST_FREE_BYTES
from api.processes.commands import end_with_parent, own_command
from benchmarks.faults.clock.sitecustomize import FILE_VARIABLE
from benchmarks.faults.paced_engine import TOKENS_VARIABLE, tokens_of
from tests.support.deployments import clean_environ, free_ports
from tests.support.redis_servers import RedisProcess
from tests.support.repository import ROOT
from tests.support.sessions import processes_of
from tests.support.two_hosts import ADDRESSES, INTERFACES, TwoHosts

RESTART_S = 20.0  # longer than a host cache may be silent
REFUSED = 2
STATE_BYTES = 2 * LEAST_FREE_BYTES  # size of a host's file system for state
END_S = 20.0
STEADY_S, START_S, GRACE_S, POLL_S = 5.0, 120.0, 2.0, 0.1
HOSTS, RANKS = range(2), range(4)
ANY_ADDRESS = {"bind": "0.0.0.0", "protected-mode": "no"}  # of a host in a namespace of its own
SETTINGS: dict[str, Any] = {
    "topology.nodes": 2,
    "topology.ranks_per_node": 2,
    "topology.hosts": list(ADDRESSES),
    "model.layers": 3,
    "model.experts": 16,
    "model.top_k": 2,
    "model.hidden": 32,
    "model.intermediate": 32,
    "telemetry.window_steps": 16,
    "planner.pay_back_s": 1e9,  # a plan at every opportunity
    "supervision.restart_after_death": 1_000_000,
    "supervision.process_restarts": 1_000_000,
}


@dataclass
class Process:
    """One command of the deployment, over its restarts."""

    name: str
    words: list[str]
    environ: dict[str, str]
    output: Path
    process: subprocess.Popen[bytes] | None = None
    restart_at: float | None = None  # when the service manager restarts it
    ends: list[str] = field(default_factory=list)  # how it ended, each time

    @property
    def is_up(self) -> bool:
        """Whether it runs."""
        return self.process is not None and self.process.poll() is None

    @property
    def has_refused(self) -> bool:
        """Whether it ended and the service manager does not start it again."""
        return self.process is None and self.restart_at is None

    def start(self) -> None:
        """Start it."""
        with self.output.open("ab") as printed:
            self.process = subprocess.Popen(
                self.words,
                cwd=self.output.parent,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(end_with_parent, os.getpid()),
            )
        self.restart_at = None

    def last_words(self) -> str:
        """The end of what it printed."""
        lines = self.output.read_text(errors="replace").splitlines()
        return lines[-1][-300:] if lines else "nothing"

    def look(self, now: float) -> None:
        """Note its end, and start it again when that is due."""
        if self.process is not None and (status := self.process.poll()) is not None:
            self.process = None
            self.ends.append(f"status {status}: {self.last_words()}")
            self.restart_at = None if status in (0, REFUSED) else now + RESTART_S
        if self.restart_at is not None and now >= self.restart_at:
            self.start()

    def kill(self) -> None:
        """End it and all that it started."""
        if self.process is not None:
            for pid in processes_of(self.process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait(END_S)
            self.process = None


class Hosts:
    """The two hosts: networks, state folders, and what every deployment on them is given.

    Args:
        stack: undoes everything.
        folder: for all files.

    Raises:
        OSError: this process may not make namespaces or mount file systems.
    """

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self.folder, self.spaces = folder, stack.enter_context(TwoHosts())
        self.spaces.enter(0)
        self.state_dirs = [folder / f"state-{host}" for host in HOSTS]
        for path in self.state_dirs:
            path.mkdir()
            options = f"size={STATE_BYTES},mode=700"
            subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(path)], check=True)
            stack.callback(subprocess.run, ["umount", "-l", str(path)], check=True)
        self.tokens, self.clocks = folder / "tokens", [folder / f"clock-{host}" for host in HOSTS]
        os.environ["EPLB_SECRET"] = secrets.token_hex(16)

    def on(self, host: int, words: list[str]) -> list[str]:
        """The words of a command on a host; this process is on the first."""
        return words if host == 0 else self.spaces.on(host, words)

    def run(self, host: int, *words: str) -> None:
        """Run a command on a host to its end."""
        subprocess.run(self.on(host, list(words)), check=True)


def prepared_in(
    folder: Path, named: Mapping[str, Any], seed: int, check_every: int, dispatcher: str = "auto"
) -> Prepared:
    """Write weights, configuration and the engine's file into a folder."""
    own = {"deployment.name": f"faults-{os.getpid()}", "deployment.state_dir": folder}
    settings = load({}, config=None, environ={}, named=own | dict(named), defaults=DEFAULTS)
    options = Options(
        tokens_per_rank=64,
        text=[ROOT / "LICENSE", ROOT / "README.md"],
        seed=seed,
        check_every=check_every,
        dispatcher=dispatcher,
    )
    state = StateDir(folder)
    try:
        return prepare(options, settings, state)
    finally:
        state.close()


class FaultyDeployment:
    """What both deployments have.

    Args:
        prepared: its files.
        tokens: folder in which ranks write down their steps.
        num_ranks: of its topology.
    """

    def __init__(self, prepared: Prepared, tokens: Path, num_ranks: int) -> None:
        self.prepared, self.deployment = prepared, prepared.deployment
        self.token_folder, self.num_ranks = tokens, num_ranks
        self.processes: dict[str, Process] = {}
        self.checks = list[CheckedStep]()
        self._checks_read = 0

    def start(self, stack: ExitStack, commands: Iterable[Process]) -> None:
        """Start all commands, which end with the stack."""
        self.processes = {one.name: one for one in commands}
        for one in self.processes.values():
            one.start()
            stack.callback(one.kill)

    def pids(self, title: str | None = None) -> list[int]:
        """Processes with a title: ``rank 1``, ``controller``; None: all."""
        lives = [one.process.pid for one in self.processes.values() if one.process is not None]
        found = (item for life in lives for item in processes_of(life).items())
        return [pid for pid, its_title in found if title in (None, its_title)]

    def tokens(self) -> list[float]:
        """Monotonic times of all steps so far."""
        return tokens_of(self.token_folder)

    def stepping(self, within_s: float) -> set[int]:
        """The ranks that have stepped within so long."""
        limit, found = time.monotonic() - within_s, set[int]()
        for path in self.token_folder.glob("rank-*"):
            end = path.read_bytes()[-8:]
            if len(end) == 8 and struct.unpack("d", end)[0] > limit:
                found.add(int(path.name.removeprefix("rank-")))
        return found

    def read_checks(self) -> None:
        """Read the results of the checkers."""
        found, self._checks_read = checks_in(self.prepared.engine.checks.results, self._checks_read)
        self.checks += found

    def num_wrong(self) -> int:
        """Checked steps whose outputs were not the reference's."""
        precision = self.prepared.engine.checks.precision
        return sum(not one.is_right(precision) for one in self.checks)


class OneHost(FaultyDeployment):
    """A deployment on this host.

    Args:
        stack: ends it.
        folder: for its files; emptied.
        num_ranks: that it starts with.
        slots: of a rank.
        seed: of weights and requests.
        device: cpu or cuda.
        given: further settings.
    """

    def __init__(
        self,
        stack: ExitStack,
        folder: Path,
        num_ranks: int,
        slots: int,
        seed: int,
        device: str,
        given: Mapping[str, Any],
    ) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        (tokens := folder / "tokens").mkdir(parents=True)
        (port,), is_cpu = free_ports(1), device == "cpu"
        named = {
            "topology.nodes": 1,
            "topology.ranks_per_node": num_ranks,
            "topology.slots_per_rank": slots,
            "topology.device": device,
            "model.layers": 3,
            "model.experts": 2 * num_ranks,
            "model.top_k": 2,
            "model.precision": "float32" if is_cpu else "bfloat16",
            "model.hidden": 32 if is_cpu else 1024,
            "model.intermediate": 32 if is_cpu else 512,
            "telemetry.window_steps": 16,
            "http.port": port,
            "supervision.process_restarts": 1_000_000,
            **given,
        }
        dispatcher = "auto" if is_cpu else "all_to_all"
        prepared = prepared_in(folder / "state", named, seed, 1, dispatcher)
        super().__init__(prepared, tokens, num_ranks)
        engine = str(prepared.engine_path)
        paced = ("--module", "benchmarks.faults.paced_engine", "--", engine)
        commands = {
            "serve": own_command("serve"),
            "cache": own_command("host-cache", "--host", "0"),
            "checker": [sys.executable, "-P", "-m", "api.demo.checking", engine],
            "launch": own_command("launch", "--host", "0", *paced),
        }
        more = {"PYTHONPATH": str(ROOT), TOKENS_VARIABLE: str(tokens)}
        environ = clean_environ(**dict(prepared.environ) | more)
        made = [Process(n, words, environ, folder / f"{n}.txt") for n, words in commands.items()]
        self.start(stack, made)

    def living(self) -> dict[int, int]:
        """The processes of ranks, by rank."""
        launcher = self.processes["launch"].process
        titles = processes_of(launcher.pid) if launcher is not None else {}
        ranks = {int(title[5:]): pid for pid, title in titles.items() if title[:5] == "rank "}
        return {rank: ranks[rank] for rank in sorted(ranks)}


class TwoHostDeployment(FaultyDeployment):
    """One life of the deployment, with an empty store at its start.

    Args:
        stack: ends it.
        hosts: on which it runs.
        seed: of weights and requests.
        given: settings in place of SETTINGS.
        store_address: of Redis: another one than the first host's may move to the second host.
    """

    def __init__(
        self,
        stack: ExitStack,
        hosts: Hosts,
        seed: int,
        given: Mapping[str, Any] = MappingProxyType({}),
        store_address: str = ADDRESSES[0],
    ) -> None:
        self.hosts, self.notes = hosts, list[str]()
        for path in hosts.state_dirs:
            for old in path.iterdir():
                shutil.rmtree(old) if old.is_dir() else old.unlink()
        for path in (logs := hosts.folder / "logs", hosts.tokens):
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()
        for path in hosts.clocks:
            path.write_bytes(struct.pack("d", 0.0))
        self.redis = RedisProcess(hosts.folder / "redis", ANY_ADDRESS)
        stack.callback(self.redis.kill)
        self.store = f"redis://{store_address}:{self.redis.port}"
        named = SETTINGS | {"deployment.store": self.store, **given}
        prepared = prepared_in(hosts.folder / "demo", named, seed, check_every=2)
        super().__init__(prepared, hosts.tokens, 2 * int(named["topology.ranks_per_node"]))
        self.start(stack, self._processes(logs))
        http, token = self.deployment.settings.http, self.deployment.secret.http_token
        self.token, self.target = token or "", f"127.0.0.1:{http.port}"
        self.client = httpx.Client(
            base_url=f"http://{self.target}",
            headers={"authorization": f"Bearer {token}"},
            timeout=2.0,
            trust_env=False,
        )
        stack.callback(self.client.close)

    def _processes(self, logs: Path) -> list[Process]:
        def made(name: str, host: int, *words: str, **environ: str) -> Process:
            own = dict(self.prepared.environ) | {
                "EPLB_DEPLOYMENT__STATE_DIR": str(self.hosts.state_dirs[host]),
                "GLOO_SOCKET_IFNAME": INTERFACES[host],
                "PYTHONPATH": str(ROOT),
            }
            on_host = self.hosts.on(host, list(words))
            return Process(name, on_host, clean_environ(**own | environ), logs / name)

        engine = str(self.prepared.engine_path)
        found = [made("serve", 0, *own_command("serve"))]
        for host in HOSTS:
            of_host = ("--host", str(host))
            checking = [sys.executable, "-P", "-m", "api.demo.checking", engine]
            found.append(made(f"cache-{host}", host, *own_command("host-cache", *of_host)))
            found.append(made(f"checker-{host}", host, *checking))
            ranks = ("--module", "benchmarks.faults.paced_engine", "--", engine)
            given = {
                TOKENS_VARIABLE: str(self.hosts.tokens),
                FILE_VARIABLE: str(self.hosts.clocks[host]),
                "PYTHONPATH": f"{ROOT / 'benchmarks/faults/clock'}:{ROOT}",
            }
            words = own_command("launch", *of_host, *ranks)
            found.append(made(f"launch-{host}", host, *words, **given))
        return found

    # -- what is there

    def look(self) -> None:
        """The service manager's turn."""
        now = time.monotonic()
        for one in self.processes.values():
            one.look(now)

    def ranks_serve(self, within_s: float) -> bool:
        """Whether each rank has stepped within so long."""
        return len(self.stepping(within_s)) == self.num_ranks

    def until_steady(self) -> None:
        """Be the service manager until all ranks have stepped for a while."""
        deadline = since = time.monotonic()
        deadline += START_S
        while time.monotonic() - since < STEADY_S:
            self.look()
            if not self.ranks_serve(GRACE_S):
                since = time.monotonic()
            if time.monotonic() >= deadline:
                raise TimeoutError(f"not all ranks stepped for {STEADY_S} s within {START_S} s")
            Event().wait(POLL_S)

    def get(self, path: str, **parameters: Any) -> httpx.Response:
        """Ask the service."""
        answer = self.client.get(path, params=parameters)
        answer.raise_for_status()
        return answer

    def order(self, what: str) -> None:
        """Order a ``pause`` or a ``resume`` as an operator would; a refusal is noted."""
        try:
            answer = self.client.post(f"/api/v1/{what}", json={"reason": "a trial under faults"})
        except httpx.HTTPError as exc:
            self.notes.append(f"{what} is not answered: {type(exc).__name__}")
            return
        if not answer.is_success:
            title = answer.json().get("title")
            self.notes.append(f"{what} is refused: {answer.status_code} {title}")

    # -- what faults change

    def set_clock(self, host: int, ahead_s: float) -> None:
        """Set the clock of a host's ranks."""
        with self.hosts.clocks[host].open(
            "r+b", buffering=0
        ) as file:  # in place: it is read always
            file.write(struct.pack("d", ahead_s))

    def fill_disks(self) -> Callable[[], None]:
        """Fill the file systems of both state folders; returns what frees them."""
        filled = [path / "fills-the-disk" for path in self.hosts.state_dirs]
        for path in filled:
            with path.open("wb", buffering=0) as file, suppress(OSError):
                while file.write(bytes(65_536)):
                    pass

        def mend() -> None:
            for path in filled:
                path.unlink()

        return mend
