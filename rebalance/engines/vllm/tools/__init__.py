"""Beside balancing: replay of traces as routing, and the check of vLLM's options."""
