"""The latest result of a call that may block, for a probe that must not wait for it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from api.http.problems import ProblemType, Refused
from eplb.clock import Clock

WAIT_S = 0.25


@dataclass(frozen=True)
class Health:
    """Alive, or ready; a problem otherwise."""

    detail: str
    status: Literal["ok"] = "ok"


class LatestAnswer:
    """Calls ``ask`` on its own thread, one call at a time, and keeps the latest answer.

    Args:
        ask: may block, and may raise; ``get`` then raises the same.
        wait_s: how long ``get`` waits for a fresh answer before the kept one is returned.
        stale_after_s: age of an unanswered call from which ``get`` reports it instead.
    """

    def __init__(
        self,
        ask: Callable[[], Health],
        *,
        wait_s: float = WAIT_S,
        stale_after_s: float = 10.0,
        clock: Clock = time.monotonic,
    ) -> None:
        self._ask, self._wait_s, self._clock = ask, wait_s, clock
        self._stale_after_s = stale_after_s
        self._answer: Health | Exception = Refused(
            ProblemType.STORE_UNAVAILABLE, "the store has not answered yet"
        )
        self._asked_at = 0.0
        self._fresh: asyncio.Future[None] | None = None  # set while a question is open

    async def get(self) -> Health:
        """Return the latest answer, a fresh one where it comes within ``wait_s``.

        Raises:
            Refused: the open question is too old, or no answer has come yet.
            Exception: what the latest question raised.
        """
        loop = asyncio.get_running_loop()
        if self._fresh is None:
            self._fresh, self._asked_at = loop.create_future(), self._clock()
            args = (loop, self._fresh)
            threading.Thread(
                target=self._refresh, args=args, name="eplb-probe", daemon=True
            ).start()
        await asyncio.wait({self._fresh}, timeout=self._wait_s)
        waiting_s = self._clock() - self._asked_at
        if self._fresh is not None and waiting_s > self._stale_after_s:
            raise Refused(
                ProblemType.STORE_UNAVAILABLE, f"the store has not answered for {waiting_s:.1f} s"
            )
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer

    def _refresh(self, loop: asyncio.AbstractEventLoop, fresh: asyncio.Future[None]) -> None:
        answer: Health | Exception
        try:
            answer = self._ask()
        except Exception as exc:
            answer = exc

        def finish() -> None:
            self._answer, self._fresh = answer, None
            fresh.set_result(None)

        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(finish)
