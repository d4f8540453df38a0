"""Operations on ranks: what each holds, what its loss would leave, and which takes no experts.

Cordons are the live setting ``cordons``, so their revision is that of all live settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from api.http.problems import ProblemType, Refused
from api.operations.declaration import (
    V1,
    Answer,
    Ask,
    Call,
    LiveAnswer,
    ReasonRequest,
    command,
    operation,
)
from api.operations.placements import shape_of_run
from api.operations.printing import line, listing
from eplb.declared import Meaning

if TYPE_CHECKING:
    from eplb.core.model import ModelShape
    from eplb.core.topology import Topology
    from eplb.fitting import Cordon
    from telemetry.state.live import LiveState
    from telemetry.state.placements import CommittedPlacement
    from telemetry.state.store import StateStore

MOST_RANK = 999_999
MOST_LOST, MOST_UNCOVERED = 4096, 1000  # characters; experts
OF_CORDONS = (ProblemType.NO_SUCH_RANK, ProblemType.NO_RUN, ProblemType.IMPOSSIBLE_CORDON)
MOST_TRIES = 8  # against other changes of live settings, where the request names no revision
RankState = Literal["open", "cordoned", "draining", "drained"]
Rank = Annotated[int, Meaning("number of the rank", at_least=0, at_most=MOST_RANK, example=3)]


@dataclass(frozen=True)
class RankLine:
    """One rank, by the placement that ranks serve."""

    rank: int
    node: int
    host: int
    failure_domain: int
    state: Annotated[
        RankState, Meaning("open: takes experts; draining: holds experts that are to leave")
    ]
    experts: Annotated[int, Meaning("slots of all layers that hold an expert")]
    sole_experts: Annotated[int, Meaning("experts of all layers that no other rank holds")]


@dataclass(frozen=True)
class RanksAnswer(LiveAnswer):
    """All ranks of the current run, with their cordons."""

    ranks: list[RankLine]
    waits: Annotated[
        str, Meaning("why draining ranks keep their experts now; empty: plans move them")
    ]


@operation(f"GET {V1}/ranks", problems=(ProblemType.NO_RUN,))
def ranks(call: Call) -> RanksAnswer:
    """Ranks. Node, state and experts of each rank; the `ETag` is for changes."""
    return _answer(call, call.store.live())


def show_reports(found: list[dict[str, Any]]) -> None:
    """Print what ranks do beside what they hold."""
    listing(
        (one | {"alive": "yes" if one["is_alive"] else "no"} for one in found),
        "rank node alive step generation phase age_s step_ms wait_ms state experts sole_experts "
        "frozen",
    )


@command("ranks", "eplb ranks --store redis://HOST:PORT --deployment prod", show=show_reports)
def ask_for_ranks(ask: Ask) -> Answer:
    """Show each rank: step, phase, age of its report, whether it takes experts, what it holds."""
    from api.operations.watching import state

    seen = ask(state).body
    held = ask(ranks).body["ranks"] if seen["run"] is not None else []
    return Answer(200, [rank | here for rank, here in zip(seen["ranks"], held, strict=True)])


# -- what the loss of ranks would leave


@dataclass(frozen=True)
class UncoveredExpert:
    """An expert that no rank would hold."""

    layer: Annotated[int, Meaning("the model's layer number")]
    expert: int


@dataclass(frozen=True)
class LossAnswer:
    """What the loss of ranks would leave, by the placement that ranks serve."""

    lost: list[int]
    is_feasible: Annotated[bool, Meaning("whether the other ranks have a slot for each expert")]
    spare_slots: Annotated[
        int,
        Meaning(
            "slots of the other ranks in each layer, beyond one for each expert; negative: so many "
            "experts of each layer would have none"
        ),
    ]
    uncovered: Annotated[
        int,
        Meaning(
            "experts of all layers that no other rank holds: no rank computes their tokens until "
            "their weights are read again"
        ),
    ]
    uncovered_experts: Annotated[
        list[UncoveredExpert], Meaning(f"by layer and expert, at most {MOST_UNCOVERED}")
    ]
    refills: Annotated[
        int, Meaning("experts that survivors load before they serve on; 0 where it is not feasible")
    ]
    refill_bytes: Annotated[int, Meaning("bytes of these", unit="bytes")]
    refill_s: Annotated[
        float,
        Meaning(
            "time until the rank with most of them has loaded them, at `planner.bytes_per_s`",
            unit="s",
        ),
    ]
    imbalance: Annotated[
        float | None,
        Meaning(
            "mean over layers once survivors serve on, by the latest load window; null: it is not "
            "feasible, or there is no window"
        ),
    ]


@operation(
    f"GET {V1}/membership/feasibility", problems=(ProblemType.NO_RUN, ProblemType.NO_SUCH_RANK)
)
def feasibility(
    call: Call,
    lose: Annotated[
        str,
        Meaning(
            "numbers of ranks",
            pattern=r"^\d{1,6}(,\d{1,6})*$",
            max_length=MOST_LOST,
            example="3,5",
        ),
    ],
) -> LossAnswer:
    """What the loss of ranks would leave. Whether the ranks that are left could hold every expert,
    which have no other replica, and what it takes to serve on.
    """
    from eplb.core.cost import CostModel
    from eplb.core.placement import uncovered_experts
    from eplb.errors import PlacementError
    from eplb.measure import imbalance
    from eplb.migration.survivors import survive

    model, topology = shape_of_run(call.store)
    lost = sorted({int(rank) for rank in lose.split(",")})
    _check_rank(lost[-1], topology)
    committed = _committed(call.store)
    is_left = topology.serving.copy()
    is_left[lost] = False
    spare = int(topology.usable_slots[is_left].sum()) - model.num_experts
    uncovered = uncovered_experts(committed.placement, topology, is_left)
    shown = [
        UncoveredExpert(model.layer_ids[layer], expert)
        for layer, expert in uncovered[:MOST_UNCOVERED]
    ]
    refills, refill_s, balance = 0, 0.0, None
    try:
        found = survive(committed.placement, topology, lost)
    except PlacementError:
        assert spare < 0 or not is_left.any(), "ranks with a slot for each expert serve on"
    else:
        refills = len(found.refills)
        most = max(len(found.refills_of(rank)) for rank in range(topology.num_ranks))
        rate = float(call.store.live().text("bytes_per_s") or CostModel.bytes_per_s)
        refill_s = round(most * model.expert_bytes / rate, 4)
        call.service.reader.reading()
        if windows := call.service.monitor.windows(1):
            per_layer = imbalance(windows[-1].tokens, found.target, found.topology)
            balance = round(float(per_layer.mean()), 4)
    size = refills * model.expert_bytes
    return LossAnswer(
        lost, spare >= 0, spare, len(uncovered), shown, refills, size, refill_s, balance
    )


def _check_rank(rank: int, topology: Topology) -> None:
    if rank >= topology.num_ranks:
        why = f"there is no rank {rank}, expected 0..{topology.num_ranks - 1}"
        raise Refused(ProblemType.NO_SUCH_RANK, why)


def _committed(store: StateStore) -> CommittedPlacement:
    found = store.committed()
    if found is None:
        raise Refused(ProblemType.NO_RUN, "no placement was committed yet, expected one")
    return found


# -- cordons


@operation(f"POST {V1}/ranks/{{rank}}/cordon", problems=OF_CORDONS, if_match="revision")
def cordon(call: Call, rank: Rank, body: ReasonRequest) -> RanksAnswer:
    """Place no further expert on a rank. The rank keeps what it holds and takes nothing new, from
    the next plan on.
    """
    return _change(call, rank, "cordon", body.reason)


@operation(f"POST {V1}/ranks/{{rank}}/drain", problems=OF_CORDONS, if_match="revision")
def drain(call: Call, rank: Rank, body: ReasonRequest) -> RanksAnswer:
    """Move every expert off a rank. The next plan moves every expert off the rank, whatever that
    costs in balance.
    """
    return _change(call, rank, "drain", body.reason)


@operation(f"POST {V1}/ranks/{{rank}}/uncordon", problems=OF_CORDONS, if_match="revision")
def uncordon(call: Call, rank: Rank, body: ReasonRequest) -> RanksAnswer:
    """Let a rank take experts again. Plans bring experts where they gain."""
    return _change(call, rank, None, body.reason)


def _change(call: Call, rank: int, new: str | None, reason: str) -> RanksAnswer:
    from eplb.errors import StaleRevision
    from eplb.fitting import Cordon
    from rebalance.controller.plans.planner_request import read_cordons, written_cordons

    store, expected = call.store, call.expected_revision()
    model, topology = shape_of_run(store)
    for _ in range(MOST_TRIES):
        state = store.live()
        cordons = read_cordons(state.text("cordons"))
        if new is None:  # a cordon may outlive its rank: it can be removed all the same
            cordons.pop(rank, None)
        else:
            cordons[rank] = Cordon(new)
            _check_possible(store, rank, cordons, model, topology)
        revision = state.revision if expected is None else expected
        changes = {"cordons": written_cordons(cordons)}
        try:
            changed = store.change_live(
                changes, expected=revision, reason=reason, by=call.actor.name
            )
        except StaleRevision as exc:
            why = exc
            if expected is not None:
                break
        else:
            return _answer(call, changed)
    raise Refused(ProblemType.SETTINGS_CHANGED, str(why)) from why


def _check_possible(
    store: StateStore, rank: int, cordons: dict[int, Cordon], model: ModelShape, topology: Topology
) -> None:
    from eplb.fitting import fitting_cordons

    _check_rank(rank, topology)
    serving = _committed(store).placement
    found = fitting_cordons(cordons, serving, topology, model.num_expert_groups)
    if found.unmet:
        raise Refused(ProblemType.IMPOSSIBLE_CORDON, found.unmet[-1])


def _answer(call: Call, state: LiveState) -> RanksAnswer:
    from eplb.core.placement import slots_in_use, sole_experts
    from eplb.fitting import fitting_cordons
    from rebalance.controller.plans.planner_request import read_cordons

    model, topology = shape_of_run(call.store)
    cordons, change = read_cordons(state.text("cordons")), state.changes.get("cordons")
    committed = call.store.committed()
    call.tag(state.revision)
    held = sole = [0] * topology.num_ranks
    unmet: tuple[str, ...] = ()
    if committed is not None:
        serving = committed.placement
        held = slots_in_use(serving, topology).sum(axis=0).tolist()
        sole = sole_experts(serving, topology).tolist()
        unmet = fitting_cordons(cordons, serving, topology, model.num_expert_groups).unmet
    lines = [
        RankLine(
            rank=rank,
            node=int(topology.node_of_rank[rank]),
            host=int(topology.host_of_rank[rank]),
            failure_domain=int(topology.failure_domain[rank]),
            state=_state(cordons.get(rank), held[rank]),
            experts=held[rank],
            sole_experts=sole[rank],
        )
        for rank in range(topology.num_ranks)
    ]
    is_draining = any(one.state == "draining" for one in lines)
    return RanksAnswer(
        revision=state.revision,
        ranks=lines,
        unmet=list(unmet),
        waits=_waits(state) if is_draining else "",
        time=change.time if change else None,
        reason=change.reason if change else None,
    )


def _state(found: Cordon | None, held: int) -> RankState:
    from eplb.fitting import Cordon

    if found is None:
        return "open"
    if found is Cordon.CORDON:
        return "cordoned"
    return "draining" if held else "drained"


def _waits(state: LiveState) -> str:
    if not state.control.movement:
        return "movement is off"
    if state.control.observe:
        return "observe is on"
    waits = {"observe": "the stage is observe", "propose": "the stage is propose: approve the plan"}
    return waits.get(state.text("stage"), "")


def _print_ranks(found: dict[str, Any]) -> None:
    listing(found["ranks"], "rank node host experts sole_experts state")
    line(*(f"not met: {why}" for why in found["unmet"]))
    if found["waits"]:
        line(f"not moved: {found['waits']}")


@command("cordon", "eplb cordon 3 --reason 'its GPU throttles'", cordon)
def show_cordoned(found: dict[str, Any]) -> None:
    """Place no further expert on a rank; it keeps what it holds. Exit status 1: refused."""
    _print_ranks(found)


@command("drain", "eplb drain 3 --reason 'change 4711'; eplb ranks", drain)
def show_drained(found: dict[str, Any]) -> None:
    """Move every expert off a rank, so that its loss costs none. Exit status 1: refused."""
    _print_ranks(found)


@command("uncordon", "eplb uncordon 3 --reason 'change 4711 is done'", uncordon)
def show_uncordoned(found: dict[str, Any]) -> None:
    """Let a rank take experts again, after cordon or drain. Exit status 1: refused."""
    _print_ranks(found)
