"""Output of processes: the live picture, escaped text, logs."""
