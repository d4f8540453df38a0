"""Descriptions of the model families, one constant each."""
