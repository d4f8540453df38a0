"""Why an expert is where it is, as figures and as text."""
