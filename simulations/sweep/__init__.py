"""Sweeps: a grid of configurations over one load, on all cores or on Ray, resumable, in Parquet."""
