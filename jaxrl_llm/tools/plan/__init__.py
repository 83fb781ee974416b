"""What a run needs, from shapes and compiled programs alone."""
