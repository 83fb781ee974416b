"""Objectives: what an update minimises, from a network and a batch to a loss and its metrics."""
