"""Mixers: how the tokens of a row read each other, each kind with its cache behind one protocol (`mixer.py`)."""
