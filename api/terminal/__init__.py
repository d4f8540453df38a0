"""What processes print: the live picture, escaped text, logs."""
