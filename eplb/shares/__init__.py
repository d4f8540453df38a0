"""Token shares of replicas: solver, re-split of a placement, traffic between nodes."""
