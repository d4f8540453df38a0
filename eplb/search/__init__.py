"""Local search on one placement: moves, replica changes, perturbation; compiled."""
