"""Around the loop: callbacks, preemption, the watchdog, the profiler."""
