"""GPU memory that every rank of a node can read from every other, without the owner's help.

``torch.distributed._symmetric_memory`` maps each rank's arena into all the others; a copy out of a
peer's mapping runs on the copy engine, so pulling an expert takes no multiprocessor from serving.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from eplb.errors import ConfigError
from runtime.group import first_refusal


class SymmetricArena:
    """One rank's part of a symmetric allocation; every rank's part has the same size.

    Never freed while serving: freeing one synchronises the device.

    Raises:
        ConfigError: the GPUs cannot map each other's memory, or a peer reads wrong bytes; on every
            rank if on one.
    """

    def __init__(self, num_bytes: int, group: dist.ProcessGroup, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self._rank, self._size, self._group = group.rank(), group.size(), group
        wrong = ""
        try:
            self.bytes: torch.Tensor = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
            self._mapping: Any = symmetric.rendezvous(self.bytes, group)
        except RuntimeError as exc:
            wrong = f"the GPUs cannot map each other's memory, expected all of a node to: {exc}"
        # All ranks receive a refusal: otherwise they would wait for that rank in the next
        # collective.
        self._refuse_if_any(wrong)
        self._refuse_if_any(self._self_test())

    @property
    def handle(self) -> str:
        """No path: peers read through ``peer``."""
        return ""

    def peer(self, rank: int) -> torch.Tensor:
        """The arena of another rank, as bytes of this process."""
        size = tuple(self.bytes.shape)
        mapped: torch.Tensor = self._mapping.get_buffer(rank, size, torch.uint8)
        return mapped

    def _refuse_if_any(self, mine: str) -> None:
        wrong = first_refusal(mine, self._group)
        if wrong:
            raise ConfigError(wrong)

    def _self_test(self) -> str:
        """Read a mark from every peer: a mapping that exists may still be wrong."""
        mark, wrong = self.bytes[:8].view(torch.int64), ""
        mark.fill_(0x5EED + self._rank)
        torch.cuda.synchronize()
        dist.barrier(self._group)
        for rank in range(self._size):
            found = int(self.peer(rank)[:8].view(torch.int64).item())
            if found != 0x5EED + rank:
                wrong = f"reads {found:#x} from rank {rank}, expected {0x5EED + rank:#x}"
        dist.barrier(self._group)
        self.bytes[:8].zero_()
        return wrong
