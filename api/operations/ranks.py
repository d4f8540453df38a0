"""Operations on ranks: what each holds, and which takes no experts.

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
    Rank,
    ReasonRequest,
    command,
    operation,
)
from api.operations.membership import check_rank, committed_of
from api.operations.placements import shape_of_run
from api.operations.printing import line, listing
from eplb.declared import Meaning

if TYPE_CHECKING:
    from eplb.core.model import ModelShape
    from eplb.core.topology import Topology
    from eplb.fitting import Cordon
    from telemetry.state.live import LiveState
    from telemetry.state.store import StateStore

OF_CORDONS = (ProblemType.NO_SUCH_RANK, ProblemType.NO_RUN, ProblemType.IMPOSSIBLE_CORDON)
# Attempts where another change of live settings comes first and the request has no revision.
MOST_TRIES = 8
RankState = Literal["open", "cordoned", "draining", "drained"]


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
        none="no run has begun, so there are no ranks yet",
    )


@command("ranks", "eplb ranks --store redis://HOST:PORT --deployment prod", show=show_reports)
def ask_for_ranks(ask: Ask) -> Answer:
    """Show each rank: step, phase, age of its report, whether it takes experts, what it holds."""
    from api.operations.watching import state

    seen = ask(state).body
    held = ask(ranks).body["ranks"] if seen["run"] is not None else []
    return Answer(200, [rank | here for rank, here in zip(seen["ranks"], held, strict=True)])


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
    from eplb.migration.membership import leavers
    from rebalance.controller.plans.planner_request import read_cordons, written_cordons

    store, expected = call.store, call.expected_revision()
    model, topology = shape_of_run(store)
    leaving = dict.fromkeys(leavers(store.wanted_ranks(), topology), Cordon.DRAIN)
    for _ in range(MOST_TRIES):
        state = store.live()
        cordons = read_cordons(state.text("cordons"))
        if new is None:  # a cordon may outlive its rank: it can be removed all the same
            cordons.pop(rank, None)
        else:
            cordons[rank] = Cordon(new)
            _check_possible(store, rank, cordons | leaving, model, topology)
        revision = state.revision if expected is None else expected
        changes = {"cordons": written_cordons(cordons)}
        try:
            changed = call.change_live(changes, expected=revision, reason=reason)
        except StaleRevision as exc:
            why = exc
            if expected is not None:
                break
        else:
            return _answer(call, changed)
    raise why


def _check_possible(
    store: StateStore, rank: int, cordons: dict[int, Cordon], model: ModelShape, topology: Topology
) -> None:
    from eplb.fitting import fitting_cordons

    check_rank(rank, topology)
    serving = committed_of(store).placement
    found = fitting_cordons(cordons, serving, topology, model.num_expert_groups)
    if found.unmet:
        raise Refused(ProblemType.IMPOSSIBLE_CORDON, found.unmet[-1])


def _answer(call: Call, state: LiveState) -> RanksAnswer:
    from api.monitor.membership import why_not_moved
    from eplb.core.placement import slots_in_use, sole_experts
    from eplb.fitting import fitting_cordons
    from eplb.migration.membership import leavers
    from rebalance.controller.plans.planner_request import cordons_in_force

    model, topology = shape_of_run(call.store)
    leaving = leavers(call.store.wanted_ranks(), topology)
    cordons = cordons_in_force(state.text("cordons"), leaving)
    change = state.changes.get("cordons")
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
        waits=why_not_moved(state) if is_draining else "",
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


def _print_ranks(found: dict[str, Any]) -> None:
    listing(found["ranks"], "rank node host experts sole_experts state", none="no ranks")
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
