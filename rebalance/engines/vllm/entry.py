"""Entry point ``vllm.general_plugins``, which vLLM calls in each of its processes.

``assumptions`` has what the plug-in uses of vLLM and assumes about it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from eplb.settings.loader import CONFIG_VARIABLE
from rebalance.engines.common import guards
from rebalance.engines.common.start import load_plugin, set_part, show_log
from rebalance.engines.vllm.assumptions import ASSUMED

if TYPE_CHECKING:
    from rebalance.engines.common.plugin_settings import PluginSettings
    from rebalance.engines.vllm.process import PluginProcess

log = logging.getLogger(__name__)

_loaded: list[PluginProcess] = []  # the plug-in of this process, once it is loaded


def refusals() -> Iterator[str]:
    """Yield one sentence for each assumption about this process's vLLM that does not hold."""
    are_there = True
    for refusal in guards.refusals(ASSUMED):
        are_there = False
        yield refusal
    if not are_there:
        return
    from vllm.distributed.eplb import eplb_state, policy

    if set(policy.EPLB_POLICIES) != {"default"}:
        yield f"vLLM's policies are {sorted(policy.EPLB_POLICIES)}, expected 'default' alone"
    if policy.EPLB_POLICIES is not eplb_state.EPLB_POLICIES:
        yield "eplb_state of vLLM has another table of policies than policy, expected the same"


def register() -> None:
    """Load the plug-in if ``EPLB_CONFIG`` names a deployment, and a trace to replay. Never raises.

    Without its trace vLLM refuses the strategy ``eplb_trace``, which it does not know then.
    """
    if os.environ.get(CONFIG_VARIABLE):
        show_log()
    load(os.environ)
    if os.environ.get("VLLM_MOE_ROUTING_SIMULATION_STRATEGY") == "eplb_trace":
        try:
            from rebalance.engines.vllm.replay import register_replay

            register_replay(os.environ)
        except Exception as exc:
            log.error("no trace is replayed: %s", exc)


def load(environ: Mapping[str, str]) -> bool:
    """Load the plug-in once for each process, as ``load_plugin``; whether it is loaded."""
    return bool(_loaded) or load_plugin("vllm", environ, _install)


def _install(settings: PluginSettings) -> Iterator[str]:
    from rebalance.engines.vllm.hooks import install
    from rebalance.engines.vllm.process import PluginProcess

    yield from refusals()
    process = PluginProcess(settings, guards.untried(ASSUMED))
    install(process)
    _loaded.append(process)
    set_part("vllm", "plugin", is_on=True)
