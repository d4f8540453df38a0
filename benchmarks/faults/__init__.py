"""Faults injected from outside into a live demo."""
