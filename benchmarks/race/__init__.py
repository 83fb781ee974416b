"""Time to reward and to a loss, side by side: see `__main__`."""
