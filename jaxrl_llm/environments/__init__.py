"""Multi-turn rollouts: environments and tools answer the policy's turns, many episodes at once, on the host."""
