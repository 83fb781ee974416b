"""Evaluation of a policy, during training and by itself: held-out sets, sampling, and the metrics over prompts."""
