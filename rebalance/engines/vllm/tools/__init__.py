"""Beside balancing: replay of traces as routing, HTTP routes, and the check of vLLM's options."""
