"""Prices of moves and gains, by which the gate decides (``eplb/decision/alternatives.py``).

Costs and gains are in seconds of serving time. The cost of a move is the time of its bytes on the
link. A gain saves the experts' part of a step times the removed imbalance, over the pay-back time.
``Problem.price`` is the same price for one step of the search. Part of the imbalance is chance,
which ``eplb/core/load.py`` estimates: a gain below that noise does not count.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from itertools import pairwise
from math import inf
from numbers import Real  # numpy's numbers too
from typing import Annotated, Literal

from eplb.clock import duration_text
from eplb.core.kernels import Curve, Kernel, kernel_for
from eplb.core.model import ModelShape, preset
from eplb.declared import Setting
from eplb.errors import ConfigError

Objective = Literal["tokens", "time"]


NOMINAL_BYTES = 17_301_504  # size of an expert without a model: DeepSeek-V2-Lite's, in BF16


class Decision(Enum):
    """The decision on a plan."""

    MOVE = "MOVE"  # weights move
    RESPLIT = "RESPLIT"  # only shares change
    KEEP = "KEEP"  # the serving placement does not change


@dataclass(frozen=True)
class CostModel:
    """The cost of a rebalance, and the time within which it must pay back.

    ``pay_back_s`` is the operator's setting. Zero: no move ever pays; infinite: every gain does.
    ``Problem.priced`` has the part of it that counts while a load is new.

    Raises:
        ConfigError: a figure that is negative or not a number.
    """

    pay_back_s: Annotated[
        float,
        Setting(
            "serving time within which a move must save what it costs, once the load has not "
            "changed suddenly for four windows; a quarter of it after one window",
            live=True,
        ),
    ] = 240.0
    expert_part: Annotated[
        float,
        Setting(
            "part of a step that routed experts take at perfect balance",
            above=0,
            at_most=1,
            live=True,
        ),
    ] = 0.3
    seconds_per_expert: float | None = None  # serving time lost per expert received; None: by bytes
    bytes_per_s: Annotated[
        float,
        Setting(
            "rate at which a rank receives experts, for the price of a move",
            unit="bytes/s",
            at_least=1,
            at_most=10**15,
            live=True,
        ),
    ] = 6e9  # the default budget of staging
    seconds_per_rebalance: Annotated[
        float,
        Setting(
            "serving time that votes and swaps of one rebalance take",
            unit="s",
            at_most=3600,
            live=True,
        ),
    ] = 0.1
    far_moves: Annotated[
        float, Setting("near moves that one from another node counts as", unit="moves", live=True)
    ] = 1.1
    # Part of a layer's imbalance that new shares must remove to replace an equal split.
    min_share_gain: float = 0.01
    node_traffic: Annotated[
        float,
        Setting("imbalance that all tokens crossing nodes count as; 0: not counted", live=True),
    ] = 0.0
    tokens_of_node: tuple[float, ...] = ()  # part of tokens that starts on each; (): by live ranks
    curve: Curve = ()  # (tokens of a replica in a step, its time): objective "time"; (): not known
    rank_us: float = 0.0  # time of a rank beside its replicas', where ``curve`` is known
    row_us: Annotated[
        float,
        Setting(
            "time of a token on the links of the rank that receives it, dispatch and combine "
            "together, for `objective`; 0: not counted",
            unit="microseconds",
            at_most=1000,
            live=True,
        ),
    ] = 0.0
    dead_zone: Annotated[
        bool, Setting("count a gain only by the time that it saves by the curve", live=True)
    ] = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            number = float(value) if isinstance(value, Real) else 0.0
            if not number >= 0:
                raise ConfigError(f"cost: {name} is {value}, expected 0 or more")
            if number == inf and name != "pay_back_s":
                raise ConfigError(f"cost: {name} is {value}, expected a finite number")
        if not 0 < self.expert_part <= 1:
            raise ConfigError(
                f"cost: expert_part is {self.expert_part}, expected above 0 and at most 1"
            )
        if not self.bytes_per_s > 0:
            raise ConfigError(f"cost: bytes_per_s is {self.bytes_per_s}, expected more than 0")
        if any(not 0 <= part < inf for part in self.tokens_of_node):
            raise ConfigError(
                f"cost: tokens_of_node is {self.tokens_of_node}, expected finite parts, 0 or more"
            )
        self._check_curve()

    def _check_curve(self) -> None:
        if not self.curve:
            return
        tokens, times = zip(*self.curve, strict=True) if len(self.curve) > 1 else ((), ())
        rises = all(one < two < inf for one, two in pairwise(tokens))
        if not tokens or not rises or tokens[0] <= 0 or not all(0 < one < inf for one in times):
            raise ConfigError(
                f"cost: curve is {self.curve}, expected two points or more, tokens above 0 and "
                "rising, times above 0"
            )
        if any(two < one for one, two in pairwise(times)):
            raise ConfigError(f"cost: curve is {self.curve}, expected times that never fall")

    def with_kernel(self, kernel: Kernel, model: ModelShape) -> CostModel:
        """Give the same prices with the times of a kernel for a model's experts."""
        return replace(self, curve=kernel.curve(model), rank_us=kernel.fixed_us)

    @property
    def timed(self) -> CostModel:
        """The prices with links in the curve, and the constant's times where none are known."""
        curve, rank_us = (self.curve, self.rank_us) if self.curve else _constant()
        with_links = tuple((tokens, us + tokens * self.row_us) for tokens, us in curve)
        return replace(self, curve=with_links, rank_us=rank_us, row_us=0.0)

    def move_seconds(self, expert_bytes: int) -> float:
        """Serving time that a rank loses by receiving one expert; 0 bytes: not known."""
        if self.seconds_per_expert is not None:
            return self.seconds_per_expert
        return (expert_bytes or NOMINAL_BYTES) / self.bytes_per_s

    def saved_seconds(self, gain: float) -> float:
        """Serving time that a reduction of imbalance, mean over layers, saves until pay-back."""
        return self.pay_back_s * self.expert_part * gain if gain else 0.0

    def saving_text(self, gain: float) -> str:
        """What a reduction of imbalance saves, in words: of each second, and until pay-back."""
        saves = f"saves {duration_text(self.expert_part * gain)} of each second"
        if self.pay_back_s == inf:
            return f"{saves} that the load lasts"
        saved, until = duration_text(self.saved_seconds(gain)), duration_text(self.pay_back_s)
        return f"{saves}, {saved} in {until}"

    def gain_worth(self, seconds: float) -> float:
        """Imbalance, mean over layers, whose removal saves so many seconds until pay-back."""
        worth = self.pay_back_s * self.expert_part
        return seconds / worth if worth > 0 else inf


@cache
def _constant() -> tuple[Curve, float]:
    """Times of DeepSeek-V3's experts in FP8 on an H200, of SGLang's kernel in decode."""
    kernel, model = kernel_for("h200", "fp8", "sglang", is_prefill=False), preset("deepseek-v3")
    return kernel.curve(model), kernel.fixed_us
