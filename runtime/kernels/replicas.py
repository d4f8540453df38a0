"""Which replica each token goes to: one kernel from expert ids to slots, padding dropped.

Draws are those of ``runtime/draws.py``, bit for bit.

Shapes:  E experts, Rmax most replicas of an expert, T tokens, K top-k.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.draws import EXPERT_KEY, PLACE_KEY, SEED_KEY
from runtime.kernels.launch import expect, kernel

# Small, because 4,096 tokens x top-8 are few for 132 multiprocessors, and their latency is all.
PAIRS_PER_PROGRAM = 128


def choose_replicas(
    slots: torch.Tensor,
    cumulative: torch.Tensor,
    experts: torch.Tensor,
    seed: torch.Tensor,
    out: torch.Tensor,
    strays: torch.Tensor,
) -> None:
    """Write the slot of every (token, k) into ``out``.

    Args:
        slots: [E, Rmax] int32 slots of each expert, padded.
        cumulative: [E, Rmax] int32 shares up to and with each replica, 65536 standing for 1.0;
            65536 from the last replica on, so that no draw falls past it.
        experts: [T, K] int64 expert ids; negative for padding.
        seed: [1] int64 on the device, so that a replayed graph reads the step's own.
        out: [T, K] int64; -1 for padding, and for ids that are no expert's.
        strays: [1] int32, to which the number of ids from E on is added: an error at the call would
            stop the stream.
    """
    expect("slots", slots, torch.int32, (None, None))
    expect("cumulative", cumulative, torch.int32, slots.shape)
    expect("experts", experts, torch.int64, (None, None))
    expect("seed", seed, torch.int64, (1,))
    expect("out", out, torch.int64, experts.shape)
    expect("strays", strays, torch.int32, (1,))
    num_pairs = experts.numel()
    if num_pairs == 0:
        return
    max_replicas = slots.shape[1]
    _choose[(triton.cdiv(num_pairs, PAIRS_PER_PROGRAM),)](
        slots,
        cumulative,
        experts,
        seed,
        out,
        strays,
        num_pairs,
        len(slots),
        REPLICAS=max_replicas,
        REPLICAS_PADDED=triton.next_power_of_2(max_replicas),
        PAIRS=PAIRS_PER_PROGRAM,
        PLACE=PLACE_KEY,
        SEED=SEED_KEY,
        EXPERT=EXPERT_KEY,
    )


@kernel("seed", "strays", "num_pairs", "num_experts")
def _choose(
    slots: tl.tensor,
    cumulative: tl.tensor,
    experts: tl.tensor,
    seed: tl.tensor,
    out: tl.tensor,
    strays: tl.tensor,
    num_pairs: tl.tensor,
    num_experts: tl.tensor,
    REPLICAS: tl.constexpr,
    REPLICAS_PADDED: tl.constexpr,
    PAIRS: tl.constexpr,
    PLACE: tl.constexpr,
    SEED: tl.constexpr,
    EXPERT: tl.constexpr,
) -> None:
    place = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    is_pair = place < num_pairs
    expert = tl.load(experts + place, mask=is_pair, other=-1)
    salt = tl.load(seed)
    low, high = salt.to(tl.uint32), (salt >> 32).to(tl.uint32)
    second_key = _mix(high ^ _mix(low ^ SEED))
    mixed = _mix(place.to(tl.uint32) ^ _mix(low ^ PLACE))
    mixed = _mix((mixed + second_key) ^ (expert.to(tl.uint32) * EXPERT))
    draw = (mixed >> 16).to(tl.int32)

    is_stray = expert >= num_experts
    num_strays = tl.sum(is_stray.to(tl.int32), axis=0)
    if num_strays > 0:
        tl.atomic_add(strays, num_strays)
    is_expert = (expert >= 0) & (expert < num_experts)
    used = tl.where(is_expert, expert, 0)  # others read the entries of expert 0 and ignore them
    entry = tl.arange(0, REPLICAS_PADDED)
    up_to = tl.load(
        cumulative + used[:, None] * REPLICAS + entry[None, :],
        mask=(entry < REPLICAS)[None, :],
        other=65536,
    )
    replica = tl.sum((up_to <= draw[:, None]).to(tl.int32), axis=1)
    slot = tl.load(slots + used * REPLICAS + replica)
    tl.store(out + place, tl.where(is_expert, slot.to(tl.int64), -1), mask=is_pair)


@kernel()
def _mix(word: tl.tensor) -> tl.tensor:
    word = (word ^ (word >> 16)) * 0x7FEB352D
    word = (word ^ (word >> 15)) * 0x846CA68B
    return word ^ (word >> 16)
