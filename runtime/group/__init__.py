"""Process groups: rendezvous, agreement at start-up, listeners, launch."""
