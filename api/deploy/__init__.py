"""A deployment: what its commands do and share, from the secret to the ranks' start."""
