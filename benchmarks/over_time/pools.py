"""Processes of a benchmark that has a limit of time."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor


def kill(pool: ProcessPoolExecutor) -> None:
    """End the processes of a pool at once."""
    pool.shutdown(wait=False, cancel_futures=True)
    for process in multiprocessing.active_children():
        process.kill()
