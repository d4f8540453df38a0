"""The entry point that vLLM calls in each of its processes (group ``vllm.general_plugins``)."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from eplb.settings.loader import CONFIG_VARIABLE

if TYPE_CHECKING:
    from rebalance.engines.vllm.process import PluginProcess

log = logging.getLogger(__name__)

_loaded: list[PluginProcess] = []  # the plug-in of this process, once it is loaded


def register() -> None:
    """Load the plug-in if ``EPLB_CONFIG`` names a deployment, and a trace to replay. Never raises.

    Without its trace vLLM refuses the strategy ``eplb_trace``, which it does not know then.
    """
    load(os.environ)
    if os.environ.get("VLLM_MOE_ROUTING_SIMULATION_STRATEGY") == "eplb_trace":
        try:
            from rebalance.engines.vllm.tools.replay import register_replay

            register_replay(os.environ)
        except Exception as exc:
            log.error("no trace is replayed: %s", exc)


def load(environ: Mapping[str, str]) -> bool:
    """Load the plug-in once for each process; whether it is loaded.

    What is wrong is logged in one sentence, and vLLM runs as without the plug-in.
    """
    if _loaded:
        return True
    if not environ.get(CONFIG_VARIABLE):
        return False
    from rebalance.engines.common.gauge import set_part

    try:
        # Late: these need torch, numba and vLLM, which a process without a deployment does without.
        from rebalance.engines.common.plugin_settings import settings_of

        settings = settings_of(environ)
        assert settings is not None, "the variable is set"
        from rebalance.engines.common.guards import check_engine
        from rebalance.engines.vllm.guards import refusals
        from rebalance.engines.vllm.hooks import install
        from rebalance.engines.vllm.process import PluginProcess

        check_engine(refusals())
        process = PluginProcess(settings)
        install(process)
    except Exception as exc:
        log.error("the EPLB plug-in is not loaded: %s", exc)
        set_part("vllm", "plugin", is_on=False)
        return False
    _loaded.append(process)
    set_part("vllm", "plugin", is_on=True)
    log.info("EPLB plug-in loaded for deployment %r", settings.deployment)
    return True
