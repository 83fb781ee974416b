"""Evaluation of a policy during training and by itself: sets, sampling, metrics."""
