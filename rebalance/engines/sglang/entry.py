"""Entry point ``sglang.srt.plugins``: registers the hooks, or says in one line why not.

The engine loads it in every process. It does nothing unless ``EPLB_CONFIG`` names a file with the
name of a deployment.
"""

from __future__ import annotations

import logging
import os

from eplb.errors import EplbError
from eplb.packages import check_packages
from eplb.settings.loader import CONFIG_VARIABLE

log = logging.getLogger(__name__)


def register() -> None:
    """Register the hooks; a failure is logged, and the engine starts without the plug-in."""
    if not os.environ.get(CONFIG_VARIABLE):
        return
    from rebalance.engines.common.gauge import set_part

    try:
        # Late: it needs the planner, which a process without a deployment does without.
        from rebalance.engines.common.plugin_settings import settings_of

        settings = settings_of(os.environ)
        assert settings is not None, "the variable is set"
        check_packages(("runtime", "telemetry", "rebalance"))
        from rebalance.engines.common.guards import check_engine, refusals
        from rebalance.engines.sglang.guards import ASSUMED
        from rebalance.engines.sglang.hooks import Hooks

        check_engine(refusals(ASSUMED))
        Hooks(settings).register()
    except Exception as exc:  # whatever it is, the engine starts
        set_part("sglang", "plugin", is_on=False)
        reason = exc if isinstance(exc, EplbError) else f"{type(exc).__name__}: {exc}"
        log.error("the EPLB plug-in is not loaded: %s", reason)
        return
    log.info("the EPLB plug-in is registered for deployment %s", settings.deployment)
