"""Host-side data: sources, chat rendering, tokenising, collating, packing and the resumable pipeline (numpy only)."""
