"""Methods for vLLM's workers, which its API server reaches by name.

--worker-extension-cls rebalance.engines.vllm.tools.worker.WorkerExtension
"""

from __future__ import annotations

from typing import Any


class WorkerExtension:
    """Mixed into vLLM's worker class; needs the plug-in in the worker's process."""

    def eplb_status(self) -> dict[str, Any]:
        """What the plug-in of this worker does."""
        from rebalance.engines.vllm import plugin

        process = plugin.loaded()
        if process is None:
            return {"is_loaded": False}
        return {"is_loaded": True, **process.status()}

    def eplb_pause(self, is_paused: bool) -> bool:
        """Keep the map that serves from now on, or plan again; whether the plug-in is loaded.

        Rank 0 decides for all ranks when it plans, so workers may hear of it at different passes.
        """
        from rebalance.engines.vllm import plugin

        process = plugin.loaded()
        if process is None:
            return False
        process.is_paused = is_paused
        return True
