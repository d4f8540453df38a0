"""Simulations over HTTP: one ``eplb simulate`` at a time, in a process of its own.

A simulation takes processor time and memory that the service must not share with its answers, so
it runs as the command does, at a lower priority, with limits of time. Answers are kept in this
process: the latest ``KEPT``, none after a restart.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from api.http.problems import ProblemType, Refused
from api.http.requests import WHOLE, Body
from api.http.schemas import Answer
from eplb.core.model import PRESETS as MODELS
from eplb.errors import EplbError
from eplb.policies.table import POLICIES
from simulations.cost.hardware import HARDWARE
from simulations.oracles import ORACLES
from simulations.peers.engines import ENGINES
from simulations.traffic import PRESETS as GENERATED
from telemetry.formats.own import load_of_store
from telemetry.formats.table import WriteOptions, write_load
from telemetry.formats.types import ReadOptions
from telemetry.state.store import StateStore

RECORDED = "recorded"
MOST_WINDOWS, MOST_RANKS, MOST_POLICIES, KEPT = 256, 1024, 6, 16
LIMIT_S = 600.0  # of one simulation, and of its processor time
RETRY_S = 10  # after which another one may be asked for
NICER = 10
PROGRAM = "from api.entry import main; main()"
POLICY_NAMES = sorted({"none", "in-order", *POLICIES, *ENGINES, *ORACLES})


def _one_of(*names: str | None) -> dict[str, Any]:
    return {"enum": list(names)}


PolicyName = Annotated[str, Field(max_length=100), WithJsonSchema({"enum": POLICY_NAMES})]


class SimulationRequest(Body):
    """Replay policies on windows of load; nothing moves."""

    load: str = Field(
        RECORDED,
        description="recorded: the latest windows of the deployment; else load that is generated",
        json_schema_extra=_one_of(RECORDED, *sorted(GENERATED)),
    )
    windows: Annotated[int, Field(ge=2, le=MOST_WINDOWS), *WHOLE] = 64
    policies: list[PolicyName] = Field(
        ["none", "auto"], min_length=1, max_length=MOST_POLICIES, examples=[["none", "auto"]]
    )
    ranks: Annotated[int, Field(ge=1, le=MOST_RANKS), *WHOLE] = Field(8, examples=[32])
    nodes: Annotated[int, Field(ge=1, le=MOST_RANKS), *WHOLE] = Field(
        1, description="more than ranks count as so many"
    )
    every: Annotated[int, Field(ge=1, le=MOST_WINDOWS), *WHOLE] = Field(
        4, description="windows from one plan to the next"
    )
    model: str | None = Field(
        None,
        description="gives generated load its shape, and steps and moves their times",
        json_schema_extra=_one_of(*sorted(MODELS), None),
    )
    hardware: str = Field(
        "h200", description="with a model alone", json_schema_extra=_one_of(*sorted(HARDWARE))
    )
    failures: bool = Field(False, description="what the loss of a rank, node or link would cost")
    seed: Annotated[int, Field(ge=0, le=2**32 - 1), *WHOLE] = 0


class SimulationAnswer(Answer):
    """A simulation, and its result once it is done."""

    id: int
    state: Literal["running", "done", "failed"]
    request: dict[str, Any]
    error: str = Field("", description="why it failed")
    result: dict[str, Any] | None = Field(
        None, description="the summary that `eplb simulate --json` writes"
    )


class Simulations:
    """The simulations of a deployment. Any thread may call any method.

    Args:
        store: of the deployment, for recorded load.
        at_work: held while one runs; all deployments of a service share it.
    """

    def __init__(self, store: StateStore, at_work: threading.Lock) -> None:
        self._store, self._lock, self._at_work = store, threading.Lock(), at_work
        self._kept: OrderedDict[int, SimulationAnswer] = OrderedDict()
        self._running: subprocess.Popen[str] | None = None
        self._is_stopped, self._last = False, 0

    def one(self, simulation_id: int) -> SimulationAnswer:
        """One of the latest.

        Raises:
            Refused: there is none of this number.
        """
        with self._lock:
            found = self._kept.get(simulation_id)
        if found is None:
            why = f"there is no simulation {simulation_id}; the latest {KEPT} are kept"
            raise Refused(ProblemType.NO_SUCH_SIMULATION, why)
        return found

    def begin(self, request: SimulationRequest) -> SimulationAnswer:
        """Begin a simulation.

        Raises:
            Refused: another one runs, or a name is not known.
        """
        _check_names(request)
        with self._lock:
            if self._is_stopped or not self._at_work.acquire(blocking=False):
                why = "a simulation runs, expected none: try later"
                raise Refused(ProblemType.TOO_BUSY, why, retry_after_s=RETRY_S)
            self._last += 1
            begun = SimulationAnswer(
                id=self._last,
                state="running",
                request=request.model_dump(),
                error="",
                result=None,
            )
            self._keep(begun)
        thread = threading.Thread(target=self._run, args=(begun, request), name="simulation")
        thread.daemon = True
        thread.start()
        return begun

    def open(self) -> None:
        """Let simulations begin, again after ``stop``."""
        with self._lock:
            self._is_stopped = False

    def stop(self) -> None:
        """End what runs; nothing can begin afterwards."""
        with self._lock:
            self._is_stopped = True
            if self._running is not None:
                self._running.kill()

    def _keep(self, answer: SimulationAnswer) -> None:
        self._kept[answer.id] = answer
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)

    def _run(self, begun: SimulationAnswer, request: SimulationRequest) -> None:
        changes: dict[str, Any] = {"state": "failed", "error": "it was stopped"}
        try:
            with tempfile.TemporaryDirectory(prefix="eplb-simulation-") as folder:
                changes = {"state": "done", "result": self._result(request, Path(folder))}
        except (EplbError, OSError) as exc:
            changes = {"state": "failed", "error": str(exc)}
        finally:
            with self._lock:
                self._running = None
                self._keep(begun.model_copy(update=changes))
                self._at_work.release()

    def _result(self, request: SimulationRequest, folder: Path) -> dict[str, Any]:
        """What the command wrote.

        Raises:
            EplbError: it was refused, failed, or took too long.
        """
        out = folder / "result.json"
        with self._lock:
            if self._is_stopped:
                raise EplbError("the service ends")
        trace = self._trace(request, folder)
        command = [sys.executable, "-c", PROGRAM, *_arguments(request, trace, out)]
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as process:
            _limit(process.pid)
            with self._lock:
                self._running = process
                if self._is_stopped:
                    process.kill()
            try:
                _, said = process.communicate(timeout=LIMIT_S)
            except subprocess.TimeoutExpired as exc:
                process.kill()
                raise EplbError(f"it took longer than {LIMIT_S:.0f} s") from exc
        if process.returncode or not out.is_file():
            why = said.strip()[-1000:] or f"exit status {process.returncode}"
            raise EplbError(why)
        found: dict[str, Any] = json.loads(out.read_text())
        return found

    def _trace(self, request: SimulationRequest, folder: Path) -> str:
        if request.load != RECORDED:
            return f"generated:{request.load}:windows={request.windows}"
        load = load_of_store(
            self._store,
            ReadOptions(max_windows=request.windows, deployment=self._store.deployment),
        )
        write_load(load, "eplb-trace", folder / "trace", WriteOptions())
        return str(folder / "trace")


def _arguments(request: SimulationRequest, trace: str, out: Path) -> Sequence[str]:
    """Of ``eplb``."""
    command = ["simulate", trace, "--json", str(out)]
    command += ["--policy", ",".join(dict.fromkeys(request.policies))]
    command += ["--ranks", str(request.ranks), "--nodes", str(min(request.nodes, request.ranks))]
    command += ["--every", str(request.every), "--seed", str(request.seed)]
    command += ["--failures"] if request.failures else []
    if request.model is not None:
        command += ["--model", request.model, "--hardware", request.hardware]
    return command


def _limit(pid: int) -> None:
    """So much processor time at most, also if this service is killed; and after all others."""
    try:
        resource.prlimit(pid, resource.RLIMIT_CPU, (int(LIMIT_S), int(LIMIT_S)))
        os.setpriority(os.PRIO_PROCESS, pid, NICER)
    except ProcessLookupError:
        return  # it ended at once: its exit status tells why


def _check_names(request: SimulationRequest) -> None:
    """Refuse names that the document does not list.

    Raises:
        Refused: such a name, with those that there are.
    """
    named = [
        ("load", request.load, (RECORDED, *GENERATED)),
        ("hardware", request.hardware, HARDWARE),
        *(("policy", one, POLICY_NAMES) for one in request.policies),
    ]
    if request.model is not None:
        named.append(("model", request.model, MODELS))
    for what, name, known in named:
        if name not in known:
            why = f"unknown {what} {name!r}, expected one of: {', '.join(sorted(known))}"
            raise Refused(ProblemType.INVALID_REQUEST, why)
