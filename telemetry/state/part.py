"""What the parts of the state store have in common: the back end, and records in its HEAD."""

from __future__ import annotations

from functools import lru_cache
from typing import TypeVar

from telemetry.state.backend import HEAD, Backend, Reader, Value, text_of
from telemetry.state.codec import decode

T = TypeVar("T")

COMMITTED = "committed"  # generation and hash of the placement that serves
OPEN_PLAN = "open_plan"  # plan id and digest of the open migration; "": none is open
NEWEST_PLAN = "newest_plan"  # id of the plan that was published last
RECOVERY = "recovery"
LIVE = "live"
CANDIDATES = "candidates"


class Part:
    """A part of the state store, over one back end."""

    backend: Backend


# The same text is read again and again, of settings and leases above all.
decode_again = lru_cache(maxsize=64)(decode)


def head(reader: Reader, cls: type[T], key: str, what: str) -> T | None:
    """Return a record of HEAD, or None.

    Raises:
        StoreError: it cannot be read.
    """
    text = reader.get(HEAD, key)
    return decode_again(cls, text, what) if text else None  # type: ignore[arg-type]


def committed_in(reader: Reader) -> tuple[int, str] | None:
    """Return generation and hash of the committed placement."""
    return _number_and_hash(reader.get(HEAD, COMMITTED))


def open_plan_in(reader: Reader) -> tuple[int, str] | None:
    """Return plan id and digest of the open migration."""
    return _number_and_hash(reader.get(HEAD, OPEN_PLAN))


def _number_and_hash(value: Value | None) -> tuple[int, str] | None:
    if not value:
        return None
    number, _, digest = text_of(value).partition(" ")
    return int(number), digest
