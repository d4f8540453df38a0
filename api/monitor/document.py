"""The form in which users have a State: one object, the fields of its parts in a fixed order.

``GET /api/v1/state`` and ``eplb status --json`` answer with it. Each field is declared once, in its
part; here is only where it stands. A new field goes to the end.
"""

from __future__ import annotations

from dataclasses import fields, make_dataclass
from typing import Any, get_type_hints

from api.monitor.state import State

ORDER = (
    "verdict",
    "reason",
    "problems",
    "unread",
    "store_full",
    "deployment",
    "groups",
    "time",
    "run",
    "started",
    "step",
    "generation",
    "controller",
    "versions",
    "num_layers",
    "layer_ids",
    "num_experts",
    "num_slots",
    "ranks",
    "node_of_rank",
    "membership",
    "silent_ranks",
    "uncounted_ranks",
    "engine_plans",
    "death",
    "supervision",
    "progress_age_s",
    "progress_of",
    "progress_thread",
    "step_age_s",
    "last_score",
    "token_age_s",
    "token_time",
    "sample_age_s",
    "sample_every_s",
    "phase",
    "migration",
    "pace",
    "expert_curve",
    "bytes_by_source",
    "experts_moved",
    "swap_pauses_ms",
    "decisions",
    "last_rebalance",
    "samples_stored",
    "samples_lost",
    "movement",
    "observe",
    "until",
    "stage",
    "open_proposals",
    "switched",
    "free_bytes",
    "audit_waiting",
)

_HINTS = get_type_hints(State, include_extras=True)
# Parts by their name in a State, and the name of the part of each field; "": it is of the state.
_PARTS = {name: hint for name, hint in _HINTS.items() if name not in ORDER}
_PART_OF = dict.fromkeys(_HINTS.keys() - _PARTS.keys(), "") | {
    field.name: name for name, part in _PARTS.items() for field in fields(part)
}
_DECLARED = _HINTS | {
    name: hint
    for part in _PARTS.values()
    for name, hint in get_type_hints(part, include_extras=True).items()
}
# Its name and its text are those in the OpenAPI document.
StateDocument: Any = make_dataclass(
    "State",
    [(name, _DECLARED[name]) for name in ORDER],
    namespace={"__doc__": "Everything at a glance."},
    frozen=True,
    kw_only=True,
)
StateDocument.__module__ = __name__


def document_of(state: State) -> Any:
    """Give the document of a state."""
    return StateDocument(
        **{
            name: getattr(getattr(state, part) if part else state, name)
            for name, part in ((name, _PART_OF[name]) for name in ORDER)
        }
    )


def state_in(document: Any) -> State:
    """Give the state in a document."""
    own = {name: getattr(document, name) for name in ORDER if not _PART_OF[name]}
    parts = {
        name: part(**{one.name: getattr(document, one.name) for one in fields(part)})
        for name, part in _PARTS.items()
    }
    return State(**own, **parts)
