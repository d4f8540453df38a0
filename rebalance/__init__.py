"""rebalance."""
