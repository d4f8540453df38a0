"""Decisions on a single batch, as pure functions of its counts: split, pulls, shared expert."""
