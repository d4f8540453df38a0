"""Checkpoints on disk: model families described as data, and one reader for all of them."""
