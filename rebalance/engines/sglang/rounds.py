"""Rounds of all ranks, every ``telemetry.window_steps`` passes: count, agree, move.

A round is one small reduction on the host over a group of the plug-in's own. Only its result
decides what happens next, so all ranks do the same: hand over the window's counts, begin a plan
that rank 0 has ready, or stop because one of them failed. Rank 0's plan reaches all ranks as bytes,
and each checks the same bytes. Weights are moved by the engine's own updater, some layers in each
pass as the engine itself would.

A failure of ours stops the plug-in on all ranks in one round, and the engine's own balancer goes on
from the map that serves. Where no plan can be made, or the store is gone for long, the engine's own
planner plans, until that has changed; its maps are begun in the same rounds, and moved and checked
as ours. A failure of the engine's updater is the engine's: weights are then undefined, and it must
not serve on.

Tokens of each slot are counted where the engine's recorder counts. Counting is one addition on the
device for each pass; the recorder has removed padding (its ids are -1). Sums are int64: the
recorder's own are int32.

Shapes:  L rows of the engine's map, S slots.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from eplb.core.load import Phase
from eplb.errors import EplbError, MigrationError, reason_of
from rebalance.engines.common.fsck.rank_check import FAULTS_STOP_MOVES, RankCheck, report_stop
from rebalance.engines.common.messages import MapChange, MoveOutcome, PlannerAnswer, PlanQuestion
from rebalance.engines.common.plugin_settings import PluginSettings
from rebalance.engines.common.records import Kept, capture, digests_of_experts, digests_of_slots
from rebalance.engines.common.replica_weights import shares_of
from rebalance.engines.common.slot_records import SlotRecords, Verdict
from rebalance.engines.common.start import Joined, say_who_plans, set_part
from rebalance.engines.common.store_process import StoreProcess, identity_of, why_engine_plans
from rebalance.engines.common.tap import Counted, IntArray, on_host
from rebalance.engines.sglang import engine
from rebalance.engines.sglang.planning import Planned, Shape, answer_of, check_plan, terms_of
from rebalance.engines.sglang.replica_weights import replica_lists
from rebalance.weights.expert_records import Tensors, together
from runtime.group import gathered_large
from telemetry.state.events import ENGINE_PLANS

# By name, because the numbers differ between releases of the engine.
PHASES: dict[str, Phase] = {
    "EXTEND": "prefill",
    "SPLIT_PREFILL": "prefill",
    "PREBUILT": "prefill",
    "DECODE": "decode",
    "TARGET_VERIFY": "decode",
    "MIXED": "mixed",
}


@dataclass
class PassTap:
    """Counts of one rank; ``counts`` is made with the first pass, on the engine's device."""

    counts: torch.Tensor | None = None  # [L, S] int64
    modes: Counter[str] = field(default_factory=Counter)  # forward modes of the passes
    mode: str = ""  # of the last pass

    def add(self, global_physical_count: torch.Tensor) -> None:
        """Add the counts [L, S] of one pass."""
        if self.counts is None:
            # A tensor made in inference mode could not be reduced outside it.
            with torch.inference_mode(False):
                self.counts = torch.zeros_like(global_physical_count, dtype=torch.int64)
        self.counts += global_physical_count

    def see(self, forward_batch: Any) -> None:
        """Note the forward mode of the pass that begins."""
        self.mode = forward_batch.forward_mode.name
        self.modes[self.mode] += 1

    def take(self, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
        """Return the counts and begin anew; zeros before the first pass was recorded."""
        taken = self.counts
        self.counts = None
        if taken is None:
            return torch.zeros(shape, dtype=torch.int64, device=device)
        return taken

    def phase(self) -> Phase:
        """Return the phase of the passes since the last call; idle ones have none."""
        seen = {PHASES.get(mode, "mixed") for mode in self.modes if mode != "IDLE"}
        self.modes.clear()
        return seen.pop() if len(seen) == 1 else "mixed"


log = logging.getLogger(__name__)

CLOSE_S = 15.0  # for what waits to be written

OWN: dict[str, Any] = {"reason": "of SGLang's own balancer"}  # figures of its maps
PLANNER = "rebalance.engines.sglang.planning:Planner"


class Rounds:
    """What one rank does at the end of each pass.

    Args:
        manager: the engine's EPLBManager.
        tap: counts the passes.
        group: a CPU group of all ranks that nothing else uses.
        joined: the run of this start, and the generation from which its maps count on.
        settings: of the plug-in.
        untried: why this release is observed first; "": it was tested.
    """

    def __init__(
        self,
        manager: Any,
        tap: PassTap,
        group: dist.ProcessGroup,
        joined: Joined,
        settings: PluginSettings,
        untried: str = "",
    ) -> None:
        self._manager, self._tap, self._group = manager, tap, group
        self._joined, self._settings, self._untried = joined, settings, untried
        self._every = settings.telemetry.window_steps  # passes from one round to the next
        self._rank = dist.get_rank()
        self._pass = self._window_begin = 0
        self._chunks: list[list[int]] = []  # rows still to be moved
        self._target: Any = None  # the engine's metadata that they are moved to
        self._move: engine.Move | None = None  # to that target
        self._planned: tuple[Planned, PlanQuestion | None] | None = None
        self._shape: Shape | None = None
        self.recorder: StoreProcess | None = None
        # The weights of the map that serves; None before the first plan.
        self._weights: IntArray | None = None
        self._checked = -1  # generation whose choices of replicas were compared
        self.checks: RankCheck | None = None
        self.kept: Kept | None = None  # records of all experts; on all ranks, or on none
        self._records: SlotRecords | None = None  # of the slots; on all ranks, or on none
        self._faulty: set[int] = set()  # rows whose slots could not be repaired
        self.stopped_moves = ""  # why no expert moves; alike on all ranks
        self.generation = joined.base_generation
        self.broken = (
            ""  # why a part of the plug-in failed on this rank; reported in the next round
        )
        self.stopped = ""  # why the plug-in does nothing any more
        self.is_left = False  # whether all ranks stopped in one round, so that SGLang goes on
        self.is_handed_back = False  # whether SGLang's own planner plans; alike on all ranks
        # [L, E] tokens since SGLang's own planner plans, or since its last map.
        self._tokens: torch.Tensor | None = None
        set_part("sglang", "policy", is_on=True)

    def pass_ended(self) -> None:
        """Do what is due after a pass; raises only what the engine's updater raises."""
        if self.stopped:
            return
        self._pass += 1
        with self._collective():
            if self._pass == 1:  # the server's warm-up: nothing has moved yet
                self._keep_records()
            if self._pass % self._every == 0:
                self._round()
        if self.stopped:
            return
        rows = self._chunks[0] if self._chunks else []
        if rows:
            assert self._move is not None, "it was made with the rows"
            self._move(rows)
        with self._collective():
            if self._chunks:
                self._after_move(rows)
            elif self.checks is not None:
                self.checks.visit(is_idle=self._tap.mode == "IDLE")

    def close(self) -> None:
        """End the background threads and processes."""
        if self.recorder is not None:
            self.recorder.close(CLOSE_S)
        if self.kept is not None:
            self.kept.close()

    @contextmanager
    def _collective(self) -> Iterator[None]:
        """Stop if a collective fails: another rank is gone, or stopped."""
        try:
            yield
        except Exception as exc:
            log.debug("collective", exc_info=True)
            self._stop(reason_of(exc))

    def _round(self) -> None:
        """Collectives are the same on all ranks: a rank reports a failure in the next one."""
        taken, ready = None, None
        if not self.broken:
            with self._reported():
                if self._shape is None:
                    self._begin_store()
                taken, ready = self._taken(), self._ready()
        why = "" if self._rank else self._why_engine_plans()
        num_faults = len(self._faulty) + (0 if self.checks is None else self.checks.num_wrong)
        size = 0 if ready is None else len(ready.record)
        word = torch.tensor([int(bool(self.broken)), size, int(bool(why)), num_faults])
        dist.all_reduce(word, group=self._group)
        num_broken, size, is_left, num_faults = word.tolist()
        if num_broken or taken is None:
            self.is_left = True
            self._stop(self.broken or "another rank failed")
            return
        self._hand_back(why, is_so=bool(is_left))
        is_moving = bool(self._chunks)
        if not is_moving:  # else counted under two maps
            dist.all_reduce(taken[0])
            self._check_map()
            if num_faults:
                self._mend()
        self._stop_moves(num_faults)
        record = self._distributed(ready, size) if size and not self.stopped_moves else b""
        with self._reported():
            if not is_moving:
                self._hand_over(*taken)
            self._ask_if_due()
        if record:
            self._begin(record, None if ready is None else ready.question)
        elif self.is_handed_back and not (is_moving or self.stopped_moves):
            self._begin_own(taken[0])

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except Exception as exc:
            log.debug("reported in the next round", exc_info=True)
            self.broken = self.broken or reason_of(exc)

    def _keep_records(self) -> None:
        """Offer each expert to the host cache; collective, whatever has failed on this rank."""

        def find() -> tuple[list[Tensors], IntArray]:
            weights = engine.expert_weights(self._manager._get_model())
            held = engine.metadata().physical_to_logical_map_cpu.numpy()
            return [weights[row] for row in sorted(weights)], held[sorted(weights)]

        self.kept = capture(find, self._group, self._settings, engine.model_name())
        set_part("sglang", "records", is_on=self.kept is not None)
        if self.kept is not None or self._settings.engine.mover:
            self._records = self._records_of(find, self.kept)

    def _records_of(
        self, find: Callable[[], tuple[list[Tensors], IntArray]], kept: Kept | None
    ) -> SlotRecords | None:
        """The slots by their bytes, as they are by the map that serves; collective."""
        try:
            weights, held = together(find, self._group)
            if kept is None:
                digests = digests_of_experts(held, digests_of_slots(weights, self._group))
            else:
                digests = kept.digests
        except MigrationError as exc:
            log.error("experts are not checked when they move: %s", exc)
            return None
        by_row = engine.expert_weights(self._manager._get_model())
        rows = sorted(by_row)
        return SlotRecords(lambda layer: by_row[rows[layer]], digests, held, self._group, kept)

    def _mend(self) -> None:
        """Repair the rows of which any rank knows a wrong slot; collective."""
        known = self._faulty | (set() if self.checks is None else self.checks.wrong_layers)
        ranks = gathered_large(sorted(known), self._group)
        rows = sorted({int(row) for rank in ranks for row in rank})
        self._restore_wrong(rows)
        if self.checks is not None:
            for row in rows:
                is_right = self._records is not None and row not in self._faulty
                self.checks.look_again(row, is_right=is_right)

    def _stop_moves(self, num_faults: int) -> None:
        """Begin no plan while any rank knows a fault."""
        reason = FAULTS_STOP_MOVES if num_faults else ""
        if self.recorder is not None:
            self.stopped_moves = report_stop(self.stopped_moves, reason, self.recorder.note)

    def _restore_wrong(self, rows: list[int]) -> None:
        """Give slots of rows that are wrong their bytes from other slots or records; collective."""
        assert self._shape is not None, "the model is known"
        for row in rows:
            if self._records is None:
                return
            records, layer = self._records, self._shape.rows.index(row)
            held = engine.metadata().physical_to_logical_map_cpu.numpy()[row].astype(np.int64)
            wrong: list[tuple[int, Tensors]] = []
            with self._reported():
                wrong = records.wrong(layer, records.wanted_slots(layer, held))
            wants = records.exchange_wants(layer, wrong)
            self._faulty.discard(row)
            if wants is None:
                continue
            live = records.experts_of_slots(layer)
            if records.verdict(layer, held, live) is Verdict.REPLACED:
                self._forget_records()
            elif records.bring(layer, wrong, wants, live):
                self._faulty.add(row)

    def _forget_records(self) -> None:
        """Use no digests and records of the load any more: old bytes would come back."""
        log.warning("kept records are not used any more: the weights were replaced")
        set_part("sglang", "records", is_on=False)
        self.kept = self._records = None
        self._faulty.clear()
        self.checks, self._checked = None, -1  # the next round begins it anew

    def _check_map(self) -> None:
        """Collective, once for each map."""
        assert self._shape is not None, "the model is known"
        if not self._settings.engine.check or self._checked == self.generation:
            return
        if self.checks is None:
            assert self.recorder is not None, "it was made with the shape"
            self.checks = RankCheck(
                "sglang",
                lambda own: gathered_large(own, self._group),
                self.recorder.note,
                engine.choices,
                is_shared=engine.counts_every_token_on_each_rank(),
            )
            self.checks.begin(lambda: engine.view_of(self._manager, self._rank))
            if self.kept is not None:
                self.checks.repair_from(self.kept)
        else:
            self.checks.after_map()
        self._checked = self.generation

    def _ready(self) -> PlannerAnswer | None:
        """The plan that is to begin now; one that waited until a switch was set never begins."""
        is_off = self._manager._rebalance_disabled_reason is not None
        if self.recorder is None or self._chunks or is_off:
            return None
        ready, why_kept = self.recorder.ready, self.recorder.why_kept
        if ready is None or not why_kept:
            return ready
        self.recorder.ready = None
        self.recorder.send(MoveOutcome(ready.question, error=f"the map is kept: {why_kept}"))
        return None

    @property
    def _is_due(self) -> bool:
        """Whether an interval of the engine has ended since the last round."""
        interval = self._manager._rebalance_num_iterations
        return bool(self._pass >= interval and self._pass % interval < self._every)

    def _why_engine_plans(self) -> str:
        num_failed = 0 if self.recorder is None else self.recorder.num_failed_plans
        settings, is_so = self._settings.engine, self.is_handed_back
        return why_engine_plans(self.recorder, num_failed, settings, is_so=is_so)

    def _hand_back(self, why: str, *, is_so: bool) -> None:
        """Have SGLang's own planner plan from now on, or not any more; the same on all ranks."""
        if is_so == self.is_handed_back:
            return
        self.is_handed_back, self._tokens = is_so, None
        say_who_plans("sglang", why, is_engine=is_so)
        if self._rank == 0 and self.recorder is not None:
            self.recorder.note(ENGINE_PLANS, {"reason": why if is_so else ""})

    def _begin_own(self, counts: torch.Tensor) -> None:
        """Count tokens for SGLang's own planner, and begin to move to its map where one is due.

        Args:
            counts: [L, S] of the window, of all ranks.
        """
        prepared = None
        with self._reported():
            assert self._shape is not None, "the model is known"
            held = engine.metadata().physical_to_logical_map.to(torch.int64)
            tokens = counts.new_zeros((len(held), self._shape.num_experts))
            tokens.scatter_add_(1, held, counts)
            self._tokens = tokens if self._tokens is None else self._tokens + tokens
        if not self._is_due or self._manager._rebalance_disabled_reason is not None:
            return
        with self._reported():
            if self._tokens is not None and self._tokens.any():
                target = engine.own_target(self._manager, self._tokens)
                wanted = target.physical_to_logical_map_cpu.numpy()
                move = engine.mover(self._manager, target)
                prepared = target, move, self._chunks_to(wanted)
        if self._begins_together(prepared is not None):
            assert prepared is not None, "all ranks have it"
            self._target, self._move, self._chunks = prepared
            self._tokens = None

    def _begins_together(self, can: bool) -> bool:
        """Whether all ranks can begin to move to a map; collective."""
        num_failed = torch.tensor([int(not can)])
        dist.all_reduce(num_failed, group=self._group)
        return not num_failed.item()

    def _ask_if_due(self) -> None:
        if self._rank or self.recorder is None or self._chunks or not self._is_due:
            return
        if self.recorder.ready is None and not self.recorder.is_asked:
            self.recorder.ask(PlanQuestion("interval"))

    def _begin_store(self) -> None:
        """Start the process at the store, once the model is known; that of rank 0 plans too."""
        shape = engine.shape_of(self._manager, self._rank)
        planning = {"planner": PLANNER, "terms": terms_of(shape, self._settings)}
        identity = identity_of(
            self._settings,
            self._joined,
            self._rank,
            shape.system.model(shape.rows, shape.num_experts),
            shape.system.topology(shape.num_slots),
            untried=self._untried,
            **{} if self._rank else planning,
        )
        self._shape, self.recorder = shape, StoreProcess("sglang", identity)
        self._note_placement("SGLang's map at the start")

    def _taken(self) -> tuple[torch.Tensor, int, Phase]:
        """Counts of the window, its first pass and its phase."""
        live = engine.metadata().physical_to_logical_map
        counts = self._tap.take(tuple(live.shape), live.device)
        first, self._window_begin = self._window_begin, self._pass
        return counts, first, self._tap.phase()

    def _hand_over(self, counts: torch.Tensor, first: int, phase: Phase) -> None:
        assert self._shape is not None, "no round counts before the model is known"
        if engine.counts_every_token_on_each_rank():
            counts //= self._shape.system.num_ranks
        host, copied = on_host(counts)
        held = engine.metadata().physical_to_logical_map_cpu.numpy().copy()
        weights = np.zeros_like(held) if self._weights is None else self._weights
        last, now = self._pass - 1, time.time()
        counted = Counted(host, copied, held, first, last, phase, self.generation, now)
        if self.recorder is not None:
            self.recorder.add(counted, self._shape.rows, self._shape.own)
            if self._rank == 0:
                self.recorder.add_window(counted, weights)

    def _distributed(self, ready: PlannerAnswer | None, size: int) -> bytes:
        """The bytes of rank 0's plan."""
        if ready is None:
            record = torch.empty(size, dtype=torch.uint8)
        else:
            assert self.recorder is not None, "the plan is from its process"
            self.recorder.ready = None
            record = torch.from_numpy(ready.record.copy())
        dist.broadcast(record, src=0, group=self._group)
        return record.numpy().tobytes()

    def _begin(self, record: bytes, question: PlanQuestion | None) -> None:
        """Begin to move to a plan, if all ranks can."""
        prepared = None
        with self._reported():
            try:
                prepared = self._prepared(record)
            except EplbError as exc:  # of the bytes, so on all ranks
                log.warning("plan refused: %s; the map that serves stays", exc)
        if self._begins_together(prepared is not None):
            assert prepared is not None, "all ranks have it"
            planned, self._target, self._move, self._chunks = prepared
            self._planned = (planned, question)
        elif self.recorder is not None and question is not None:
            self.recorder.send(MoveOutcome(question, error="the ranks could not take the plan"))

    def _prepared(self, record: bytes) -> tuple[Planned, Any, engine.Move, list[list[int]]]:
        """The plan, the engine's metadata for it, its mover, and rows to move in each pass."""
        assert self._shape is not None, "the plan is for this model"
        planned = answer_of(record)
        held = engine.metadata().physical_to_logical_map_cpu.numpy()
        check_plan(planned, held, self._shape)
        # Under ``static`` the engine's table has the weights, and its lists only say where an
        # expert is.
        times = np.minimum(planned.weights, 1) if planned.sources.size else planned.weights
        lists = replica_lists(planned.slot_to_expert, times, self._shape.num_experts)
        chosen = planned.sources[:, :, self._rank].copy() if planned.sources.size else None
        target = engine.metadata_for(planned.slot_to_expert, lists, chosen)
        move = engine.mover(self._manager, target)
        return planned, target, move, self._chunks_to(planned.slot_to_expert)

    def _chunks_to(self, wanted: IntArray) -> list[list[int]]:
        """Rows to move in each pass to a map [L, S]."""
        held = engine.metadata().physical_to_logical_map_cpu.numpy()
        changed = (wanted != held).any(axis=1)
        chunks = self._manager._compute_update_layer_ids_chunks()
        kept = [[row for row in chunk if changed[row]] for chunk in chunks]
        # Without a move there is still a pass that installs lists or tables.
        return [chunk for chunk in kept if chunk] or [[]]

    def _after_move(self, rows: list[int]) -> None:
        self._restore_wrong(rows)
        del self._chunks[0]
        if not self._chunks:
            with self._reported():
                self._moved()

    def _moved(self) -> None:
        assert self._shape is not None, "the plan is for this model"
        # Rows without a move too: their replicas may have other weights.
        engine.metadata().update(self._target, update_layer_ids=self._shape.rows)
        engine.forget_records()
        self._tap.counts = None
        self._tap.modes.clear()
        self._window_begin = self._pass
        self.generation += 1
        planned, self._target, self._planned = self._planned, None, None
        self._weights = None if planned is None else planned[0].weights
        figures = OWN if planned is None else planned[0].figures
        log.info("generation=%d %s", self.generation, figures)
        self._note_placement(str(figures["reason"]), planned)

    def _note_placement(
        self, reason: str, plan: tuple[Planned, PlanQuestion | None] | None = None
    ) -> None:
        if self.recorder is None or self._rank or self._shape is None:
            return
        held = engine.metadata().physical_to_logical_map_cpu.numpy()[self._shape.rows]
        rows, experts, generation = self._shape.rows, self._shape.num_experts, self.generation
        change = MapChange(held.astype(np.int32), None, experts, generation, reason)
        if plan is not None:
            planned, question = plan
            share = shares_of(held, planned.weights[rows])
            change = replace(change, share=share, question=question, figures=planned.figures)
        self.recorder.send(change)

    def _stop(self, reason: str) -> None:
        self.stopped = reason
        set_part("sglang", "plugin", is_on=False)
        goes_on = "SGLang's own balancer goes on" if self.is_left else "the map that serves stays"
        log.warning("plug-in stopped: %s; %s", reason, goes_on)
        if self.recorder is not None:
            self.recorder.close_soon()
