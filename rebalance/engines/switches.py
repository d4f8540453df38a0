"""What of a deployment's switches and live settings the plug-ins obey."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from telemetry.state.store import StateStore


def why_kept(store: StateStore) -> str:
    """Why a plug-in may move nothing now; "" where it may.

    A plug-in's plan knows no cordons and no pins, so while there are any it keeps the map: a
    cordoned rank gets no further expert, and a drained one keeps those that it has.

    Raises:
        StoreError: the store does not answer.
    """
    state = store.expire_live()  # beside a plug-in there may be no controller that does
    if not state.control.movement:
        return "movement is switched off"
    if state.control.observe:
        return "the deployment is only observed"
    for name in ("cordons", "pins"):
        if found := state.text(name):
            return f"{name} are {found!r}, expected none: plans of the plug-in know no {name}"
    return ""


def why_refused(request: Mapping[str, Any]) -> str:
    """What a task of kind ``rebalance`` asks for that a plug-in cannot do; "" for nothing."""
    if request.get("throttle"):
        return (
            f"the request has the throttle {request['throttle']}, expected none: the engine moves "
            "weights at its own pace"
        )
    if request.get("policy") not in (None, "auto"):
        return f"the request has the policy {request['policy']!r}, expected 'auto'"
    return ""
