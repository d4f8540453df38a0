"""What of an operator's demands a plan can meet: cordons, pins and failure domains."""
