"""Teachers of distillation: loaded beside the policy or served, with its tokenizer or another."""
