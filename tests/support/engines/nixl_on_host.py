"""vLLM's NIXL communicator on a CPU: NIXL's own library reads the experts from host memory.

Only the kind of memory is another one than on a GPU, and vLLM's check that there is a GPU. Agents,
descriptors, reads and the barrier behind them are vLLM's and NIXL's own.
"""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

# vLLM prefers NIXL wherever a package ``nixl`` can be found; this one has the library alone.
IS_THERE = find_spec("nixl_cu13") is not None


def install() -> None:
    """Have vLLM in this process make the communicator ``nixl`` for tensors on the host."""
    import nixl_cu13
    import vllm.distributed.nixl_utils as nixl_utils
    from vllm.distributed.eplb import eplb_communicator, eplb_state

    nixl_utils.NixlWrapper = nixl_cu13.nixl_agent
    nixl_utils.nixl_agent_config = nixl_cu13.nixl_agent_config
    eplb_communicator.get_pp_group = lambda: SimpleNamespace(world_size=1)
    own = eplb_communicator.create_eplb_communicator

    def create(
        group_coordinator: Any, backend: str, expert_weights: Any, expert_buffer: Any
    ) -> Any:
        if backend != "nixl":
            return own(group_coordinator, backend, expert_weights, expert_buffer)
        made = eplb_communicator.NixlEplbCommunicator(
            group_coordinator.cpu_group, expert_weights, expert_buffer
        )
        made._nixl_memory_type = "DRAM"
        return made

    eplb_state.create_eplb_communicator = create


def read_nothing() -> None:
    """From now on this rank reads no expert of another one."""
    from vllm.distributed.eplb import eplb_communicator

    eplb_communicator.NixlEplbCommunicator.add_recv = lambda *given, **named: None


def damage_each_fifth() -> None:
    """From now on every fifth expert that this rank reads has a wrong byte."""
    from vllm.distributed.eplb import eplb_communicator

    kind = eplb_communicator.NixlEplbCommunicator
    add_recv, execute, read, damaged = kind.add_recv, kind.execute, [], []

    def note(self: Any, tensors: Any, src_rank: int, expert_id: int) -> None:
        read.append(expert_id)
        if len(read) % 5 == 0:
            damaged.append(tensors[0])
        add_recv(self, tensors, src_rank, expert_id)

    def damage(self: Any) -> None:
        execute(self)
        while damaged:
            damaged.pop().view(-1)[0] += 1

    kind.add_recv, kind.execute = note, damage
