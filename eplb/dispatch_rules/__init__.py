"""How engines choose among replicas, and plans that are even under such a rule."""
