"""Plug-ins for serving engines: loaded by the engine, inert unless a deployment is named."""
