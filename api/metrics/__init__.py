"""Prometheus metrics, the dashboard and the alert rules."""
