"""Ranks as processes of this host, for GPU tests and benchmarks: start, collect, never hang.

Serving engines start their own processes; this is for programs that need a few ranks for a minute.
"""

from __future__ import annotations

import faulthandler
import os
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from eplb.errors import RankError
from runtime.group import Rendezvous, gloo_listeners_closed, reach
from tests.support.limits import NEVER_S

RankMain = Callable[..., Any]  # (rank, num_ranks, *args) -> result


def launch(main: RankMain, num_ranks: int, *args: Any, deadline_s: float) -> list[Any]:
    """Run ``main(rank, num_ranks, *args)`` in that many processes, with a GPU each if there are.

    A default process group is joined before ``main`` runs: gloo for CPU tensors, NCCL for GPU ones.

    Args:
        main: an importable function; arguments and results must be picklable.
        num_ranks: processes.
        args: more arguments, the same for every rank.
        deadline_s: for all of it.

    Returns:
        The results, by rank.

    Raises:
        RankError: a rank failed, was killed, or was late; the message has its words.
    """
    context = multiprocessing.get_context("spawn")
    rendezvous = Rendezvous()
    pipes, processes = [], []
    for rank in range(num_ranks):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_run,
            args=(rank, num_ranks, rendezvous.handle, deadline_s, theirs, main, args),
            daemon=True,
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return _collect(pipes, processes, deadline_s)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(pipes: list[Connection], processes: list[Any], deadline_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        missing = [rank for rank in range(len(pipes)) if rank not in results]
        ready = wait([pipes[rank] for rank in missing], deadline_s)
        if not ready:
            raise RankError(f"ranks {missing} gave no result within {deadline_s:.0f} s")
        for pipe in ready:
            rank = next(number for number, known in enumerate(pipes) if known is pipe)
            try:
                is_good, result = pipes[rank].recv()
            except EOFError as exc:
                processes[rank].join(NEVER_S)
                status = processes[rank].exitcode
                raise RankError(f"rank {rank} ended with status {status}") from exc
            if not is_good:
                raise RankError(f"rank {rank} failed:\n{result}")
            results[rank] = result
    return [results[rank] for rank in range(len(pipes))]


def _run(
    rank: int,
    num_ranks: int,
    rendezvous: str,
    deadline_s: float,
    pipe: Connection,
    main: RankMain,
    args: tuple[Any, ...],
) -> None:
    # A rank that hangs prints its stack before it is killed.
    faulthandler.dump_traceback_later(0.8 * deadline_s)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // (2 * num_ranks)))
    try:
        has_gpus = torch.cuda.device_count() >= num_ranks
        if has_gpus:
            torch.cuda.set_device(rank)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        with nullcontext() if has_gpus else gloo_listeners_closed():
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if has_gpus else "gloo",
                store=reach(rendezvous, deadline_s),
                rank=rank,
                world_size=num_ranks,
                timeout=timedelta(seconds=deadline_s),
                device_id=torch.device("cuda", rank) if has_gpus else None,
            )
        pipe.send((True, main(rank, num_ranks, *args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()
        # Library threads and half-closed communicators must not keep a finished rank alive.
        os._exit(0)
