"""Self-contained HTML pages of comparisons, sweeps and recommendations."""
