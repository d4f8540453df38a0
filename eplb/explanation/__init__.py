"""Explanation of a plan for one expert or one layer, as figures and as text."""
