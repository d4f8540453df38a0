"""What a rank of an engine and its process at the store send each other.

As bytes a message is a line of JSON, and the plain contents of its arrays after it: nothing that is
read is executed, and the step copies an array once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from eplb.core.load import LoadSample
from telemetry.state.codec import pack, unpack
from telemetry.state.runs import RunInfo


@dataclass(frozen=True)
class SampleOrigin:
    """Whose samples these are."""

    deployment: str  # of the group: its records have that name in the store
    store: str  # URL
    rank: int
    info: RunInfo
    spool: str = ""  # folder where samples wait on disk; "": they wait in memory
    planner: str = ""  # "module:class" of what plans in the process; "": the rank plans
    terms: dict[str, Any] = field(default_factory=dict)  # what the planner is asked to keep to
    whole: str = ""  # deployment of all groups; "": it has this one alone
    engine: str = ""  # name of the engine among several
    groups: tuple[str, ...] = ()  # deployments of the groups of this engine
    untried: str = ""  # why this release is observed first; "": it was tested

    @property
    def is_first(self) -> bool:
        """Whether this rank writes the run and the maps, and works off tasks."""
        return self.rank == 0


@dataclass(frozen=True)
class PlanQuestion:
    """Why a plan is asked for."""

    trigger: str  # interval, or task
    task_id: int = 0
    is_dry: bool = False  # plan, and move nothing


@dataclass(frozen=True)
class MoveOutcome:
    """What came of a question."""

    question: PlanQuestion
    figures: dict[str, Any] = field(default_factory=dict)  # of the plan, as a controller's
    error: str = ""
    kept: str = ""  # why the plan, which would move experts, does not
    is_begun: bool = False  # the ranks move to the plan: its map, or an error, ends the question


@dataclass(frozen=True, eq=False)
class MapChange:
    """A map that serves on all layers from now on."""

    held: NDArray[np.int32]  # [L, S]
    share: NDArray[np.float64] | None  # [L, S]; None: even
    num_experts: int
    generation: int
    reason: str
    question: PlanQuestion | None = None  # whose plan it is; it ends with the map
    figures: dict[str, Any] = field(default_factory=dict)  # of that plan


@dataclass(frozen=True)
class Noted:
    """An event of this rank."""

    kind: str
    detail: dict[str, Any]


@dataclass(frozen=True, eq=False)
class PassWindow:
    """Tokens of all ranks in some passes, for the planner."""

    tokens: NDArray[np.int64]  # [L, S] of each slot
    held: NDArray[np.int64]  # [L, S] experts by slot
    weights: NDArray[np.int64]  # [L, S] of the map; 0 while no plan has made it


@dataclass(frozen=True, eq=False)
class PlannerAnswer:
    """What the planner of the process has for a question."""

    question: PlanQuestion
    record: NDArray[np.uint8]  # the plan, packed, which the ranks begin together; empty: none


# Why nothing may move where the switches cannot be read: a pause could not be seen.
UNREAD = "the deployment's switches cannot be read, expected a store that answers"


@dataclass(frozen=True)
class LinkReport:
    """How the process at the store does; sent at each change."""

    is_on: bool  # what was handed over reaches the store
    why_kept: str  # why nothing may move now, by the deployment's switches; on rank 0
    num_failures: int  # failed calls of the store
    num_failed_plans: int | None = None  # in a row; None: no plan was asked for
    num_safe: int = 0  # messages from the first on that survive the end of the process
    num_dropped: int = 0  # samples that the spool had no room for


END = b""  # the last message of a rank
# From the rank, and to the rank.
ToStore = LoadSample | MapChange | Noted | MoveOutcome | PassWindow | PlanQuestion
Reply = LinkReport | PlanQuestion | PlannerAnswer
KINDS: dict[str, Any] = {kind.__name__: kind for kind in (*get_args(ToStore | Reply), SampleOrigin)}
NESTED: dict[str, Any] = {"info": RunInfo, "question": PlanQuestion}


def to_bytes(message: ToStore | Reply | SampleOrigin) -> bytes:
    """Pack a message.

    Raises:
        StoreError: a value that is no array and that JSON cannot hold.
    """
    values = vars(message)
    arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
    header = {
        "kind": type(message).__name__,
        "fields": {name: value for name, value in values.items() if name not in arrays},
        "arrays": [[name, array.dtype.str, array.shape] for name, array in arrays.items()],
    }
    return pack(header, b"".join(array.tobytes() for array in arrays.values()))


def from_bytes(packed: bytes) -> Any:
    """Unpack a message; its arrays are read-only."""
    header, contents = unpack(packed, "a message")
    fields, offset = header["fields"], 0
    for name, dtype, shape in header["arrays"]:
        array = np.frombuffer(contents, dtype, math.prod(shape), offset).reshape(shape)
        fields[name] = array
        offset += array.nbytes
    for name in NESTED.keys() & fields.keys():
        if fields[name] is not None:
            fields[name] = NESTED[name](**fields[name])
    return KINDS[header["kind"]](**fields)
