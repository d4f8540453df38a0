"""What a layer needs of just-in-time replicas, on a CPU or a GPU. The package states the rules."""

from __future__ import annotations

from typing import Protocol

import torch

from eplb.errors import ConfigError
from runtime.batch.pulls import PullRule
from runtime.batch_split import BatchSplit
from runtime.dispatch.all_to_all import Received
from runtime.model.compute import BankExperts


class LayerPulls(Protocol):
    """Pulls that are under way for one layer."""

    def close_layer(self) -> None:
        """Wait for the pulls, and until every rank has all of its own.

        Does nothing for a batch that was not redirected, as all ranks have not: its split was off.

        Raises:
            BrokenGroup: a pull failed or missed its deadline, on all ranks alike; a peer died.
            RankError: ranks decided differently, on all ranks alike.
        """


class Pulls(LayerPulls, Protocol):
    """Pulls of the layers of one rank, one layer at a time."""

    def redirect(self, layer: int, experts: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Decide what is pulled, start the pulls, and redirect tokens to the spare slots.

        Called after ``BatchSplit.slots``, which gave ``slots`` [T, K] for ``experts`` [T, K]; by
        every source for the same layers in the same order.

        Returns:
            [T, K] slots of the wider dispatch.
        """


def check_extra_slots(split: BatchSplit, rule: PullRule) -> None:
    """Refuse a table whose slots are numbered for another number of spare slots.

    Raises:
        ConfigError: it is.
    """
    found = split.table.extra_slots
    if found != rule.spare_slots:
        raise ConfigError(
            f"the routing table has {found} extra slots, expected {rule.spare_slots}, those of the "
            "pull rule"
        )


class PulledExperts:
    """Resident experts, whose product waits for nothing, then those of the spare slots.

    Args:
        resident: of the bank of live slots.
        spare: of a bank of one layer, the spare records.
        num_resident: C.
        pulls: closes each layer in between.
    """

    def __init__(
        self, resident: BankExperts, spare: BankExperts, num_resident: int, pulls: LayerPulls
    ) -> None:
        self._resident, self._spare = resident, spare
        self._num_resident, self._pulls = num_resident, pulls

    def run(self, layer: int, received: Received) -> torch.Tensor:
        """Results of all rows, spare slots included."""
        results = self._resident.run(layer, received)
        self._pulls.close_layer()
        return self._spare.run(0, received, first_slot=self._num_resident, results=results)
