"""The state store: what all processes of a deployment share, and the back ends that keep it."""
