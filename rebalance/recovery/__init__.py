"""After the death of a rank: survivors agree on one placement."""
