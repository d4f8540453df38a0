"""Routes of pins: ranks that an operator has hold an expert, whatever that costs in balance.

They are the live setting ``pins``, read and written as a list, so their revision is that of all
live settings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from api.http.problems import ProblemType, Refused, documented
from api.http.requests import WHOLE, Body, Reason, ReasonRequest
from api.http.routes.placements.answers import shape_of_run
from api.http.routes.request_parts import TAG, header_document, revision_of, service_of
from api.http.schemas import Answer
from eplb.core.constraints import Constraints, Which, room_of
from eplb.errors import StaleRevision
from eplb.fitting.cordons import FittingCordons
from eplb.fitting.pins import Pins, fitting_pins
from rebalance.controller.plans.planner_request import PlannerRequest, read_pins, written_pins
from telemetry.state.live import LiveState
from telemetry.state.store import StateStore

if TYPE_CHECKING:
    from fastapi import APIRouter

# A list with one pin too many still fits a body of 64 KiB.
MOST_PINS, MOST_RANKS, MOST_TEXT = 1000, 64, 20_000
IF_MATCH = header_document(
    "if-match",
    "the ETag that was read, or *",
    {"type": "string", "pattern": f"^{TAG}$"},
    is_required=True,
)
Number = Annotated[int, Field(ge=0, le=999_999), *WHOLE]


class Pin(Body):
    """An expert, and ranks that must hold it."""

    layer: Number | None = Field(None, description="index, from 0; null: every layer")
    expert: Number = Field(description="a logical expert")
    ranks: list[Number] = Field(
        min_length=1,
        max_length=MOST_RANKS,
        examples=[[0, 4]],
        json_schema_extra={"uniqueItems": True},
    )


class PinsRequest(Body):
    """All pins, in place of those that there are."""

    reason: Reason
    pins: list[Pin] = Field(max_length=MOST_PINS)


class PinAnswer(Answer):
    """An expert, and ranks that must hold it."""

    layer: int | None = Field(description="index, from 0; null: every layer")
    expert: int
    ranks: list[int]


class PinsAnswer(Answer):
    """All pins; the revision is the entity tag too."""

    revision: int = Field(description="of the live settings, of which pins are one")
    pins: list[PinAnswer]
    unmet: list[str] = Field(description="why plans of the current run leave a pin out")
    time: float | None = Field(description="of the latest change; null: those of the configuration")
    reason: str | None


def get_pins(request: Request, response: Response) -> PinsAnswer:
    """Experts that ranks must hold; the `ETag` is for `PUT` and `DELETE`."""
    store = service_of(request).store
    return _answered(store, store.live(), response)


def put_pins(request: Request, body: PinsRequest, response: Response) -> PinsAnswer:
    """Takes the place of all pins, at the revision in `If-Match`. The next plan meets them."""
    store, pins = service_of(request).store, dict[Which, tuple[int, ...]]()
    for pin in body.pins:
        which = pin.expert if pin.layer is None else (pin.layer, pin.expert)
        if which in pins or len(set(pin.ranks)) < len(pin.ranks):
            where = "every layer" if pin.layer is None else f"layer {pin.layer}"
            why = f"{where} expert {pin.expert} or a rank of it is named twice, expected once"
            raise Refused(ProblemType.INVALID_REQUEST, why)
        pins[which] = tuple(pin.ranks)
    text = written_pins(pins)
    if len(text) > MOST_TEXT:
        why = f"the pins take {len(text)} characters, expected at most {MOST_TEXT}"
        raise Refused(ProblemType.INVALID_REQUEST, why)
    if unmet := _unmet(store, store.live(), pins):
        more = f", and {len(unmet) - 1} more" if len(unmet) > 1 else ""
        raise Refused(ProblemType.IMPOSSIBLE_PIN, f"{unmet[0]}{more}")
    return _answered(store, _changed(request, store, text, body.reason), response)


def delete_pins(request: Request, body: ReasonRequest, response: Response) -> PinsAnswer:
    """Removes all pins, at the revision in `If-Match`; those of the configuration apply again."""
    store = service_of(request).store
    return _answered(store, _changed(request, store, None, body.reason), response)


def add_pin_routes(watch: APIRouter, act: APIRouter) -> None:
    """Add the routes."""
    watch.get("/pins", summary="Pins")(get_pins)
    act.put(
        "/pins",
        summary="Set all pins",
        responses=documented(
            ProblemType.SETTINGS_CHANGED, ProblemType.IMPOSSIBLE_PIN, ProblemType.NO_RUN
        ),
        openapi_extra=IF_MATCH,
    )(put_pins)
    act.delete(
        "/pins",
        summary="Remove all pins",
        responses=documented(ProblemType.SETTINGS_CHANGED),
        openapi_extra=IF_MATCH,
    )(delete_pins)


def _changed(request: Request, store: StateStore, pins: str | None, reason: str) -> LiveState:
    expected = revision_of(request)
    try:
        return store.change_live({"pins": pins}, expected=expected, reason=reason)
    except StaleRevision as exc:
        raise Refused(ProblemType.SETTINGS_CHANGED, str(exc)) from exc


def _answered(store: StateStore, state: LiveState, response: Response) -> PinsAnswer:
    pins, change = read_pins(state.text("pins")), state.changes.get("pins")
    response.headers["ETag"] = f'"{state.revision}"'
    return PinsAnswer(
        revision=state.revision,
        pins=[
            PinAnswer(layer=layer, expert=expert, ranks=sorted(ranks))
            for which, ranks in pins.items()
            for layer, expert in [(None, which) if isinstance(which, int) else which]
        ],
        unmet=_unmet(store, state, pins) if store.current_run() is not None else [],
        time=change.time if change else None,
        reason=change.reason if change else None,
    )


def _unmet(store: StateStore, state: LiveState, pins: Pins) -> list[str]:
    """Why the current run cannot meet pins, as the planner will find it."""
    if not pins:
        return []
    model, topology = shape_of_run(store)
    committed = store.committed()
    asked = PlannerRequest(redundancy=state.text("redundancy"), cordons=state.text("cordons"))
    cordons = FittingCordons(topology)
    if committed is not None:
        cordons = asked.cordoned(committed.placement, topology, model.num_expert_groups)
    slots = asked.slots(cordons.topology, model.num_layers, model.num_experts)
    room = room_of(Constraints(slots=slots), cordons.topology, model.num_layers)
    if committed is not None:
        room = cordons.limited(room, committed.placement)
    groups = model.num_expert_groups
    found = fitting_pins(pins, room, cordons.topology, model.num_experts, groups, cordons.kept)
    return list(found.unmet)
