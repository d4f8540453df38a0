"""Reads the store for every view: snapshot, readiness, tallies."""
