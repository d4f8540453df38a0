"""``eplb demo``: a whole deployment on one machine."""
