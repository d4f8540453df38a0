"""Processes of tests: forked functions that talk through a pipe, and ranks of a gloo group."""

from __future__ import annotations

import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rebalance.protocol.liveness import LivenessConnections
from tests.support.limits import NEVER_S

RankFunction = Callable[..., Any]


def wait_until_watched(lines: LivenessConnections) -> None:
    """Wait until this rank has heard its neighbours: a rank is watched from its first beat on."""
    beats = lines._beats
    while not beats.neighbours <= beats._heard_at.keys():
        threading.Event().wait(0.01)


class ForkedProcess:
    """A process of a test's own, which starts in milliseconds. It talks through a pipe.

    Fork while no store is open: SQLite must not be carried over.
    """

    def __init__(self, function: Callable[..., object], *args: Any) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run_forked, args=(function, theirs, *args))
        self._process.start()
        theirs.close()

    def receive(self) -> Any:
        """Wait for the next message; EOFError after the last one."""
        return self._pipe.recv()

    def remaining(self) -> list[Any]:
        """Return what it said before its end, and nobody heard yet."""
        heard = []
        while True:
            try:
                heard.append(self.receive())
            except EOFError:
                return heard

    def send(self, message: object) -> None:
        """Send it something."""
        self._pipe.send(message)

    def kill(self) -> None:
        """SIGKILL it, and wait until it is gone."""
        self._process.kill()
        self.ends()

    def ends(self) -> int | None:
        """Wait for its end and return the exit status."""
        self._process.join()
        return self._process.exitcode


def _run_forked(function: Callable[..., object], pipe: Connection, *args: Any) -> None:
    status = 1
    try:
        function(pipe, *args)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        pipe.close()
        # No exit handlers: the fixtures of the parent process are not this one's to tear down.
        os._exit(status)


def _run_rank(rank: int, size: int, port: Path, function: RankFunction, pipe: Connection) -> None:
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{port}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=NEVER_S),
        )
        pipe.send((True, function(rank)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()
        # No exit handlers: the fixtures of the parent process are not this one's to tear down.
        os._exit(0)


def run_ranks_in(folder: Path, size: int, function: RankFunction) -> list[Any]:
    """Run ``function(rank)`` in ``size`` processes that are one gloo group; return all results."""
    context = multiprocessing.get_context("fork")
    pipes: dict[Connection, int] = {}
    processes = []
    for rank in range(size):
        ours, theirs = context.Pipe(duplex=False)
        args = (rank, size, folder / "rendezvous", function, theirs)
        processes.append(context.Process(target=_run_rank, args=args))
        processes[-1].start()
        theirs.close()
        pipes[ours] = rank
    results: dict[int, Any] = {}
    try:
        while pipes:
            for pipe in wait(list(pipes)):
                rank = pipes.pop(pipe)
                try:
                    good, result = pipe.recv()
                except EOFError:
                    good, result = False, "it ended without a result"
                assert good, f"rank {rank} failed:\n{result}"
                results[rank] = result
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [results[rank] for rank in range(size)]
