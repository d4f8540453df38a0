"""The pieces of a rank that depend on where it runs: memory, dispatch, experts, transport, launch.

Everything else about a rank (the agent, the store, the loop) is the same on a CPU and on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.distributed as dist

from api.demo.workers.plan import WorkerPlan
from eplb.errors import ConfigError
from rebalance.stage.settings import StageSettings
from rebalance.transport.choice import KnownRecords, choose_transport
from rebalance.transport.interface import WeightTransport
from rebalance.transport.processes import Peers, RankMemory, SharedPeers
from runtime.checkpoint import Weights
from runtime.counters import SlotCounter
from runtime.dispatch.all_to_all import AllToAllDispatcher, Dispatcher
from runtime.experts import Arena, ExpertBank, PlainArena, bank_bytes
from runtime.model.compute import Experts, LoopExperts
from runtime.model.moe import Forward, MoEStack


class Model(Protocol):
    """What the serving loop calls once a step."""

    def forward(
        self, token_ids: torch.Tensor, *, salt: int, forced: torch.Tensor | None = None
    ) -> Forward:
        """Run token ids [B, N]."""


class Device(Protocol):
    """Where a rank runs."""

    backend: str  # of torch.distributed
    device: torch.device
    stage: StageSettings  # how much staging may take here

    def bank(self, group: dist.ProcessGroup) -> ExpertBank:
        """Reserve the memory of live slots and staging."""

    def dispatcher(self, group: dist.ProcessGroup, counter: SlotCounter) -> tuple[Dispatcher, str]:
        """Pick a dispatcher, and say why."""

    def experts(self, bank: ExpertBank) -> Experts:
        """Make what computes."""

    def transport(
        self,
        memory: RankMemory,
        handles: Mapping[int, str],
        known: KnownRecords,
        group: dist.ProcessGroup,
    ) -> tuple[WeightTransport, str]:
        """Pick what brings weights, and say why."""

    def model(self, stack: MoEStack, dispatcher: Dispatcher) -> Model:
        """Make what the loop calls."""


class CpuDevice:
    """A process with one thread of arithmetic and shared memory."""

    backend = "gloo"
    device = torch.device("cpu")
    stage = StageSettings()

    def __init__(self, plan: WorkerPlan, rank: int) -> None:
        torch.set_num_threads(1)
        self._plan, self._rank = plan, rank

    def bank(self, group: dist.ProcessGroup) -> ExpertBank:
        """Reserve memory that peers on the host can read."""
        plan = self._plan
        num_slots = int(plan.topology.slots_of_rank[self._rank])
        return ExpertBank(
            plan.schema, plan.model.num_layers, num_slots, num_staging=plan.staging_experts
        )

    def dispatcher(self, group: dist.ProcessGroup, counter: SlotCounter) -> tuple[Dispatcher, str]:
        """All-to-all over gloo: there is no other on a CPU."""
        made = AllToAllDispatcher(self._plan.topology, group, self._rank, counter)
        return made, "all_to_all over gloo, the one for CPUs"

    def experts(self, bank: ExpertBank) -> Experts:
        """One slot after the other."""
        return LoopExperts(bank)

    def transport(
        self,
        memory: RankMemory,
        handles: Mapping[int, str],
        known: KnownRecords,
        group: dist.ProcessGroup,
    ) -> tuple[WeightTransport, str]:
        """Peers' shared memory and the host cache, or the host cache alone."""

        def attach() -> Peers:
            return SharedPeers(memory.rank, known.topology, memory.bank, handles)

        return choose_transport(memory, attach, known, group)

    def model(self, stack: MoEStack, dispatcher: Dispatcher) -> Model:
        """The stack itself."""
        return stack


class GpuDevice:
    """One GPU of a node whose GPUs can read each other's memory."""

    backend = "cpu:gloo,cuda:nccl"
    stage = StageSettings.while_serving()

    def __init__(self, plan: WorkerPlan, rank: int) -> None:
        found = torch.cuda.device_count()
        if found < plan.topology.num_ranks:
            raise ConfigError(
                f"found {found} GPUs for {plan.topology.num_ranks} ranks, expected one for each"
            )
        self.device = torch.device("cuda", rank)
        torch.cuda.set_device(self.device)
        self._plan, self._rank = plan, rank
        self._arena: Arena | None = None
        self._unmapped = ""  # why the GPUs cannot read each other

    def bank(self, group: dist.ProcessGroup) -> ExpertBank:
        """Reserve GPU memory that every rank of the node maps, or, where none can, its own alone.

        What cannot be mapped is refused on every rank alike: ``transport`` then takes all weights
        through the host, and says so.
        """
        # Imported here and below: none of it is needed, or there, on a CPU.
        from runtime.memory.symmetric import SymmetricArena

        plan = self._plan
        slots = plan.topology.slots_of_rank
        shape = (plan.schema, plan.model.num_layers)
        num_bytes = bank_bytes(*shape, int(slots.max()), plan.staging_experts)
        try:
            self._arena = SymmetricArena(num_bytes, group, self.device)
        except ConfigError as exc:
            self._unmapped = str(exc)
            self._arena = PlainArena(num_bytes, self.device)
        return ExpertBank(
            *shape,
            int(slots[self._rank]),
            num_staging=plan.staging_experts,
            arena=self._arena,
        )

    def dispatcher(self, group: dist.ProcessGroup, counter: SlotCounter) -> tuple[Dispatcher, str]:
        """Pick the first that proves right here: DeepEP for decode, for prefill, all-to-all."""
        from runtime.dispatch.selftest import Trial, choose_dispatcher

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

    def transport(
        self,
        memory: RankMemory,
        handles: Mapping[int, str],
        known: KnownRecords,
        group: dist.ProcessGroup,
    ) -> tuple[WeightTransport, str]:
        """Peers' GPU memory by copy engine and the host cache by DMA, or the host cache alone."""
        return choose_transport(memory, lambda: self._peers(memory, known), known, group)

    def _peers(self, memory: RankMemory, known: KnownRecords) -> Peers:
        from rebalance.transport.gpus import SymmetricPeers
        from runtime.memory.symmetric import SymmetricArena

        if not isinstance(self._arena, SymmetricArena):
            raise ConfigError(self._unmapped)
        return SymmetricPeers(memory.rank, known.topology, memory.bank, self._arena)

    def model(self, stack: MoEStack, dispatcher: Dispatcher) -> Model:
        """The stack as a CUDA graph where the dispatcher's shapes are fixed, else as it is."""
        from runtime.dispatch.deepep import DeepEPLowLatency
        from runtime.model.graphs import CapturedStack

        plan = self._plan
        if not isinstance(dispatcher, DeepEPLowLatency) or plan.trace is not None:
            return stack
        return CapturedStack(
            stack,
            dispatcher,
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
