"""Builds a controller: the process that plans. It loads no torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from eplb.core.compiler import compiler_passes
from eplb.precompile import warm_up
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
    on_compile: Callable[[str], None] = lambda _: None,
) -> Controller:
    """Build a controller that can lead at once; ``run`` plans until it has to stop.

    Several may be built for one deployment, on any host that reaches the store: one leads, by the
    store's lease.

    Args:
        settings: how it decides.
        store: of the deployment, open or by its URL.
        deployment: for which it plans.
        holder: under which it holds the lease; None: a new name.
        on_compile: called often while the planner's kernels are compiled, with a function's name.

    Raises:
        ConfigError: the settings name an unknown policy, the URL an unknown store, or a process of
            the deployment is of a version that this one cannot work with.
        StoreError: the store cannot be used.
    """
    if isinstance(store, Path | str):
        store = open_store(store, deployment)
    joining = Announcement(CONTROLLER, holder or new_holder())
    check_versions(store, joining)
    controller = Controller(store, settings, holder=joining.name)
    with compiler_passes(on_compile):
        warm_up(settings.policy)
    return controller
