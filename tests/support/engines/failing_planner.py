"""A planner of the plug-in that fails while a file is there, in whichever process plans."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

FAILS = "EPLB_TEST_PLANNER_FAILS"  # variable with the path of that file


def check() -> None:
    """Fail as a planner without one of its packages does."""
    if Path(os.environ[FAILS]).exists():
        raise ModuleNotFoundError("No module named 'scipy'")


def plant(engine: str) -> None:
    """Have the planner of an engine's plug-in fail from now on, in this process or its child."""
    if engine == "sglang":
        from rebalance.engines.sglang import rounds

        rounds.PLANNER = f"{__name__}:planner_of"
        return
    from rebalance.engines.vllm import policy

    own = policy.planned

    def planned(*args: Any, **kwargs: Any) -> Any:
        check()
        return own(*args, **kwargs)

    policy.planned = planned


def planner_of(terms: dict[str, Any]) -> Any:
    """SGLang's planner, which fails at each plan."""
    from rebalance.engines.sglang.planning import Planner

    class Failing(Planner):
        def plan(self) -> tuple[bytes, dict[str, Any]] | None:
            check()
            return super().plan()

    return Failing(terms)
