"""Engines' files: speed and memory of the readers, and readers under mutated input."""
