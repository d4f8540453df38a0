"""A shared expert at home or on light ranks: rows of emulated ranks, and times on one GPU."""
