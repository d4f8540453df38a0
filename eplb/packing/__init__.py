"""Packing of experts onto ranks and of expert groups onto nodes, and the zones that result."""
