"""A deployment as its commands start it: from a checkpoint to the first token."""
