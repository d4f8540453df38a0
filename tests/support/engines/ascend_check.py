"""What vllm-ascend checks before it takes a new expert map."""

from __future__ import annotations

from telemetry.formats.types import PlacementFile


def has_no_move_within_a_device(base: PlacementFile, target: PlacementFile) -> bool:
    """Whether every expert that stays on a device has the same slot there."""
    devices = target.num_ranks or base.num_ranks
    assert devices is not None, "a map has devices"
    shape = (target.placement.num_layers, devices, -1)
    before, after = (it.placement.slot_to_expert.reshape(shape) for it in (base, target))
    kept = (before[..., :, None] == after[..., None, :]).any(axis=3)
    return not (kept & (before != after)).any()
