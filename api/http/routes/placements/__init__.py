"""Routes of placements, what they answer, and the difference between two."""
