"""The network: one decoder, its families, and their Hugging Face files."""
