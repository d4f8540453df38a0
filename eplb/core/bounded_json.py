"""JSON from another process or from a file that another may have written: bounded before parsing.

``json.loads`` descends once for each bracket, so a few kilobytes of ``[`` end a thread with a
RecursionError. Size and depth are limited here before the parser sees the text.
"""

from __future__ import annotations

import json
import re
from typing import Any

MAX_JSON_BYTES = 4 * 2**20  # the records of 58 layers of 256 experts take 0.2 MB
MAX_JSON_DEPTH = 32  # the deepest message of this project has 4 levels

# A string that is not closed extends to the end: each character is looked at once.
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_NOT_BRACKET = re.compile(r"[^\[\]{}]+")


def decode_json(data: bytes, *, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Parse UTF-8 JSON of bounded size and depth.

    Raises:
        ValueError: too large, nested too deep, not UTF-8, not JSON, or a key that stands twice.
    """
    if len(data) > max_bytes:
        raise ValueError(f"{len(data)} bytes of JSON, expected at most {max_bytes}")
    text = data.decode()  # here: the parser would guess UTF-16, in which brackets look different
    check_depth(text)
    return json.loads(text, object_pairs_hook=_without_repeats)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys differ: of two alike the parser would take the last in silence."""
    made = dict(pairs)
    if len(made) < len(pairs):
        seen = set[str]()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {key!r:.80} is given twice, expected once")
            seen.add(key)
    return made


def check_depth(text: str) -> None:
    """Refuse a text whose brackets are nested too deep for a parser.

    Raises:
        ValueError: they are.
    """
    if text.count("[") + text.count("{") <= MAX_JSON_DEPTH:
        return
    # The innermost brackets are peeled, one level or more each time, without recursion.
    brackets = _NOT_BRACKET.sub("", _STRING.sub("", text))
    for _ in range(MAX_JSON_DEPTH):
        brackets = brackets.replace("[]", "").replace("{}", "")
    if brackets:
        raise ValueError(
            f"JSON nested deeper than {MAX_JSON_DEPTH} levels, or brackets that do not match"
        )
