"""Old samples are rolled up, then pruned."""
