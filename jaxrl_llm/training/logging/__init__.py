"""The reports of a run: metrics, console, trackers, health warnings."""
