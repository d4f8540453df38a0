"""How far the load has drifted, and how much of that is chance."""
