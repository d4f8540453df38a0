"""Why an expert is where it is, in figures and in words."""
