"""Checkpoints: saved, verified, restored; and the files a finished run leaves."""
