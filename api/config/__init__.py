"""The tree of settings of the commands, live settings, and the reference page."""
