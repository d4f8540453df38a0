"""Drift of the load, and its noise."""
