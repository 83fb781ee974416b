"""Checkpoints that are saved, verified and restored, and the files of a finished run."""
