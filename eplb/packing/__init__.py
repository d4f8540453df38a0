"""Packing experts onto ranks, groups onto nodes, and the zones that result."""
