"""Memory, traffic and least time of a run, from shapes and compiled programs alone."""
