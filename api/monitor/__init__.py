"""Reads the store for every view: state, verdict, history, counters."""

KEPT_WINDOWS = 64  # windows with their matrices: 8 MB at 58 x 256
KEPT_SCORES = 4096
