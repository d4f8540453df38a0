"""Questions that one command answers: what to deploy, at which batch, and what a failure costs."""
