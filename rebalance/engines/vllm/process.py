"""The plug-in in one process of vLLM: what is on, and what each hook does.

No method that vLLM's serving path calls raises: a part that fails is switched off with a line in
the log and in the gauge, and vLLM goes on as without it. Where no plan can be made, or the store is
gone for long, all ranks leave planning to vLLM's own balancer until that has changed.

Shapes:  L MoE layers, E experts, P physical experts.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from eplb.core.load import Phase
from eplb.errors import MigrationError, RankError
from rebalance.engines.common.fsck.check import DeviceMaps, EngineView
from rebalance.engines.common.fsck.rank_check import RankCheck, report_stop
from rebalance.engines.common.messages import MapChange, MoveOutcome, PlanQuestion
from rebalance.engines.common.planning import System
from rebalance.engines.common.plugin_settings import PluginSettings
from rebalance.engines.common.records import (
    Kept,
    capture,
    digests_of_experts,
    digests_of_slots,
    num_differing,
)
from rebalance.engines.common.slot_records import SlotRecords, Verdict
from rebalance.engines.common.start import (
    EngineGroup,
    Joined,
    facts_of,
    group_of,
    join,
    say_who_plans,
    set_part,
)
from rebalance.engines.common.store_process import StoreProcess, identity_of, why_engine_plans
from rebalance.engines.common.tap import IntArray
from rebalance.engines.vllm.conform import experts_of, read_of
from rebalance.engines.vllm.decisions import (
    ENTRIES,
    MapDecision,
    ServedMap,
    next_served,
    planned,
    shares_by,
)
from rebalance.engines.vllm.mover import TransferCheck
from rebalance.engines.vllm.reload import find_loaded, serve_start
from rebalance.engines.vllm.tap import LoadTap, watch_phases
from rebalance.weights.expert_records import Tensors, num_bytes_of, rows_of, together
from runtime.group import gathered_large
from telemetry.state.events import ENGINE_PLANS

PARTS = ("policy", "shares", "mover", "tap")
DRAFT = "draft"  # what vLLM's configuration of a draft model has as its kind of runner
NEVER_SERVED = "its map was replaced before it served on all layers"
SEED = 1  # of the load of the first plan, which only compiles

log = logging.getLogger(__name__)


class PluginProcess:
    """State of the plug-in; ``hooks`` calls its methods from vLLM's functions."""

    def __init__(self, settings: PluginSettings, untried: str = "") -> None:
        self.settings = settings
        self._untried = untried  # why this release is observed first; "": it was tested
        self.group: Any = None  # vLLM's coordinator of the ranks that balance
        self.system = System(1, 1, 1, 0)  # ranks, and the experts of the target model
        self.phase: Phase = "mixed" if settings.engine.phase == "auto" else settings.engine.phase
        self.recorder: StoreProcess | None = None
        self.checks: RankCheck | None = None  # of the slots of the target model
        self.kept: Kept | None = None  # records of the target model
        self.generation = 0  # generation of the map that serves on all layers, alike on all ranks
        self.refused = ""  # why the plug-in stays off in this process
        self.stopped = ""  # why no expert moves; alike on all ranks
        # A tensor that vLLM does not move with its expert: then experts stay. Alike on all ranks.
        self.left_behind = ""
        self._joined: Joined | None = None
        self._tap: LoadTap | None = None
        self._served: list[ServedMap] = []
        self._num_added = 0  # models, whether they could be taken over or not
        self._is_check_due = False  # for weights that were replaced; alike on all ranks
        self._target: ServedMap | None = None  # among them: not the draft model
        self._asked_last: ServedMap | None = None  # among them, by vLLM's policy
        self._has_changed = False
        # What asked for the plan whose map does not serve yet, and the plan's figures.
        self._moving: tuple[PlanQuestion, dict[str, Any]] | None = None
        self.num_failed_plans = 0  # in a row, on rank 0
        self.is_handed_back = False  # whether vLLM's own policy plans; alike on all ranks
        self._on = dict.fromkeys(PARTS, False)
        for part in (*PARTS, "placement", "records"):
            set_part("vllm", part, is_on=False)

    def is_on(self, part: str) -> bool:
        """Whether a part works. All but the tap are on on every rank of the group, or on none."""
        return self._on[part]

    def _switch(self, part: str, *, is_on: bool) -> None:
        self._on[part] = is_on
        set_part("vllm", part, is_on=is_on)

    @property
    def why_kept(self) -> str:
        """Why rank 0 keeps the map that serves, whatever it plans; "": its plans move experts."""
        return self.stopped or (self._untried if self.recorder is None else self.recorder.why_kept)

    @property
    def num_faults(self) -> int:
        """Slots, factors and layers of this rank that are known to be wrong."""
        check = None if self._target is None else self._target.check
        of_transfers = 0 if check is None else len(check.faulty) + check.is_replaced
        of_check = self._is_check_due if self.checks is None else self.checks.num_wrong
        return of_transfers + int(of_check)

    def stop_moves(self, reason: str) -> None:
        """Keep the map that serves while there is a reason, alike on all ranks; "": go on."""
        self.stopped = report_stop(self.stopped, reason, self._note)

    def before_add_model(self, state: Any, model: Any, group: Any) -> None:
        """Join the other ranks at the first model; collective by the ranks' key-value store."""
        self._num_added += 1
        if self._joined is not None or self.refused:
            return
        engine = self.settings.engine
        try:
            if state.parallel_config.enable_elastic_ep:
                raise RankError(
                    "enable_elastic_ep is set, expected a fixed number of ranks: the plug-in was "
                    "not tested with elastic expert parallelism"
                )
            self._joined = join(
                "vllm",
                dist.distributed_c10d._get_default_store(),
                "-".join(map(str, (group.ranks[0], group.ranks[-1], group.world_size))),
                group.rank_in_group,
                group.world_size,
                group=group_among(state.parallel_config, group.ranks[0], group.world_size),
                facts=facts_of("vllm", self.settings),
                deadline_s=engine.load_deadline_s,
            )
        except Exception as exc:
            self.refused = str(exc)
            log.error("the EPLB plug-in stays off, vLLM's own balancer runs: %s", exc)
            return
        self.group, self.generation = group, self._joined.base_generation
        wanted = (engine.plan, engine.plan and engine.shares, engine.mover, engine.tap)
        for part, is_on in zip(PARTS, wanted, strict=True):
            self._switch(part, is_on=is_on)

    def after_add_model(self, state: Any, model_config: Any, num_nodes: int) -> None:
        """Take over the model that was added last.

        vLLM adds a draft model before its target. Both are planned for; the tap, the numbers of
        maps, the placement check and the kept records are of the target alone.
        """
        if self._joined is None:
            return
        is_draft = getattr(model_config, "runner_type", "") == DRAFT
        if is_draft:
            log.info("draft model: planned for, its loads and its slots are not reported")
        try:
            self._take_over(state, num_nodes, is_draft=is_draft)
        except Exception:
            log.exception("the EPLB plug-in could not take over the model")
            self._switch("tap", is_on=False)
        if not is_draft and self.settings.engine.check:
            self._begin_check()
        if self.is_on("mover"):
            if not is_draft:
                self._keep_records(model_config)
            self._check_transfers(None if is_draft else self.kept)
        if not is_draft and self.checks is not None and self.kept is not None:
            self.checks.repair_from(self.kept)

    def _note(self, event: str, detail: dict[str, Any]) -> None:
        if self.recorder is not None:
            self.recorder.note(event, detail)

    def _take_over(self, state: Any, num_nodes: int, *, is_draft: bool) -> None:
        model_state = list(state.model_states.values())[-1]
        held = model_state.physical_to_logical_map.cpu().numpy().astype(np.int64)
        served = ServedMap(model_state, held.copy(), np.zeros_like(held))
        self._served.append(served)
        if model_state.logical_to_physical_map.shape[-1] < ENTRIES:
            self._switch("shares", is_on=False)  # alike on all ranks: the model is
        if is_draft:
            return
        self._target, model, size = served, served.model, self.group.world_size
        expert_bytes = num_bytes_of(rows_of(model.expert_weights[0], 0))
        nodes = num_nodes if size % num_nodes == 0 else 1
        self.system = System(size, nodes, model.num_expert_groups, expert_bytes)
        if self.is_on("policy") and not self.group.rank_in_group:
            self._compile_planner(served.serving, served.num_experts)
        if self.is_on("tap"):
            self._start_tap(served)

    def _compile_planner(self, serving: IntArray, num_experts: int) -> None:
        """Make plans that nobody uses: the first one compiles, for seconds."""
        load = np.random.default_rng(SEED).integers(1, 1000, (serving.shape[1], num_experts))
        try:
            for is_first in (True, False):
                planned(load, serving, self.system, self.settings, is_first=is_first)
        except Exception as exc:  # each plan that vLLM asks for will say so, and count
            log.warning("a first plan cannot be made: %s: %s", type(exc).__name__, exc)

    def _start_tap(self, served: ServedMap) -> None:
        assert self._joined is not None, "the ranks have joined"
        layers, (num_layers, num_slots) = served.model.moe_layers, served.held.shape
        top_k = int(getattr(experts_of(layers[0]), "top_k", 1) or 1) if layers else 1
        settings, rank = self.settings, self.group.rank_in_group
        shape = self.system.model(layer_numbers(layers, num_layers), served.num_experts, top_k)
        topology = self.system.topology(num_slots)
        identity = identity_of(settings, self._joined, rank, shape, topology, untried=self._untried)
        self.recorder = StoreProcess("vllm", identity)
        self._tap = LoadTap(
            num_layers,
            served.num_experts,
            served.model_state.expert_load_pass.device,
            settings.telemetry.sample_steps,
        )
        self._offer_map()
        if settings.engine.phase == "auto":
            watch_phases(self._note_phase)

    def _note_phase(self, phase: Phase) -> None:
        self.phase = phase

    def _taken_over(self) -> ServedMap:
        if self._target is None:
            raise RankError("the model was not taken over")
        return self._target

    def _keep_records(self, model_config: Any) -> None:
        """Capture the experts of the target; collective, whatever has failed on this rank."""

        def find() -> tuple[list[Tensors], IntArray]:
            target = self._taken_over()
            return list(target.model.expert_weights), target.held

        model = f"vllm {version('vllm')} {model_config.model} {model_config.compute_hash()}"
        self.kept = capture(find, self.group.cpu_group, self.settings, model)
        set_part("vllm", "records", is_on=self.kept is not None)

    def _check_transfers(self, kept: Kept | None) -> None:
        """Check what vLLM moves of the model that was added last; collective, as above."""

        def find() -> ServedMap:
            if len(self._served) != self._num_added:
                raise RankError("the model was not taken over")
            return self._served[-1]

        try:
            served = together(find, self.group.cpu_group)
            served.check = self._new_check(served, kept)
        except MigrationError as exc:
            log.error("experts are not checked on their way: %s", exc)
            self._switch("mover", is_on=False)

    def _new_check(self, served: ServedMap, kept: Kept | None) -> TransferCheck:
        """With the digests of the load; collective.

        Raises:
            MigrationError: a rank cannot read its weights; on all ranks alike.
        """
        weights, group = served.model.expert_weights, self.group.cpu_group
        if kept is not None:
            digests = kept.digests
        else:
            digests = digests_of_experts(served.held, digests_of_slots(list(weights), group))
        records = SlotRecords(lambda layer: weights[layer], digests, served.start, group, kept)
        return TransferCheck(records)

    def check_of(self, communicator: Any) -> TransferCheck | None:
        """The check of the model that vLLM moves by a communicator."""
        found = (one for one in self._served if one.model_state.communicator is communicator)
        served = next(found, None)
        return None if served is None or not self.is_on("mover") else served.check

    def keeps_map(self, model_state: Any, layer: int) -> bool:
        """Whether a layer keeps its map at this commit; asked once for each commit."""
        served = self._of(model_state)
        if served is None or served.check is None or layer not in served.check.keeping:
            return False
        served.check.keeping.discard(layer)
        return True

    def kept_row(self, model_state: Any, layer: int) -> torch.Tensor:
        """[P] the map that a layer serves."""
        served = self._of(model_state)
        assert served is not None, "a layer of a model that was taken over"
        return torch.from_numpy(served.held[layer].copy())

    def mend(self, served: ServedMap | None, held: IntArray) -> IntArray | None:
        """Repair what is wrong on any rank; collective, before a decision.

        Args:
            served: the model that the decision is for.
            held: [L, P] the map that serves.

        Returns:
            The map that is to serve instead; None: the one that serves stays.
        """
        target = self._target
        if target is None or target.check is None or served is not target:
            return None  # a draft model's decision
        if self._is_check_due:
            self._is_check_due = False
            self._begin_check()
        wanted = held.copy()
        if target.check.is_replaced:
            self._take_replaced(target, wanted)
            return None if np.array_equal(wanted, held) else wanted
        check, checks = target.check, self.checks
        own = {
            "layers": sorted(check.faulty | set(() if checks is None else checks.wrong_layers)),
            "left behind": "" if checks is None else checks.left_behind,
        }
        ranks = gathered_large(own, self.group.cpu_group)
        named = [str(rank["left behind"]) for rank in ranks if rank["left behind"]]
        self.left_behind = self.left_behind or next(iter(named), "")
        check.relabelled.clear()
        if self.left_behind:
            wanted[:] = target.start
        layers = {int(layer) for rank in ranks for layer in rank["layers"]}
        verdicts = {
            self._mend_layer(check, layer, held[layer], wanted[layer]) for layer in sorted(layers)
        }
        if not verdicts <= {Verdict.RIGHT, Verdict.DAMAGED}:  # other layers were loaded again too
            for layer in sorted(set(range(len(held))) - layers):
                self._mend_layer(check, layer, held[layer], wanted[layer])
        return None if np.array_equal(wanted, held) else wanted

    def _mend_layer(
        self, check: TransferCheck, layer: int, held: IntArray, wanted: IntArray
    ) -> Verdict:
        """Repair the slots of a layer, or set the row that is to serve; collective.

        Returns:
            What its slots were.
        """
        records = check.records
        live = records.experts_of_slots(layer)
        verdict = records.verdict(layer, held, live)
        if verdict is Verdict.REPLACED:
            check.is_replaced = True
        elif verdict is Verdict.OF_START:  # a reload: no byte has to move
            check.relabelled.add(layer)
            wanted[:] = records.start[layer]
            log.warning("layer %d: %s, which serves again", layer, verdict.value)
        is_right = verdict in (Verdict.RIGHT, Verdict.OF_START)
        if verdict is Verdict.DAMAGED:
            wrong = records.wrong(layer, records.wanted_slots(layer, held))
            wants = records.exchange_wants(layer, wrong)
            is_right = wants is None or not records.bring(layer, wrong, wants, live)
        if is_right:
            check.faulty.discard(layer)
        if self.checks is not None:  # a fault is over once its slot was looked at again
            self.checks.look_again(layer, is_right=is_right)
        return verdict

    def _take_replaced(self, target: ServedMap, wanted: IntArray) -> None:
        """Take the weights that have replaced those of the load; collective.

        A reload may have put them where the start's map has their experts (vLLM issue 55228): then
        replicas are alike by that map alone, and it is ``wanted`` again.
        """
        assert target.check is not None, "it has found the weights replaced"
        held, start = wanted.copy(), target.start
        slots = digests_of_slots(list(target.model.expert_weights), self.group.cpu_group)
        if num_differing(held, slots) and not num_differing(start, slots):
            wanted[:] = start
        log.warning("the weights were replaced: their experts are known by new digests")
        if self.kept is not None:
            log.warning("kept records are not used any more: the weights were replaced")
            set_part("vllm", "records", is_on=False)
        self.kept, self.checks, self._is_check_due = None, None, self.settings.engine.check
        weights, group = target.model.expert_weights, self.group.cpu_group
        digests = digests_of_experts(wanted, slots)
        records = SlotRecords(lambda layer: weights[layer], digests, start, group, None)
        target.check = TransferCheck(records)
        target.check.relabelled |= set(np.flatnonzero((wanted != held).any(axis=1)).tolist())

    def _begin_check(self) -> None:
        """Agree on the digests of all slots; collective, whatever has failed on this rank."""
        group = self.group

        def make_view() -> EngineView:
            target = self._taken_over()
            return EngineView(
                range(len(target.held)),
                lambda row: (target.model.moe_layers[row], list(target.model.expert_weights[row])),
                # Commits keep it current: vLLM's own map is on the device, and no step waits.
                lambda row: target.held[row],
                group.rank_in_group,
                group.world_size,
                lambda row: read_of(experts_of(target.model.moe_layers[row])),
                lambda row: DeviceMaps(
                    target.model_state.physical_to_logical_map[row],
                    target.model_state.logical_to_physical_map[row],
                    target.model_state.logical_replica_count[row],
                    np.maximum(target.repeats[row], 1),
                ),
            )

        checks = RankCheck("vllm", lambda own: gathered_large(own, group.cpu_group), self._note)
        try:
            checks.begin(make_view)
        except Exception:  # of the collective
            log.exception("placement check is off")
        self.checks = checks

    def before_step(self, state: Any, is_dummy: bool, is_profile: bool, log_stats: bool) -> None:
        """Count the pass that ended, before vLLM clears its figures."""
        if self._tap is None or self._target is None or is_profile or not self._on["tap"]:
            return
        try:
            model_state = self._target.model_state
            load = model_state.expert_load_pass
            phase = None if is_dummy else self.phase
            held = model_state.physical_to_logical_map
            assert self.recorder is not None, "a tap has a recorder"
            for counted in self._tap.add(load, held, phase, self.generation):
                self.recorder.add(counted)
            if not state._should_record_current_step(log_stats=log_stats):
                for each in state.model_states.values():
                    each.expert_load_pass.zero_()  # vLLM did not ask for this pass
        except Exception:
            log.exception("the tap of loads is switched off")
            self._switch("tap", is_on=False)

    def after_step(self, state: Any, is_dummy: bool, is_profile: bool) -> None:
        """Have the next pass recorded too, whether vLLM asks for it or not; look at a slot."""
        if self._tap is not None and self._on["tap"] and state.should_record_tensor is not None:
            state.should_record_tensor.fill_(True)
        if self.checks is not None and not is_profile:
            self.checks.visit(is_idle=is_dummy)

    def is_served(self, model_state: Any, row: IntArray, layer: int) -> bool:
        """Whether a layer has this row [P] and its lists already, so that a commit is idle."""
        served = self._of(model_state)
        if served is None or not np.array_equal(served.held[layer], row):
            return False
        decision = self._decision(served, row, layer)
        repeats = np.zeros_like(row) if decision is None else decision.repeats[layer]
        return np.array_equal(repeats, served.repeats[layer])

    def committed(self, model_state: Any, row: IntArray, layer: int) -> None:
        """Write the lists of a layer whose map vLLM has just committed."""
        served = self._of(model_state)
        if served is None:
            return
        served.held[layer], served.repeats[layer] = row, 0
        if (decided := served.decision_of_layer(row, layer)) is not None:
            served.is_planned = decided.is_planned
        decision = self._decision(served, row, layer)
        if decision is None or not decision.repeats[layer].any():
            return
        table = model_state.logical_to_physical_map[layer]
        experts, entries = map(torch.from_numpy, decision.lists_of(layer))
        experts, width = experts.to(table.device), entries.shape[1]
        # Entries before lengths: between the two writes every list holds replicas of its expert.
        table[:, :width].index_copy_(0, experts, entries.to(table))
        model_state.logical_replica_count[layer].index_fill_(0, experts, width)
        served.repeats[layer] = decision.repeats[layer]

    def _decision(self, served: ServedMap, row: IntArray, layer: int) -> MapDecision | None:
        """The decision with the shares of a row; None: they are even."""
        if not self.is_on("shares"):
            return None
        return served.decision_of_layer(row, layer)

    def model_of(self, held: IntArray) -> ServedMap | None:
        """The model that vLLM's policy is called for; each call of the policy asks once."""
        served = next_served(self._served, held, self._asked_last)
        self._asked_last = served or self._asked_last
        return served

    def layer_changed(self, model_state: Any) -> None:
        """Note that some layer of a map has changed."""
        self._has_changed |= self._is_target(model_state)

    def map_ended(self, model_state: Any) -> None:
        """Note that the last layer of a map serves: with any change it is a new generation."""
        if self._has_changed and self._is_target(model_state):
            self.generation += 1
            self._has_changed = False
            self._offer_map()

    def find_loaded(self, model: Any) -> dict[ServedMap, list[int]]:
        """Find the layers that vLLM loads again, by the model whose loading ends."""
        return find_loaded(self._served, model)

    def serve_loaded(self, loaded: Mapping[ServedMap, list[int]]) -> None:
        """Have layers that were loaded again serve by the map that they were loaded by."""
        for served, layers in loaded.items():
            serve_start(served, layers)
            self.map_ended(served.model_state)

    def _of(self, model_state: Any) -> ServedMap | None:
        return next((one for one in self._served if one.model_state is model_state), None)

    def _is_target(self, model_state: Any) -> bool:
        return self._target is not None and self._target.model_state is model_state

    def _offer_map(self) -> None:
        served = self._target
        if self.recorder is None or served is None or self.group.rank_in_group:
            return
        held, num_experts = served.held.astype(np.int32), served.num_experts
        share = shares_by(served.held, served.repeats)
        moving, self._moving = self._moving, None
        question, figures = moving or (None, {})
        assert self._joined is not None, "the ranks have joined"
        is_first = self.generation == self._joined.base_generation
        unplanned = "vLLM's map at the start" if is_first else "of vLLM's own balancer"
        reason = str(figures.get("reason", unplanned))
        self.recorder.send(
            MapChange(held, share, num_experts, self.generation, reason, question, figures)
        )

    def asked(self, served: ServedMap | None) -> PlanQuestion:
        """Why rank 0 plans for a model now: a task that waits, or vLLM's interval."""
        recorder = self.recorder
        if recorder is None or served is not self._target:
            return PlanQuestion("interval")  # a draft model's plans answer no task
        if self._moving is not None:
            question, self._moving = self._moving[0], None
            self.answer(served, MoveOutcome(question, error=NEVER_SERVED))
        return recorder.questions.popleft() if recorder.questions else PlanQuestion("interval")

    def answer(self, served: ServedMap | None, outcome: MoveOutcome) -> None:
        """Report on rank 0 what came of a question: the plan, or why there is none."""
        if self.recorder is None or served is not self._target:
            return  # the store has no maps of a draft model
        if outcome.is_begun:
            self._moving = outcome.question, outcome.figures
        self.recorder.send(outcome)

    @property
    def why_engine_plans(self) -> str:
        """Why vLLM's own policy has to plan, as rank 0 knows it; "" on other ranks."""
        if self.group.rank_in_group:
            return ""
        failed, settings = self.num_failed_plans, self.settings.engine
        return why_engine_plans(self.recorder, failed, settings, is_so=self.is_handed_back)

    def hand_back(self, why: str, *, is_so: bool) -> None:
        """Have vLLM's own policy plan from now on, or not any more; the same on all ranks.

        Args:
            why: as rank 0 knows it; "" on other ranks.
            is_so: what all ranks have agreed on.
        """
        if is_so == self.is_handed_back:
            return
        self.is_handed_back = is_so
        say_who_plans("vllm", why, is_engine=is_so)
        if self.group.rank_in_group == 0:
            self._note(ENGINE_PLANS, {"reason": why if is_so else ""})


def group_among(parallel: Any, first: int, size: int) -> EngineGroup:
    """The EP group among those of vLLM, whose ranks are ExternalDP x DP x PP x PCP x TP.

    Args:
        parallel: vLLM's configuration.
        first: the first rank of the group, among all of vLLM's.
        size: of the group, which has the ranks of DP, PCP and TP.
    """
    from vllm.distributed.parallel_state import get_pp_group

    stages = int(getattr(parallel, "pipeline_parallel_size", 1))
    stage = int(get_pp_group().rank_in_group) if stages > 1 else 0
    each = size * stages
    replica = first // each, dist.get_world_size() // each
    return group_of(os.environ, dp=replica, pp=(stage, stages))


def layer_numbers(layers: Any, num_layers: int) -> tuple[int, ...]:
    """The model's numbers of its MoE layers by their names; 0, 1, 2, ... where names have none."""
    found = []
    for layer in layers:
        parts = str(getattr(layer, "layer_name", "")).split(".")
        found += [int(part) for part in parts if part.isdecimal()][:1]
    is_usable = len(found) == num_layers and len(set(found)) == num_layers
    return tuple(found) if is_usable else tuple(range(num_layers))
