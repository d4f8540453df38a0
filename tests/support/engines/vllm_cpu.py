"""vLLM's balancer on a CPU, with gloo between ranks: what vLLM takes from an accelerator.

Events, streams, pinned memory and the groups of its parallel state are replaced. All of the
balancer is vLLM's own: state, worker, moves, commits. In processes that serve nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from rebalance.engines.vllm.layers import model_of as model_of


class HostEvent:
    """In place of an event of a device."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.at = 0.0

    def record(self, stream: object = None) -> None:
        """Note the time."""
        self.at = time.monotonic()

    def wait(self, stream: object = None) -> None:
        """Nothing: the host did what was ordered."""

    def synchronize(self) -> None:
        """Nothing, for the same reason."""

    def elapsed_time(self, other: HostEvent) -> float:
        """Milliseconds to another event."""
        return (other.at - self.at) * 1e3


class Stream:
    """In place of a stream of a device."""

    def synchronize(self) -> None:
        """Nothing: the host did what was ordered."""


@contextlib.contextmanager
def no_stream(stream: object) -> Iterator[None]:
    """In place of the context of a stream."""
    yield


def coordinator(rank: int, num_ranks: int) -> Any:
    """What the balancer uses of vLLM's ``GroupCoordinator``; collective."""
    ranks = list(range(num_ranks))
    cpu, device = dist.new_group(ranks), dist.new_group(ranks)
    return SimpleNamespace(
        ranks=ranks, rank_in_group=rank, world_size=num_ranks, cpu_group=cpu, device_group=device,
        device_communicator=None,
    )  # fmt: skip


def install(group: Any, balancing: Any) -> None:
    """Replace what needs an accelerator, in this process.

    Args:
        group: coordinator of the expert-parallel group.
        balancing: that of the ranks that balance.
    """
    from vllm.distributed.eplb import (
        async_worker,
        eplb_communicator,
        eplb_state,
        eplb_utils,
        rebalance_execute,
    )

    torch.Event = HostEvent  # type: ignore[misc, assignment]
    torch.accelerator.current_stream = lambda *device: Stream()  # type: ignore[assignment]
    for module in (async_worker, eplb_communicator, rebalance_execute, eplb_utils):
        module.device_stream = no_stream
    for module in (eplb_state, async_worker):
        module.get_eplb_group = lambda: balancing
    eplb_state.get_ep_group = lambda: group
    eplb_state.get_node_count = lambda: 1
    eplb_state.PIN_MEMORY = eplb_communicator.PIN_MEMORY = False
    eplb_communicator.is_local_first_rank = lambda: False


def configuration(runner: str) -> Any:
    """What the balancer and the plug-in use of vLLM's ``ModelConfig``."""
    return SimpleNamespace(model="contract", runner_type=runner, compute_hash=lambda: runner)


def state_of(*, interval: int = 1, is_async: bool = False) -> Any:
    """A state of vLLM's balancer without models.

    Args:
        interval: steps from one rebalance to the next.
        is_async: whether vLLM moves experts in its own thread.
    """
    from vllm.distributed.eplb.eplb_state import EplbState

    settings = SimpleNamespace(
        window_size=interval, step_interval=interval, use_async=is_async, policy="default",
        communicator="torch_gloo", log_balancedness_interval=1, migration_batching_enabled=False,
    )  # fmt: skip
    parallel = SimpleNamespace(
        eplb_config=settings, enable_elastic_ep=False, num_ubatches=0, data_parallel_size=1
    )
    return EplbState(parallel, torch.device("cpu"))
