"""What telemetry costs the step path, the disk and Redis."""
