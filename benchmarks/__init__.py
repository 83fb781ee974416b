"""Measurements that take minutes: learning curves, and speed against peers and limits."""
