"""Engines over time: DeepSeek's balancer, started by each engine's own trigger.

All of them plan on the load since their latest plan or on a window of it, and take every plan.

    deepseek  at each interval, on all load since the latest plan
    sglang    the same, unless ranks were used better than 0.8 since then (pull request 8345)
    vllm      first after a quarter of an interval, on its latest third, as its defaults have it

Intervals are counted in windows.
"""

from __future__ import annotations

import numpy as np

from eplb.core.placement import Placement
from simulations.course import Terms
from simulations.peers.deepseek import deepseek_slots
from simulations.peers.triggers import SglangRule, VllmRule, utilization
from simulations.schemes import Planned, Taken, by_rank
from simulations.windows import Past, Tokens

SGLANG_UTILIZATION = 0.8
VLLM_WINDOW = 3  # an interval is so many times the steps whose load is added up


class Engine(Planned):
    """DeepSeek's balancer on a sum of windows."""

    def __init__(self, terms: Terms, first: Placement, every: int) -> None:
        super().__init__(terms, first)
        self._every = every
        self._sum: Tokens | None = None

    def plan(self, window: int, tokens: Tokens, past: Past) -> Taken | None:
        """Add a window up, and plan where the trigger says so."""
        if self.is_recorded(window + 1):
            self._sum = tokens.astype(np.int64) if self._sum is None else self._sum + tokens
        if not self.is_due(window + 1, tokens):
            return None
        counted, self._sum = self._sum, None
        if counted is None or not counted.any():
            return None
        model = self.terms.model
        groups = 1 if model is None else model.num_expert_groups
        held = deepseek_slots(counted, self.terms.topology, groups)
        generation = self.serving.generation + 1
        return self.take(Placement(held, counted.shape[1], generation), "at each interval")

    def is_recorded(self, number: int) -> bool:
        """Whether the load of a window counts for the next plan; windows count from 1."""
        return True

    def is_due(self, number: int, tokens: Tokens) -> bool:
        """Whether to plan after a window."""
        return number % self._every == 0


class Sglang(Engine):
    """SGLang's manager with a utilization threshold."""

    def __init__(self, terms: Terms, first: Placement, every: int) -> None:
        super().__init__(terms, first, every)
        self._rule = SglangRule(every, SGLANG_UTILIZATION)
        self._used: list[float] = []

    def is_due(self, number: int, tokens: Tokens) -> bool:
        """At each interval, unless ranks are used well."""
        load = by_rank(self.serve(tokens), self.terms.topology)
        self._used.append(utilization(load[:, self.terms.topology.serving]))
        if number % self._every:
            return False
        mean = float(np.mean(self._used))
        self._used = []
        return self._rule.is_due(number, mean)


class Vllm(Engine):
    """vLLM's state machine of intervals and windows; weights move in the background."""

    is_async = True

    def __init__(self, terms: Terms, first: Placement, every: int) -> None:
        super().__init__(terms, first, every)
        self._rule = VllmRule(every, max(1, every // VLLM_WINDOW))

    def is_recorded(self, number: int) -> bool:
        """The latest third of an interval."""
        return self._rule.is_recorded(number)

    def is_due(self, number: int, tokens: Tokens) -> bool:
        """At each interval, first after a quarter of one."""
        return self._rule.is_due(number)


ENGINES: dict[str, type[Engine]] = {"deepseek": Engine, "sglang": Sglang, "vllm": Vllm}
