"""Measures of the service and the page that an operator keeps open."""
