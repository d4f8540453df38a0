"""A deployment without the demo: what its commands share, from the secret to the ranks' start."""
