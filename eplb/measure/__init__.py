"""Imbalance of a placement, and the lower bound of any placement."""
