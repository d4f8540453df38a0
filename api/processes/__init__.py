"""Commands as child processes: start, reports, supervision, the deployment lease."""
