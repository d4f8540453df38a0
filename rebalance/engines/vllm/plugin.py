"""The entry point that vLLM calls in each of its processes (group ``vllm.general_plugins``)."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from eplb.settings.loader import CONFIG_VARIABLE
from rebalance.engines.common.start import load_plugin, set_part, show_log

if TYPE_CHECKING:
    from rebalance.engines.common.plugin_settings import PluginSettings
    from rebalance.engines.vllm.process import PluginProcess

log = logging.getLogger(__name__)

_loaded: list[PluginProcess] = []  # the plug-in of this process, once it is loaded


def register() -> None:
    """Load the plug-in if ``EPLB_CONFIG`` names a deployment, and a trace to replay. Never raises.

    Without its trace vLLM refuses the strategy ``eplb_trace``, which it does not know then.
    """
    if os.environ.get(CONFIG_VARIABLE):
        show_log()
    load(os.environ)
    if os.environ.get("VLLM_MOE_ROUTING_SIMULATION_STRATEGY") == "eplb_trace":
        try:
            from rebalance.engines.vllm.tools.replay import register_replay

            register_replay(os.environ)
        except Exception as exc:
            log.error("no trace is replayed: %s", exc)


def load(environ: Mapping[str, str]) -> bool:
    """Load the plug-in once for each process, as ``load_plugin``; whether it is loaded."""
    return bool(_loaded) or load_plugin("vllm", environ, _install)


def _install(settings: PluginSettings) -> Iterator[str]:
    from rebalance.engines.vllm.guards import refusals
    from rebalance.engines.vllm.hooks import install
    from rebalance.engines.vllm.process import PluginProcess

    yield from refusals()
    process = PluginProcess(settings)
    install(process)
    _loaded.append(process)
    set_part("vllm", "plugin", is_on=True)
