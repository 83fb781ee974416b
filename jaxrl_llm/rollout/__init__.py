"""The sampling engine: a prompt is computed once for its K rows, and rows that end give their slots to others."""
