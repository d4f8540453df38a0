r"""What the plug-ins of all engines do alike; nothing here knows an engine's objects.

start.join -> guards.refusals -> tap -> store_link -> store
                                  \-> planning -> replica_weights -> the engine's map
"""
