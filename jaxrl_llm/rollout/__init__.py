"""The in-process sampling engine."""
