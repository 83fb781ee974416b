"""Rewards: the built-in functions and the grader that calls them, and the user's own, on the host (numpy only)."""
