"""Commands as child processes: start, reports and supervision."""
