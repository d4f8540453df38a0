"""Escapes untrusted text for output: on one line, and without terminal control sequences."""

from __future__ import annotations

import re

from rich.console import Console

# C0 and C1 controls, DEL, line and paragraph separators, marks and overrides of direction, and
# surrogates, which no stream can encode.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    """Escape what moves the cursor, begins a line or changes the direction of the text."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def print_error(sentence: object) -> None:
    """Print a refusal on the error stream."""
    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    errors.print(printable(f"eplb: {sentence}"), markup=False)
