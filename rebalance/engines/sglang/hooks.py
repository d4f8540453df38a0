"""The hooks of the engine. Each catches what the plug-in raises: no pass fails because of it.

What the engine's own function raises goes on to the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from eplb.errors import reason_of
from rebalance.engines.common.plugin_settings import PluginSettings
from rebalance.engines.common.start import EngineGroup, facts_of, join, set_part
from rebalance.engines.sglang import engine
from rebalance.engines.sglang.rounds import PassTap, Rounds

log = logging.getLogger(__name__)

EPLB, ELASTIC = "sglang.srt.eplb", "sglang.srt.elastic_ep.elastic_ep"
MAP_OF_SURVIVORS = "eplb_algorithms.elasticity_aware.rebalance_experts"
# For the slowest rank to come to a round. A rank that is gone holds the engine's own reductions up
# for longer; one that is slow must not end the plug-in.
ROUND_DEADLINE_S = 300.0


class Hooks:
    """One for each process of the engine; most of them never make an EPLBManager."""

    def __init__(self, settings: PluginSettings, untried: str = "") -> None:
        self._settings = settings
        self._untried = untried  # why this release is observed first; "": it was tested
        self._tap = PassTap()
        self._targets: tuple[str, ...] = ()
        self._is_on = False  # decided for all ranks, whatever happens to this one
        # Also for all: elastic ranks get the map after a death, until one of them has returned.
        self._maps_survivors = False
        self.rounds: Rounds | None = None

    def register(self) -> None:
        """Register the hooks; the engine applies them once all plug-ins are loaded."""
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        recorder = f"{EPLB}.expert_distribution._ExpertDistributionRecorderReal"
        manager = f"{EPLB}.eplb_manager.EPLBManager"
        for target, hook, kind in (
            (f"{manager}.__init__", self.manager_made, HookType.AFTER),
            (f"{manager}.on_forward_pass_end", self.pass_ended, HookType.AROUND),
            (f"{recorder}._on_forward_pass_start", self.pass_begins, HookType.AFTER),
            (f"{EPLB}.expert_distribution._StatAccumulator.append", self.counted, HookType.AFTER),
            (f"{ELASTIC}.ElasticEPState.reset", self.rank_returned, HookType.AFTER),
            (f"{EPLB}.{MAP_OF_SURVIVORS}", self.map_wanted, HookType.AROUND),
        ):
            HookRegistry.register(target, hook, kind)
            self._targets += (target,)

    def manager_made(self, _result: None, manager: Any, *_: Any, **__: Any) -> None:
        """Decide with the other ranks whether the plug-in works in this start."""
        try:
            self._begin(manager)
        except Exception as exc:
            set_part("sglang", "plugin", is_on=False)
            own = "is off on this rank" if self._is_on else "stays off, SGLang's own balancer runs"
            log.error("the EPLB plug-in %s: %s", own, reason_of(exc))

    def _begin(self, manager: Any) -> None:
        """Join the other ranks, which must not wait for one that cannot, and make the rounds."""
        group = EngineGroup()
        try:
            refusal, group = self._refusal(), engine.group()
        except Exception as exc:
            refusal = reason_of(exc)
        joined = join(
            "sglang",
            dist.distributed_c10d._get_default_store(),
            "world",
            dist.get_rank(),
            dist.get_world_size(),
            group=group,
            facts=facts_of("sglang", self._settings),
            deadline_s=self._settings.engine.load_deadline_s,
            refusal=refusal,
        )
        if engine.is_elastic():
            self._maps_survivors = True
            set_part("sglang", "plugin", is_on=False)
            log.warning(
                "elastic ranks: SGLang's own balancer runs, and the EPLB plug-in gives it the map "
                "of the survivors after a death, with --eplb-algorithm elasticity_aware"
            )
            return
        self._is_on = True
        ranks = dist.new_group(backend="gloo", timeout=timedelta(seconds=ROUND_DEADLINE_S))
        self.rounds = Rounds(manager, self._tap, ranks, joined, self._settings, self._untried)
        set_part("sglang", "plugin", is_on=True)

    def pass_ended(self, original: Callable[[Any], None], manager: Any) -> None:
        """In place of the engine's own rebalance; raises only what the engine's updater raises."""
        rounds = self.rounds
        if rounds is not None and not rounds.is_left:
            rounds.pass_ended()
        elif rounds is not None or not self._is_on:
            original(manager)

    def map_wanted(self, original: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Give the map of the survivors; the engine's own where that fails on all ranks alike.

        An error of memory or of a device may be one rank's alone, whose map would then be another
        than that of the others: it must end the rank, as a death.
        """
        try:
            if self._maps_survivors and not engine.has_scaled():
                from rebalance.engines.sglang.survivors import rebalance_experts  # loads numba

                return rebalance_experts(original, *given, **named)
        except (MemoryError, RuntimeError):
            raise
        except Exception as exc:
            log.error("the engine's own map of the survivors serves: %s", reason_of(exc))
        return original(*given, **named)

    def rank_returned(self, *_: Any) -> None:
        """Leave all further maps to the engine: who returned has no part in what was agreed."""
        self._maps_survivors = False

    def pass_begins(self, _result: None, _recorder: Any, forward_batch: Any) -> None:
        """Note the phase of a pass."""
        self._count(lambda: self._tap.see(forward_batch))

    def counted(
        self,
        _result: None,
        _accumulator: Any,
        forward_pass_id: int,
        gatherer_key: str,
        single_pass_data: dict[str, Any],
        outputs: dict[str, Any],
    ) -> None:
        """Add the counts of a pass."""
        self._count(lambda: self._tap.add(single_pass_data["global_physical_count"]))

    def _count(self, act: Callable[[], None]) -> None:
        """Act while the plug-in works; the next round reports a failure to the other ranks."""
        rounds = self.rounds
        if rounds is None or rounds.stopped:
            return
        try:
            act()
        except Exception as exc:
            if not rounds.broken:
                rounds.broken = reason_of(exc)
                log.warning("the tap failed: %s", rounds.broken)

    def _refusal(self) -> str:
        from sglang.srt.plugins.hook_registry import HookRegistry

        missing = [target for target in self._targets if target not in HookRegistry._patched]
        if missing:
            return f"the engine did not apply the hook on {missing[0]}"
        return engine.refusal()
