"""Reads the store for every view: snapshot, verdict, tallies."""
