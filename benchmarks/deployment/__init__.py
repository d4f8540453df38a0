"""A deployment as its commands start it: soaks, first tokens, what a step costs."""
