"""Post-training of language models in JAX: reinforcement learning, preferences and supervised fine-tuning."""

__version__ = "0.1.0"
