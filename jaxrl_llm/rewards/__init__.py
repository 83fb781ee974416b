"""Rewards: one number for each completion, from functions, graders, sandboxed tests, judges or models, on the host."""
