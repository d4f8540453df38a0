"""Imbalance, the part of it that is noise, and the lower bound of any placement."""
