"""JSON that another may have written: bounded before it is parsed, and without repeats."""

from __future__ import annotations

import pytest

from eplb.core.bounded_json import decode_json


def test_key_that_stands_twice_is_refused_at_any_depth() -> None:
    assert decode_json(b'{"a": 1, "b": {"a": 2}}') == {"a": 1, "b": {"a": 2}}
    for text in (b'{"a": 1, "a": 2}', b'[{"b": {"a": 1, "a": 1}}]'):
        with pytest.raises(ValueError, match="key 'a' is given twice, expected once"):
            decode_json(text)
