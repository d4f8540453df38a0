"""The admin API: routes, limits, and the page."""
