"""Routes in vLLM's API server (entry point group ``vllm.endpoint_plugins``).

    GET  /v1/eplb/status    what the plug-in of each worker does
    POST /v1/eplb/pause     keep the map that serves
    POST /v1/eplb/resume    plan again

They stand below ``/v1``, which vLLM's ``--api-key`` guards. vLLM loads them where ``VLLM_PLUGINS``
names ``eplb``, and they reach workers that have ``WorkerExtension``.
"""

from __future__ import annotations

import logging
from typing import Any

EXTENSION = "--worker-extension-cls rebalance.engines.vllm.tools.worker.WorkerExtension"
TIMEOUT_S = 10.0

log = logging.getLogger(__name__)


class Routes:
    """What vLLM asks of an endpoint plug-in."""

    name = "eplb"
    required_tasks = None

    def __init__(self) -> None:
        self._client: Any = None

    def attach_router(self, app: Any) -> None:
        """Add the routes to vLLM's application."""
        for path, method, handler in (
            ("/v1/eplb/status", "GET", self.status),
            ("/v1/eplb/pause", "POST", self.pause),
            ("/v1/eplb/resume", "POST", self.resume),
        ):
            app.add_api_route(path, handler, methods=[method], response_model=None)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Take the engine's client; None on a server without an engine."""
        self._client = engine_client

    async def status(self) -> Any:
        """Report what each worker's plug-in does."""
        return await self._of_workers("eplb_status")

    async def pause(self) -> Any:
        """Keep the map that serves."""
        return await self._of_workers("eplb_pause", True)

    async def resume(self) -> Any:
        """Plan again at vLLM's next rebalance."""
        return await self._of_workers("eplb_pause", False)

    async def _of_workers(self, method: str, *args: Any) -> Any:
        if self._client is None:
            return _refused("this server has no engine")
        try:
            found = await self._client.collective_rpc(method, timeout=TIMEOUT_S, args=args)
        except Exception as exc:
            log.warning("%s: %s", method, exc)
            return _refused(f"the workers did not answer {method}, expected vLLM with {EXTENSION}")
        return {"workers": found}


def _refused(sentence: str) -> Any:
    from starlette.responses import JSONResponse  # late: vLLM's API server brings it

    return JSONResponse({"error": sentence}, status_code=503)
