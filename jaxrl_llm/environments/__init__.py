"""Multi-turn environments and tools: what answers the policy between its turns."""
