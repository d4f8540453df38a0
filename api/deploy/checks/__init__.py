"""``eplb check``: what is looked at before anything starts, and what a deployment takes."""
