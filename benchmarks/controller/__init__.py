"""Measures of the controller: its turn, its decisions over time, and its fail-over."""
