"""The same workloads in other libraries; each file runs in that library's own environment."""
