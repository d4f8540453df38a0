"""Models of other libraries, served from a rank's expert bank."""
