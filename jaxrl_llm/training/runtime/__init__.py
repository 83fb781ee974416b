"""The services around the loop: callbacks, preemption, the watchdog, the profiler."""
