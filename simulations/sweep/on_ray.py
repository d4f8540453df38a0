"""Runs tasks on a Ray cluster: the one that RAY_ADDRESS names or that runs here, else this host."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence

from eplb.errors import ConfigError
from eplb.extras import needed_for
from simulations.sweep.grid import Task
from simulations.sweep.results import Row
from simulations.sweep.run import TRIES, Failure, Work


def run_on_ray(work: Work, tasks: Sequence[Task]) -> Iterator[Row | Failure]:
    """Run work on every task, one core each; outcomes come in the order in which tasks end.

    Raises:
        ConfigError: Ray is not installed, or its cluster cannot be reached.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # else Ray reports to its makers
    with needed_for("--executor ray"):
        import ray
        from ray.exceptions import RayError, RayTaskError
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
    except (ConnectionError, RuntimeError, ValueError) as exc:
        raise ConfigError(f"the Ray cluster cannot be used: {exc}") from exc
    try:
        shared = ray.put(work)  # recorded windows travel to each host once
        call = ray.remote(num_cpus=1, max_retries=TRIES - 1)(_apply)
        running = {call.remote(shared, task): task for task in tasks}
        while running:
            # Work has its own deadline, and Ray notices the death of its worker.
            (done,), _ = ray.wait(list(running), num_returns=1)
            task = running.pop(done)
            try:
                yield ray.get(done)
            except RayTaskError as exc:
                yield Failure(task, f"{type(exc.cause).__name__}: {exc.cause}")
            except RayError as exc:
                yield Failure(task, f"its worker died {TRIES} times: {type(exc).__name__}")
    finally:
        ray.shutdown()


def _apply(work: Work, task: Task) -> Row:
    return work(task)
