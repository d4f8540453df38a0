"""The deployments that one service shows, and how a path chooses one of them."""
