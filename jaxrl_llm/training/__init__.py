"""Training: experience -> Batch -> update -> State."""
