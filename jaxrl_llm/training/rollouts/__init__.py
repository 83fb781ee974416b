"""Rollouts: who samples them (engine, agents, a function, processes), which are kept, and the way to the learner."""
