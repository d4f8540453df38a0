"""Forecasts of the next load window, and their backtest."""
