"""Engines' files in and out: load dumps to histories, placements to and from files."""
