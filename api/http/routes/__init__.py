"""Groups of routes of the admin API that have modules of their own."""
