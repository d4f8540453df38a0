"""A rank reports its samples: the reporter thread, and the spool on disk behind it."""
