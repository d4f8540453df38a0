"""The parts of the demo's model that depend on the device: dispatch, experts, launch.

Memory and transport are the builder's (``rebalance.build.experts``); everything else about a rank
is the same on a CPU and on a GPU.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from api.demo.workers.plan import WorkerPlan
from api.processes.devices import check_gpus
from runtime.checkpoints.own_model import Weights
from runtime.counters import SlotCounter
from runtime.dispatch.all_to_all import AllToAllDispatcher, Dispatcher
from runtime.experts import ExpertBank
from runtime.model.compute import Experts, LoopExperts
from runtime.model.moe import Forward, MoEStack


class Model(Protocol):
    """A model that runs one forward pass."""

    def forward(
        self, token_ids: torch.Tensor, *, salt: int, forced: torch.Tensor | None = None
    ) -> Forward:
        """Run token ids [B, N]."""


class Device(Protocol):
    """The device of a rank."""

    device: torch.device

    def dispatcher(self, group: dist.ProcessGroup, counter: SlotCounter) -> tuple[Dispatcher, str]:
        """Choose a dispatcher, and return the reason."""

    def experts(self, bank: ExpertBank) -> Experts:
        """Make the experts' computation."""

    def model(self, stack: MoEStack, dispatcher: Dispatcher) -> Model:
        """Make the model that the serving loop calls."""


class CpuDevice:
    """A CPU process with one compute thread and shared memory."""

    device = torch.device("cpu")

    def __init__(self, plan: WorkerPlan, rank: int) -> None:
        torch.set_num_threads(1)
        self._plan, self._rank = plan, rank

    def dispatcher(self, group: dist.ProcessGroup, counter: SlotCounter) -> tuple[Dispatcher, str]:
        """All-to-all over gloo: there is no other on a CPU."""
        made = AllToAllDispatcher(self._plan.topology, group, self._rank, counter)
        return made, "all_to_all over gloo, the one for CPUs"

    def experts(self, bank: ExpertBank) -> Experts:
        """One slot after the other."""
        return LoopExperts(bank)

    def model(self, stack: MoEStack, dispatcher: Dispatcher) -> Model:
        """The stack itself."""
        return stack


class GpuDevice:
    """One GPU of a node whose GPUs can read each other's memory."""

    def __init__(self, plan: WorkerPlan, rank: int) -> None:
        check_gpus(plan.topology.num_ranks)
        self.device = torch.device("cuda", rank)
        torch.cuda.set_device(self.device)
        self._plan, self._rank = plan, rank

    def dispatcher(self, group: dist.ProcessGroup, counter: SlotCounter) -> tuple[Dispatcher, str]:
        """Choose the first that passes the self-test: DeepEP decode, DeepEP prefill, all-to-all."""
        from runtime.dispatch.table import Trial, choose_dispatcher

        plan = self._plan
        trial = Trial(
            plan.topology,
            plan.model.hidden,
            plan.model.top_k,
            plan.tokens_per_rank,
            self.device,
            torch.bfloat16,
        )
        return choose_dispatcher(
            plan.dispatcher, trial, counter, group, max_tokens=plan.tokens_per_rank
        )

    def experts(self, bank: ExpertBank) -> Experts:
        """All slots in one grouped GEMM."""
        from runtime.model.compute import GroupedExperts

        plan = self._plan
        pairs = plan.tokens_per_rank * plan.topology.num_ranks * plan.model.top_k
        return GroupedExperts(bank, usual_rows=2 * pairs // plan.topology.num_slots)

    def model(self, stack: MoEStack, dispatcher: Dispatcher) -> Model:
        """The stack as a CUDA graph where the dispatcher's shapes are fixed, else as it is."""
        from runtime.dispatch.deepep import DeepEPLowLatency
        from runtime.model.graphs import CapturedStack

        plan = self._plan
        if not isinstance(dispatcher, DeepEPLowLatency) or plan.trace is not None:
            return stack
        return CapturedStack(
            stack,
            shape=plan.batch_shape,
            num_layers=plan.model.num_layers,
            device=self.device,
        )


def device_of(plan: WorkerPlan, rank: int) -> Device:
    """Make the device that the plan names."""
    return GpuDevice(plan, rank) if plan.device == "cuda" else CpuDevice(plan, rank)


def to_device(weights: Weights, device: torch.device) -> dict[str, torch.Tensor]:
    """Copy dense weights to where they are used."""
    return {name: tensor.to(device) for name, tensor in weights.items()}
