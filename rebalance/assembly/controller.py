"""Builds a controller: the process that plans. It loads no torch."""

from __future__ import annotations

from pathlib import Path

from eplb.versions import CONTROLLER, Announcement
from rebalance.controller.lease import new_holder
from rebalance.controller.loop import Controller, ControllerSettings
from telemetry import open_store
from telemetry.state.joining import check_versions
from telemetry.state.store import StateStore


def build_controller(
    settings: ControllerSettings,
    store: StateStore | Path | str,
    deployment: str,
    *,
    holder: str | None = None,
) -> Controller:
    """Build a controller that can lead at once; ``run`` plans until it has to stop.

    Kernels that ``eplb compile`` did not compile are interpreted at first, so its first plans take
    longer; ``eplb.precompile.warmed_up_meanwhile`` compiles them beside it.

    Several may be built for one deployment, on any host that reaches the store: one leads, by the
    store's lease.

    Args:
        settings: how it decides.
        store: of the deployment, open or by its URL.
        deployment: for which it plans.
        holder: under which it holds the lease; None: a new name.

    Raises:
        ConfigError: the settings name an unknown policy, the URL an unknown store, or a process of
            the deployment is of a version that this one cannot work with.
        StoreError: the store cannot be used.
    """
    if isinstance(store, Path | str):
        store = open_store(store, deployment)
    joining = Announcement(CONTROLLER, holder or new_holder())
    check_versions(store, joining)
    return Controller(store, settings, holder=joining.name)
