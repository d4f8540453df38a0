"""`eplb shadow`: the command, its loop, and the record endpoints of an engine."""
