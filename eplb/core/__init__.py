"""The planning problem, prepared once: load, ranks, zones, constraints, dispatch rule, prices."""
