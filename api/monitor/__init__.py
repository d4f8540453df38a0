"""Reads the store for every view: state, verdict, history, counters."""
