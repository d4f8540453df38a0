"""Memory of expert weights: shared, symmetric; and the digests of records."""
