"""What the plug-ins of all engines do alike; nothing here knows an engine's objects.

guards.refusals -> start.join -> tap -> store_process -> store_link (a process) -> store
                                  |
                                  +---> planning -> replica_weights -> the engine's map
"""
