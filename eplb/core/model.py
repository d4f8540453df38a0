"""The shape of a mixture-of-experts model, as far as balancing needs it.

Shapes:  L MoE layers, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from eplb.core.arrays import UNSET, freeze, owned, unset
from eplb.errors import ConfigError

# Bytes of one weight with its scales, as checkpoints have them: FP8 with a float32 scale of 128 x
# 128, 4 bits with a scale of 128 (int4), 16 (nvfp4) or 32 (mxfp4).
PRECISIONS = {
    "bf16": 2.0,
    "fp8": 1 + 4 / 128**2,
    "fp8-tensor": 1.0,  # one scale of a matrix
    "int4": 0.5 + 2 / 128,
    "nvfp4": 0.5 + 1 / 16,
    "mxfp4": 0.5 + 1 / 32,
}


MOST_NUMBERED = 4095  # of layers, far above any published model


@dataclass(frozen=True, eq=False)
class ModelShape:
    """Layers, experts and sizes of a model.

    A shared expert is load on every rank and is never placed. ``layer_ids`` are the model's own
    layer numbers: dense layers are not listed, multi-token-prediction layers are.

    Raises:
        ConfigError: a count that no model can have.
    """

    layer_ids: tuple[int, ...]  # [L]
    num_experts: int
    top_k: int
    hidden: int
    intermediate: int  # width of one routed expert
    num_shared_experts: int = 0
    num_expert_groups: int = 1  # the model's routing groups; 1 means none
    expert_bytes: int = 0  # one routed expert as served, with its scales; 0: in BF16
    expert_cost: NDArray[np.float64] = field(default_factory=unset)  # [E] work per token, 1.0 usual
    num_matrices: int = 3  # of one routed expert: gate, up and down; 2 without a gate

    def __post_init__(self) -> None:
        if self.num_experts < 1 or not 1 <= self.top_k <= self.num_experts:
            raise ConfigError(
                f"top-{self.top_k} of {self.num_experts} experts, "
                "expected at least one expert and 1 <= top_k <= num_experts"
            )
        if not self.layer_ids or len(set(self.layer_ids)) != len(self.layer_ids):
            raise ConfigError(f"layer_ids is {self.layer_ids}, expected distinct layer numbers")
        if self.num_expert_groups < 1 or self.num_experts % self.num_expert_groups:
            raise ConfigError(
                f"{self.num_experts} experts in {self.num_expert_groups} expert groups, "
                "expected groups of equal size"
            )
        if not self.expert_bytes:
            in_bf16 = round(self.expert_weights * PRECISIONS["bf16"])
            object.__setattr__(self, "expert_bytes", in_bf16)
        cost = np.ones(self.num_experts) if self.expert_cost is UNSET else self.expert_cost
        freeze(self, expert_cost=owned(cost, np.float64))
        if self.expert_cost.shape != (self.num_experts,):
            raise ConfigError(
                f"expert_cost has shape {self.expert_cost.shape}, expected ({self.num_experts},)"
            )
        wrong = np.flatnonzero(~(np.isfinite(self.expert_cost) & (self.expert_cost >= 0)))
        if wrong.size:
            raise ConfigError(
                f"expert_cost of expert {wrong[0]} is {self.expert_cost[wrong[0]]}, "
                "expected a finite number, 0 or more"
            )

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.layer_ids)

    @property
    def expert_weights(self) -> int:
        """Number of weights of one routed expert."""
        return self.num_matrices * self.hidden * self.intermediate

    @property
    def precision(self) -> str:
        """The precision that gives one expert its bytes.

        Raises:
            ConfigError: the model has no sizes of experts, or bytes that no precision gives.
        """
        if not self.expert_weights:
            raise ConfigError("the model has no sizes of experts, expected hidden and intermediate")
        each = self.expert_bytes / self.expert_weights
        name = min(PRECISIONS, key=lambda one: abs(PRECISIONS[one] - each))
        if abs(PRECISIONS[name] / each - 1) > 0.05:
            raise ConfigError(
                f"expert_bytes is {self.expert_bytes}, {each:.3g} for each weight; expected those "
                f"of a precision: {', '.join(PRECISIONS)}"
            )
        return name

    def with_precision(self, precision: str) -> ModelShape:
        """Give the same model with experts of another precision.

        Raises:
            ConfigError: an unknown precision.
        """
        if precision not in PRECISIONS:
            raise ConfigError(
                f"unknown precision {precision!r}, expected one of: {', '.join(PRECISIONS)}"
            )
        return replace(self, expert_bytes=round(self.expert_weights * PRECISIONS[precision]))


def position_in(layer_ids: tuple[int, ...], layer_id: int) -> int:
    """Give the index of a layer's number among those of the MoE layers.

    Raises:
        ConfigError: no MoE layer has the number.
    """
    if layer_id not in layer_ids:
        raise ConfigError(f"layer {layer_id} is no MoE layer, expected one of {spans(layer_ids)}")
    return layer_ids.index(layer_id)


def spans(numbers: Sequence[int]) -> str:
    """Write ascending runs of three numbers or more as their ends: ``3..60, 62, 63``."""
    runs = list[list[int]]()
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join((", " if run[-1] - run[0] == 1 else "..").join(map(str, run)) for run in runs)


def numbers_in(text: str, where: str) -> tuple[int, ...]:
    """Read rising numbers, and runs of them by their ends: ``3-60`` or ``1,2,5-7``.

    Args:
        text: as a user gives it.
        where: what it is, for the refusal.

    Raises:
        ConfigError: anything else, or a number above MOST_NUMBERED.
    """
    numbers = list[int]()
    for piece in text.split(","):
        low, dash, high = (part.strip() for part in piece.partition("-"))
        high = high if dash else low
        if not all(end.isascii() and end.isdecimal() and len(end) < 6 for end in (low, high)):
            raise ConfigError(f"{where}: found {piece!r}, expected numbers and ranges as 0,3-60")
        run = range(int(low), int(high) + 1)
        if not run or run[-1] > MOST_NUMBERED or (numbers and run[0] <= numbers[-1]):
            raise ConfigError(f"{where}: found {piece!r}, expected rising 0..{MOST_NUMBERED}")
        numbers += run
    return tuple(numbers)


def named_ranks(ranks: Sequence[int]) -> str:
    """Ranks with their noun, in the singular or plural: ``rank 3``, ``ranks 0..2, 5``."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {spans(ranks) or 'none'}"


