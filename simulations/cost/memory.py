"""Memory of a rank: what redundant slots take from the KV cache.

A slot takes one expert of every MoE layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from eplb.core.model import ModelShape
from eplb.errors import ConfigError
from simulations.cost.hardware import Hardware


@dataclass(frozen=True)
class MemoryModel:
    """What a rank holds beside routed experts.

    Raises:
        ConfigError: a part that is none, or bytes below 0.
    """

    hardware: Hardware
    model: ModelShape
    usable: float = 0.9  # part of the memory that weights and KV cache may fill
    dense_bytes: float = 0.0  # attention, shared experts, embeddings, buffers, on each rank
    kv_token_bytes: float = 70_272.0  # of one token, all layers: DeepSeek-V3's latent cache in BF16

    def __post_init__(self) -> None:
        if not 0 < self.usable <= 1:
            raise ConfigError(f"usable is {self.usable}, expected above 0 and at most 1")
        if not (self.dense_bytes >= 0 and self.kv_token_bytes > 0):
            raise ConfigError(
                f"dense_bytes is {self.dense_bytes} and kv_token_bytes {self.kv_token_bytes}, "
                "expected 0 or more, and above 0"
            )

    def expert_bytes(self, slots_per_rank: float) -> float:
        """Weights of a rank's slots."""
        return slots_per_rank * self.model.num_layers * self.model.expert_bytes

    def kv_bytes(self, slots_per_rank: float) -> float:
        """What is left for the KV cache; 0 or less: the weights do not fit."""
        whole = self.hardware.memory_bytes * self.usable
        return whole - self.dense_bytes - self.expert_bytes(slots_per_rank)

    def sequences(self, slots_per_rank: float, context: int) -> int:
        """How many sequences of ``context`` tokens a rank can hold."""
        left = self.kv_bytes(slots_per_rank)
        return max(0, int(left / (self.kv_token_bytes * context)))
