"""Benchmarks: each prints the table that a report quotes; run them with ``python -m``."""
