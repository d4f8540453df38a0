"""Operations on pins: ranks that an operator has hold an expert, whatever that costs in balance.

They are the live setting ``pins``, read and written as a list, so their revision is that of all
live settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Response

from api.http.arguments import Body, Rank, Reason, ReasonRequest
from api.http.dependencies import (
    KnownRevision,
    Live,
    Service,
    audited,
    changing,
    operator,
    reading,
    tag_with,
)
from api.http.document import refused_with
from api.http.problems import ProblemType, Refused
from api.operations.commands import Answer, Ask, command
from api.operations.live_settings import LiveAnswer
from api.operations.placements import shape_of_run
from api.terminal.printing import WHY, line, listing, numbers
from eplb.declared import Meaning
from eplb.errors import ConfigError
from eplb.migration.membership import leavers
from rebalance.controller.plans.planner_request import (
    PlannerRequest,
    cordons_in_force,
    read_pins,
    written_cordons,
    written_pins,
)
from telemetry.state.live import LiveState
from telemetry.state.store import StateStore

reads, acts = reading(), changing(operator, audited)

# A list with one pin too many still fits a body of 64 KiB.
MOST_PINS, PIN_RANKS, MOST_TEXT = 1000, 64, 20_000
MOST_NUMBER = 999_999  # of layers and experts
Layer = Annotated[
    int | None,
    Meaning("the model's layer number; null: every layer", at_least=0, at_most=MOST_NUMBER),
]
Expert = Annotated[int, Meaning("a logical expert", at_least=0, at_most=MOST_NUMBER)]


class Pin(Body):
    """An expert and the ranks that must hold it."""

    expert: Expert
    ranks: Annotated[
        list[Rank],
        Meaning("numbers of ranks, each once", min_length=1, max_length=PIN_RANKS, example=[0, 4]),
    ]
    layer: Layer = None


class PinsRequest(ReasonRequest):
    """All pins, in place of the present ones."""

    pins: Annotated[list[Pin], Meaning("each expert of a layer once", max_length=MOST_PINS)]


@dataclass(frozen=True)
class PinsAnswer(LiveAnswer):
    """All pins."""

    pins: list[Pin]


NEEDED = refused_with(ProblemType.SETTINGS_CHANGED, ProblemType.PRECONDITION_REQUIRED)


@reads.get("/pins")
def pins(service: Service, response: Response) -> PinsAnswer:
    """Pins. Experts and the ranks that must hold them; the `ETag` is for `PUT` and `DELETE`."""
    state = service.store.live()
    tag_with(response, state.revision)
    return _answer(service.store, state)


@acts.put("/pins", responses=NEEDED | refused_with(ProblemType.IMPOSSIBLE_PIN, ProblemType.NO_RUN))
def put_pins(live: Live, revision: KnownRevision, body: PinsRequest) -> PinsAnswer:
    """Replace all pins. At the revision in `If-Match`. The next plan meets them."""
    store, new = live.store, dict[Any, tuple[int, ...]]()
    for pin in body.pins:
        which = pin.expert if pin.layer is None else (pin.layer, pin.expert)
        if which in new or len(set(pin.ranks)) < len(pin.ranks):
            why = f"{_words(pin.layer, pin.expert)} or a rank of it is named twice, expected once"
            raise Refused(ProblemType.INVALID_REQUEST, why)
        new[which] = tuple(pin.ranks)
    text = written_pins(new)
    if len(text) > MOST_TEXT:
        why = f"the pins take {len(text)} characters, expected at most {MOST_TEXT}"
        raise Refused(ProblemType.INVALID_REQUEST, why)
    if unmet := _unmet(store, store.live(), text):
        more = f", and {len(unmet) - 1} more" if len(unmet) > 1 else ""
        raise Refused(ProblemType.IMPOSSIBLE_PIN, f"{unmet[0]}{more}")
    return _answer(store, live.make({"pins": text}, expected=revision, reason=body.reason))


@acts.delete("/pins", responses=NEEDED)
def delete_pins(live: Live, revision: KnownRevision, body: ReasonRequest) -> PinsAnswer:
    """Remove all pins. At the revision in `If-Match`; pins of the configuration apply again."""
    return _answer(live.store, live.make({"pins": None}, expected=revision, reason=body.reason))


def _answer(store: StateStore, state: LiveState) -> PinsAnswer:
    change = state.changes.get("pins")
    return PinsAnswer(
        revision=state.revision,
        pins=[
            Pin(expert=expert, ranks=sorted(ranks), layer=layer)
            for which, ranks in read_pins(state.text("pins")).items()
            for layer, expert in [(None, which) if isinstance(which, int) else which]
        ],
        unmet=_unmet(store, state, state.text("pins")) if store.current_run() is not None else [],
        time=change.time if change else None,
        reason=change.reason if change else None,
    )


def _unmet(store: StateStore, state: LiveState, pins: str) -> list[str]:
    """Reasons why the current run cannot meet pins, as the planner finds them."""
    if not pins:
        return []
    model, topology = shape_of_run(store)
    committed = store.committed()
    leaving = leavers(store.wanted_ranks(), topology)
    in_force = written_cordons(cordons_in_force(state.text("cordons"), leaving))
    asked = PlannerRequest(redundancy=state.text("redundancy"), cordons=in_force, pins=pins)
    placement = None if committed is None else committed.placement
    return list(asked.unmet_pins(placement, topology, model))


def _words(layer: int | None, expert: int) -> str:
    return f"{'every layer' if layer is None else f'layer {layer}'} expert {expert}"


# -- commands


def print_pins(found: dict[str, Any]) -> None:
    """Print pins, and those that the ranks cannot meet now."""
    every = ({**one, "layer": "all"} if one["layer"] is None else one for one in found["pins"])
    listing(every, "layer expert ranks", none="no pins")
    line(*(f"not met: {why}" for why in found["unmet"]))


def set_pin(
    ask: Ask,
    expert: Expert,
    ranks: Annotated[str, Meaning("ranks that must hold it, as 0,4")],
    layer: Layer = None,
    reason: Reason = WHY,
) -> Answer:
    """Pin an expert to ranks, in place of its pin before; other pins stay."""
    chosen = list(numbers("--ranks", ranks, least=0))
    found = ask(pins).body
    new = {"layer": layer, "expert": expert, "ranks": chosen}
    every = [*_others(found, layer, expert), new]
    return ask(put_pins, reason=reason, pins=every, if_match=found["revision"])


def remove_pin(
    ask: Ask,
    expert: Annotated[
        int | None, Meaning("a logical expert", at_least=0, at_most=MOST_NUMBER)
    ] = None,
    layer: Layer = None,
    every: Annotated[bool, Meaning("all pins")] = False,
    reason: Reason = WHY,
) -> Answer:
    """Remove the pin of an expert, or with --all every pin; nothing moves for that alone."""
    if every == (expert is not None) or (every and layer is not None):
        raise ConfigError("found neither --expert nor --all alone, expected one of them")
    found = ask(pins).body
    if every:
        return ask(delete_pins, reason=reason, if_match=found["revision"])
    others = _others(found, layer, expert)
    if expert is not None and len(others) == len(found["pins"]):
        raise Refused(ProblemType.NOT_FOUND, f"there is no pin of {_words(layer, expert)}")
    return ask(put_pins, reason=reason, pins=others, if_match=found["revision"])


def _others(found: dict[str, Any], layer: int | None, expert: int | None) -> list[dict[str, Any]]:
    return [one for one in found["pins"] if (one["layer"], one["expert"]) != (layer, expert)]


command(
    "pins list",
    "eplb pins list --service http://127.0.0.1:8765",
    pins,
    show=print_pins,
    about="List pins, and those that the ranks cannot meet now.",
)
command(
    "pins set",
    "eplb pins set --layer 3 --expert 17 --ranks 0,4",
    set_pin,
    of=put_pins,
    show=print_pins,
)
command(
    "pins remove",
    "eplb pins remove --layer 3 --expert 17; eplb pins remove --all",
    remove_pin,
    of=put_pins,
    show=print_pins,
    names={"every": "all"},
)
