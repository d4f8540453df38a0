"""How fast experts move, phase by phase and link by link."""
