"""The dispatch rules of engines, by which they choose among replicas, and plans for them."""
