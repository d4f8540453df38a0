"""Dispatchers: all-to-all, DeepEP, and the self-test that each passes at start-up."""
