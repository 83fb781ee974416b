"""Worker processes: rewards that compute run in some, and in others, behind walls, what may hang on a model's text."""
