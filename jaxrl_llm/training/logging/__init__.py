"""What a run reports: metrics, console, tracker backends, health warnings."""
