"""The split of each batch, measured: its balance and its time."""
