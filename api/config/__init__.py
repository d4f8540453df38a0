"""The tree of settings: sections, names, effective values, the reference page."""
