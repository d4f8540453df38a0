"""One reader of the store behind every view: snapshot, readiness, tallies."""
