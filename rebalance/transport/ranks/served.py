"""Connects an agent to the server of its live slots."""

from __future__ import annotations

from rebalance.rank.core import RankCore
from rebalance.swap.swapper import Swapper
from rebalance.transport.ranks.server import RankLinkServer, Served
from rebalance.transport.ranks.wire import GroupName


def start_link_server(core: RankCore, swapper: Swapper) -> RankLinkServer | None:
    """Start the server of this rank's live slots, if the settings have one.

    Raises:
        MigrationError: the rank's address cannot be listened on.
    """
    settings = core.settings
    if settings.rank_links is None:
        return None
    own = settings.topology.slots_on(core.rank)

    def served() -> Served:
        # The fence first: if it was open then, the version is that of what serves.
        is_open, version = core.fence.is_open, core.fence.version
        return Served(swapper.placement.slot_to_expert[:, own], version, is_open)

    group = GroupName(settings.run, settings.membership)
    return RankLinkServer(settings.rank_links, core.rank, group, core.parts.bank, served)
