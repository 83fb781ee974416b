"""Packing: several rows in one row of the network, with shared prompts computed once."""
