"""Entry point ``sglang.srt.plugins``, which the engine calls in each of its processes.

``assumptions`` has what the plug-in uses of SGLang and assumes about it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from eplb.settings.loader import CONFIG_VARIABLE
from rebalance.engines.common import guards
from rebalance.engines.common.start import load_plugin, show_log
from rebalance.engines.sglang.assumptions import ASSUMED

if TYPE_CHECKING:
    from rebalance.engines.common.plugin_settings import PluginSettings


def register() -> None:
    """Register the hooks if ``EPLB_CONFIG`` names a deployment. Never raises."""
    if os.environ.get(CONFIG_VARIABLE):
        show_log()
    load_plugin("sglang", os.environ, _install)


def refusals() -> Iterator[str]:
    """Yield one sentence for each assumption about this process's SGLang that does not hold."""
    return guards.refusals(ASSUMED)


def _install(settings: PluginSettings) -> Iterator[str]:
    from rebalance.engines.sglang.hooks import Hooks

    yield from refusals()
    Hooks(settings, guards.untried(ASSUMED)).register()
