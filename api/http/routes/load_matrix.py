"""``GET /api/v1/load/matrix``: load as a matrix over any range of time."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from api.http.problems import ProblemType, Refused, documented
from api.http.routes.load_files import (
    MEDIA_TYPES,
    Format,
    Of,
    OtherShape,
    TooLarge,
    write_load,
)
from api.http.routes.request_parts import service_of
from api.monitor.state import EPOCH
from eplb.core.load import Phase
from eplb.declared import Meaning
from telemetry.load.load_range import load_rows

if TYPE_CHECKING:
    from fastapi import APIRouter

MOST_BYTES: dict[Format, int] = {"npy": 256 * 2**20, "csv": 256 * 2**20, "json": 32 * 2**20}
AT_ONCE = 2  # matrices that are made: each takes a processor
AHEAD_S = 60.0  # by which clocks of ranks may differ
Time = Annotated[float, Field(ge=0, le=1e11, description="seconds since the epoch")]

_making = threading.BoundedSemaphore(AT_ONCE)


@dataclass(frozen=True)
class WindowOfMatrix:
    """One row of the matrix."""

    run: str
    phase: Phase
    time: Annotated[float, Meaning("time at which it ends", unit=EPOCH, example=1790000000.0)]
    seconds: Annotated[int, Meaning("0: a window of samples; 60 or 3600: a roll-up")]
    first_step: int
    last_step: int
    generation: Annotated[int, Meaning("newest generation that served")]
    missing_ranks: Annotated[int, Meaning("ranks that sent nothing, or not all of a window")]


@dataclass(frozen=True)
class LoadMatrix:
    """Load over a range of time, oldest first."""

    of: Of
    shape: Annotated[list[int], Meaning("shape of the values", example=[720, 58, 256])]
    values: Annotated[
        list[list[list[int]] | list[float]],
        Meaning("[T, L, E] tokens of experts, [T, L, R] of ranks, or [T, 6] of windows"),
    ]
    windows: list[WindowOfMatrix]


def get_load_matrix(
    request: Request,
    since: Time,
    until: Annotated[
        float | None, Field(ge=0, le=1e11, description="not included; none: until now")
    ] = None,
    of: Of = "tokens",
    phase: Phase | None = None,
    format: Annotated[
        Format | None, Field(description="none: by Accept, JSON where it names none")
    ] = None,
) -> Response:
    """By expert or by rank: windows of samples, and roll-ups of a minute or an hour before them.

    `windows` gives time, seconds, first and last step, generation and missing ranks of each row.
    """
    newest = time.time() + AHEAD_S
    end = newest if until is None else min(until, newest)
    form = format or _accepted(request.headers.get("accept", "*/*"))
    service = service_of(request)
    if not _making.acquire(blocking=False):
        raise Refused(
            ProblemType.TOO_BUSY, f"{AT_ONCE} matrices of load are being made, expected fewer"
        )
    try:
        rows = load_rows(service.store, since, end, phase)
        made = write_load(rows, of, form, MOST_BYTES[form])
    except TooLarge as exc:
        raise Refused(ProblemType.TOO_MUCH_LOAD, str(exc)) from exc
    except OtherShape as exc:
        raise Refused(ProblemType.OTHER_SHAPE, str(exc)) from exc
    finally:
        _making.release()
    headers = {"Content-Length": str(made.num_bytes), "Vary": "Accept"}
    return StreamingResponse(made.chunks(), headers=headers, media_type=MEDIA_TYPES[form])


def add_load_matrix(watch: APIRouter) -> None:
    """Add the route."""
    content = {kind: {"schema": {"type": "string"}} for kind in list(MEDIA_TYPES.values())[1:]}
    others: dict[int | str, dict[str, Any]] = {
        200: {"description": "The matrix", "content": content}
    }
    problems = documented(
        ProblemType.NOT_ACCEPTABLE,
        ProblemType.OTHER_SHAPE,
        ProblemType.INVALID_REQUEST,
        ProblemType.TOO_MUCH_LOAD,
    )
    watch.get(
        "/load/matrix",
        summary="Load over a range of time as a matrix",
        response_model=LoadMatrix,
        responses=others | problems,
    )(get_load_matrix)


def _accepted(accept: str) -> Format:
    """The first format that an Accept header names, the best first.

    Raises:
        Refused: it names none.
    """
    asked = list[tuple[float, str]]()
    for part in accept.split(",")[:20]:
        kind, *parameters = (word.strip() for word in part.split(";"))
        quality = next((one[2:] for one in parameters if one.startswith("q=")), "1")
        try:
            weight = float(quality)
        except ValueError:
            weight = math.nan
        if weight > 0:
            asked.append((-weight, kind.lower()))
    for _, kind in sorted(asked, key=lambda one: one[0]):
        for name, media_type in MEDIA_TYPES.items():
            if kind in (media_type, "*/*", media_type.partition("/")[0] + "/*"):
                return name
    known = ", ".join(MEDIA_TYPES.values())
    raise Refused(
        ProblemType.NOT_ACCEPTABLE, f"Accept is {accept[:100]!r}, expected one of: {known}"
    )
