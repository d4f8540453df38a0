"""Samples of single ranks become load windows, by steps or by time."""
