"""Samples and roll-ups as bytes."""
