"""JSON from outside: limits of size and depth that hold before the parser runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eplb.core.bounded_json import MAX_JSON_BYTES, MAX_JSON_DEPTH, decode_json
from rebalance.protocol.journal import read_journals

DEEP = 100_000


@pytest.mark.parametrize(
    "text",
    [
        b"[" * DEEP,
        b"[" * DEEP + b"]" * DEEP,
        b'{"a":' * DEEP + b"1" + b"}" * DEEP,
        b'["]", ' * DEEP,  # brackets within strings close nothing
        b'["\\"]", ' * DEEP,  # an escaped quote ends no string
        ("[" * DEEP).encode("utf-16"),
        "[\u5b5d".encode("utf-16-le") * DEEP,
        b'"[' * DEEP,
        b"[}" * DEEP,
    ],
    ids=lambda text: repr(text[:12]),
)
def test_json_nested_deep_is_rejected_with_value_error(text: bytes) -> None:
    with pytest.raises(ValueError):
        decode_json(text)


def test_json_within_the_limits_is_parsed_as_by_the_parser() -> None:
    deep: object = 'bottom ] } [ { \\ "'
    for level in range(MAX_JSON_DEPTH - 1):
        deep = [deep, {}] if level % 2 else {"[[[": deep, '"{': []}
    wide = {"records": [[layer, expert] for layer in range(58) for expert in range(256)]}

    for value in (deep, wide, ["["] * 1000, {}, 0, None, "\u5b5d"):
        assert decode_json(json.dumps(value).encode()) == value


def test_json_above_the_stated_size_is_rejected_unparsed() -> None:
    with pytest.raises(ValueError, match="expected at most 10"):
        decode_json(b" " * 11, max_bytes=10)


@pytest.mark.parametrize("unit", [b"[", b'\\"', b'{"'])
def test_hostile_text_of_full_size_is_rejected_in_linear_time(unit: bytes) -> None:
    with pytest.raises(ValueError):
        decode_json(unit * (MAX_JSON_BYTES // len(unit)))  # in quadratic time: hours


def test_journal_line_nested_deep_counts_as_torn(tmp_path: Path) -> None:
    (tmp_path / "rank-0000.jsonl").write_bytes(b"[" * DEEP + b"\n")

    assert read_journals(tmp_path) == ([], 1)
