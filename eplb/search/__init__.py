"""Compiled searches on one placement: packing, local search, repair, and under an engine's rule."""
