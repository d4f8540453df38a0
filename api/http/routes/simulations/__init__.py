"""Simulations: routes, and the one that runs in a process of its own."""
