"""The controller: load in, plans and migrations out. It imports nothing of the runtime."""