def slot_shortage(
    ranks: Sequence[int], num_slots: int, num_experts: int, spare_slots: int = 0
) -> str:
    """Why ranks cannot hold the experts of a layer, each in a slot at least; "": they can."""
    if num_slots >= num_experts:
        return ""
    where = named_ranks(ranks) if ranks else "no rank"
    spares = f" (without {spare_slots} of each)" if spare_slots else ""
    return (
        f"found {num_slots} slots in a layer on {where}{spares} for {num_experts} "
        "experts that must be there, expected one or more for each"
    )


def _preset(
    first: int, last: int, num_experts: int, top_k: int, hidden: int, intermediate: int
) -> ModelShape:
    layers = tuple(range(first, last + 1))
    return ModelShape(layers, num_experts, top_k, hidden, intermediate)


def _zero_computation(model: ModelShape, num_zero: int) -> ModelShape:
    """The model with its last ``num_zero`` experts as identities of no cost (LongCat-Flash)."""
    cost = np.ones(model.num_experts)
    cost[-num_zero:] = 0.0
    return replace(model, expert_cost=cost)


_V3 = replace(
    _preset(3, 60, 256, 8, 7168, 2048),
    num_shared_experts=1,
    num_expert_groups=8,
).with_precision("fp8")
_GPT_OSS = {
    layers: _preset(0, layers - 1, experts, 4, 2880, 2880).with_precision("mxfp4")
    for layers, experts in ((36, 128), (24, 32))
}

# Figures are those of each model's published config.json, the precision that of its checkpoint.
PRESETS: dict[str, ModelShape] = {
    "deepseek-v3": _V3,
    "deepseek-r1": _V3,
    "deepseek-v3.2": _V3,
    "deepseek-v2-lite": replace(_preset(1, 26, 64, 6, 2048, 1408), num_shared_experts=2),
    "kimi-k2": replace(
        _preset(1, 60, 384, 8, 7168, 2048).with_precision("fp8"), num_shared_experts=1
    ),
    "qwen3-235b": _preset(0, 93, 128, 8, 4096, 1536),
    "qwen3-30b": _preset(0, 47, 128, 8, 2048, 768),
    "qwen3-next": replace(_preset(0, 47, 512, 10, 2048, 512), num_shared_experts=1),
    "ling-1t": replace(
        _preset(4, 79, 256, 8, 8192, 2048), num_shared_experts=1, num_expert_groups=8
    ),
    "longcat-flash": _zero_computation(_preset(0, 27, 768, 12, 6144, 2048), 256),
    "step-3": replace(_preset(4, 59, 48, 3, 7168, 5120), num_shared_experts=1),
    "minimax-m2": _preset(0, 61, 256, 8, 3072, 1536).with_precision("fp8"),
    "glm-4.5": replace(_preset(3, 91, 160, 8, 5120, 1536), num_shared_experts=1),
    "gpt-oss-120b": _GPT_OSS[36],
    "gpt-oss-20b": _GPT_OSS[24],
    "mixtral-8x7b": _preset(0, 31, 8, 2, 4096, 14336),
}

# Bytes of a token in the KV cache in BF16, on a rank that holds whole sequences: layers x 576 x 2
# with latent attention, else layers x key and value heads x their size x 2. Layers whose cache does
# not grow with the context are left out: sliding windows, linear attention.
KV_TOKEN_BYTES = {
    "deepseek-v3": 61 * 576 * 2,
    "deepseek-v2-lite": 27 * 576 * 2,
    "kimi-k2": 61 * 576 * 2,
    "qwen3-235b": 94 * (4 + 4) * 128 * 2,
    "qwen3-30b": 48 * (4 + 4) * 128 * 2,
    "qwen3-next": 12 * (2 + 2) * 256 * 2,
    "ling-1t": 80 * (8 + 8) * 128 * 2,
    "longcat-flash": 56 * 576 * 2,
    "step-3": 61 * (1 + 1) * 256 * 2,
    "minimax-m2": 62 * (8 + 8) * 128 * 2,
    "glm-4.5": 92 * (8 + 8) * 128 * 2,
    "gpt-oss-120b": 18 * (8 + 8) * 64 * 2,
    "gpt-oss-20b": 12 * (8 + 8) * 64 * 2,
    "mixtral-8x7b": 32 * (8 + 8) * 128 * 2,
}


def kv_token_bytes(model: ModelShape) -> int | None:
    """KV cache of a token of the known model with these layers and experts; None: none has them."""
    sizes = (model.layer_ids, model.num_experts, model.hidden)
    for name, size in KV_TOKEN_BYTES.items():
        known = PRESETS[name]
        if sizes == (known.layer_ids, known.num_experts, known.hidden):
            return size
    return None


def preset(name: str) -> ModelShape:
    """Look a published model up by name.

    Raises:
        ConfigError: an unknown name; the message lists the known ones.
    """
    if name not in PRESETS:
        raise ConfigError(f"unknown model {name!r}, expected one of: {', '.join(sorted(PRESETS))}")
    return PRESETS[name]
