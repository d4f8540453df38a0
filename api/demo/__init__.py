"""``eplb demo``: a deployment on one machine, with an engine to copy."""
