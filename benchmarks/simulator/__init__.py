"""The simulator: its speed over a day of windows, and published figures that it should give."""
