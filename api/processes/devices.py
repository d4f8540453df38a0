"""The GPUs of this host, counted before anything is started on them."""

from __future__ import annotations

from eplb.errors import ConfigError


def check_gpus(num_ranks: int) -> None:
    """Refuse a start on too few GPUs at once, and not by ranks that wait for each other.

    Raises:
        ConfigError: fewer GPUs are visible than one for each rank.
    """
    import torch  # takes seconds: only where GPUs are asked for

    found = torch.cuda.device_count()
    if found < num_ranks:
        raise ConfigError(
            f"device cuda: found {found} GPUs for {num_ranks} ranks of this host, "
            "expected one for each"
        )
