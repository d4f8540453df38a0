"""Operations on ranks: what each holds, and which takes no experts.

Cordons are the live setting ``cordons``, so their revision is that of all live settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import Response

from api.http.arguments import Rank, ReasonRequest
from api.http.dependencies import (
    Live,
    LiveChange,
    Revision,
    Service,
    audited,
    changing,
    operator,
    reading,
    tag_with,
)
from api.http.document import refused_with
from api.http.problems import ProblemType, Refused
from api.monitor.membership import why_not_moved
from api.operations import watching
from api.operations.commands import Answer, Ask, command
from api.operations.live_settings import LiveAnswer
from api.operations.membership import check_rank, committed_of
from api.operations.placements import shape_of_run
from api.terminal.printing import line, listing
from eplb.core.model import ModelShape
from eplb.core.placement import slots_in_use, sole_experts
from eplb.core.topology import Topology
from eplb.declared import Meaning
from eplb.errors import StaleRevision
from eplb.fitting import Cordon, fitting_cordons
from eplb.migration.membership import leavers
from rebalance.controller.plans.planner_request import (
    cordons_in_force,
    read_cordons,
    written_cordons,
)
from telemetry.state.live import LiveState
from telemetry.state.store import StateStore

reads, acts = reading(), changing(operator, audited)

OF_CORDONS = refused_with(
    ProblemType.NO_SUCH_RANK,
    ProblemType.NO_RUN,
    ProblemType.IMPOSSIBLE_CORDON,
    ProblemType.SETTINGS_CHANGED,
)
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


@reads.get("/ranks", responses=refused_with(ProblemType.NO_RUN))
def ranks(service: Service, response: Response) -> RanksAnswer:
    """Ranks. Node, state and experts of each rank; the `ETag` is for changes."""
    state = service.store.live()
    tag_with(response, state.revision)
    return _answer(service.store, state)


def show_reports(found: list[dict[str, Any]]) -> None:
    """Print what ranks do beside what they hold."""
    listing(
        (one | {"alive": "yes" if one["is_alive"] else "no"} for one in found),
        "rank node alive step generation phase age_s step_ms wait_ms state experts sole_experts "
        "frozen",
        none="no run has begun, so there are no ranks yet",
    )


def ask_for_ranks(ask: Ask) -> Answer:
    """Show each rank: step, phase, age of its report, whether it takes experts, what it holds."""
    seen = ask(watching.state).body
    lines = ask(ranks).body["ranks"] if seen["run"] is not None else []
    # Ranks may have joined or left between the two answers: those that are in both are shown.
    held = {line["rank"]: line for line in lines}
    views = [view for view in seen["ranks"] if view["rank"] in held]
    return Answer(200, [view | held[view["rank"]] for view in views])


command(
    "ranks",
    "eplb ranks --store redis://HOST:PORT --deployment prod",
    ask_for_ranks,
    of=ranks,
    show=show_reports,
)


# -- cordons


@acts.post("/ranks/{rank}/cordon", responses=OF_CORDONS)
def cordon(live: Live, revision: Revision, rank: Rank, body: ReasonRequest) -> RanksAnswer:
    """Place no further expert on a rank. The rank keeps what it holds and takes nothing new, from
    the next plan on.
    """
    return _change(live, revision, rank, Cordon.CORDON, body.reason)


@acts.post("/ranks/{rank}/drain", responses=OF_CORDONS)
def drain(live: Live, revision: Revision, rank: Rank, body: ReasonRequest) -> RanksAnswer:
    """Move every expert off a rank. The next plan moves every expert off the rank, whatever that
    costs in balance.
    """
    return _change(live, revision, rank, Cordon.DRAIN, body.reason)


@acts.post("/ranks/{rank}/uncordon", responses=OF_CORDONS)
def uncordon(live: Live, revision: Revision, rank: Rank, body: ReasonRequest) -> RanksAnswer:
    """Let a rank take experts again. Plans bring experts where they gain."""
    return _change(live, revision, rank, None, body.reason)


def _change(
    live: LiveChange, revision: int | None, rank: int, new: Cordon | None, reason: str
) -> RanksAnswer:
    store = live.store
    model, topology = shape_of_run(store)
    leaving = dict.fromkeys(leavers(store.wanted_ranks(), topology), Cordon.DRAIN)
    for attempt in range(1, MOST_TRIES + 1):
        state = store.live()
        cordons = read_cordons(state.text("cordons"))
        if new is None:  # a cordon may outlive its rank: it can be removed all the same
            cordons.pop(rank, None)
        else:
            cordons[rank] = new
            _check_possible(store, rank, cordons | leaving, model, topology)
        changes = {"cordons": written_cordons(cordons)}
        expected = state.revision if revision is None else revision
        try:
            return _answer(store, live.make(changes, expected=expected, reason=reason))
        except StaleRevision:
            if revision is not None or attempt == MOST_TRIES:
                raise
    raise AssertionError("the last attempt returns or raises")


def _check_possible(
    store: StateStore, rank: int, cordons: dict[int, Cordon], model: ModelShape, topology: Topology
) -> None:
    check_rank(rank, topology)
    serving = committed_of(store).placement
    found = fitting_cordons(cordons, serving, topology, model.num_expert_groups)
    if found.unmet:
        raise Refused(ProblemType.IMPOSSIBLE_CORDON, found.unmet[-1])


def _answer(store: StateStore, state: LiveState) -> RanksAnswer:
    model, topology = shape_of_run(store)
    leaving = leavers(store.wanted_ranks(), topology)
    cordons = cordons_in_force(state.text("cordons"), leaving)
    change = state.changes.get("cordons")
    committed = store.committed()
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
    if found is None:
        return "open"
    if found is Cordon.CORDON:
        return "cordoned"
    return "draining" if held else "drained"


def print_ranks(found: dict[str, Any]) -> None:
    """Print which ranks take experts, and what a draining one waits for."""
    listing(found["ranks"], "rank node host experts sole_experts state", none="no ranks")
    line(*(f"not met: {why}" for why in found["unmet"]))
    if found["waits"]:
        line(f"not moved: {found['waits']}")


command("cordon", "eplb cordon 3 --reason 'its GPU throttles'", cordon, show=print_ranks)
command("drain", "eplb drain 3 --reason 'change 4711'; eplb ranks", drain, show=print_ranks)
command("uncordon", "eplb uncordon 3 --reason 'change 4711 is done'", uncordon, show=print_ranks)
