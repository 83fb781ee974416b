"""Every formula as a pure function of arrays: advantages, losses, divergences, estimates of the KL, aggregation."""
