"""One random draw for every (token, k), alike on CPU and GPU to the last bit.

A draw says which of an expert's replicas a token goes to. It depends on nothing but the token's
place, k, the expert and a seed, so a step can be repeated exactly, and ranks that must choose alike
are given one seed. The mixing is plain 32-bit arithmetic, which the kernel in
``runtime/kernels/replicas.py`` repeats.

Shapes:  E experts, Rmax most replicas of an expert, T tokens, K top-k.
"""

from __future__ import annotations

import torch

# eplb.core.placement.EMPTY. Not imported: kernels and their tests run on GPU hosts without solvers.
EMPTY = -1
DRAW_BITS = 16  # a draw is in 0..2**16 - 1, and cumulative shares are in units of 2**-16
WORD = 0xFFFFFFFF
# Keys of the seed's two halves and of the expert: odd, so that multiplying loses nothing. The
# fractions of the golden ratio, the square root of 2 and the square root of 3, in 32 bits.
PLACE_KEY = 0x9E3779B9
SEED_KEY = 0x6A09E667
EXPERT_KEY = 0xBB67AE85


def reference_draws(experts: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    """Draw for every (token, k).

    Args:
        experts: [T, K] expert ids; of a negative one (padding) the draw means nothing.
        seed: [1] int64; another one for every step, layer and rank that shall not choose alike.

    Returns:
        [T, K] int64, evenly spread over 0..65535.
    """
    place = torch.arange(experts.numel(), device=experts.device).view_as(experts)
    low, high = seed & WORD, (seed >> 32) & WORD
    # Two keys: with one, ranks whose keys lie close would draw the same row of figures, shifted.
    first_key = _mix(low ^ PLACE_KEY)
    second_key = _mix(high ^ _mix(low ^ SEED_KEY))
    mixed = _mix(place ^ first_key)
    mixed = _mix(((mixed + second_key) & WORD) ^ (experts * EXPERT_KEY & WORD))
    return mixed >> (32 - DRAW_BITS)


def choose_by_draw(
    slots: torch.Tensor, cumulative: torch.Tensor, experts: torch.Tensor, seed: torch.Tensor
) -> torch.Tensor:
    """Pick a replica for every (token, k): what the kernel does, in plain torch.

    Args:
        slots: [E, Rmax] slots of each expert, padded.
        cumulative: [E, Rmax] shares up to and with each replica, 65536 standing for 1.0; 65536 from
            the last replica on, so that no draw falls past it.
        experts: [T, K] expert ids; negative for padding.
        seed: [1] int64.

    Returns:
        [T, K] int64 slots, EMPTY for padding.
    """
    used = experts.clamp(min=0)
    draws = reference_draws(experts, seed)
    replica = (draws[:, :, None] >= cumulative[used]).sum(dim=2, keepdim=True)
    chosen = slots[used].gather(2, replica).squeeze(2).to(torch.int64)
    return chosen.masked_fill(experts < 0, EMPTY)


def _mix(word: torch.Tensor) -> torch.Tensor:
    """Spread every bit of a 32-bit word (held in int64) over all of them; one to one.

    Source: the finaliser "lowbias32" of Christopher Wellons' hash-prospector, whose constants were
    searched for the least bias.
    """
    # Products overflow 64 bits; their low 32, all that is kept, are right nevertheless.
    word = ((word ^ (word >> 16)) * 0x7FEB352D) & WORD
    word = ((word ^ (word >> 15)) * 0x846CA68B) & WORD
    return word ^ (word >> 16)
