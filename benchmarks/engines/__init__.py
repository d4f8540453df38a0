"""Plug-ins for serving engines, against the engines themselves."""
