"""Ranks that decode while experts move; soaks, and deaths."""
