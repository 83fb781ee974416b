"""Where everything meets: experience -> Batch -> update -> State."""
