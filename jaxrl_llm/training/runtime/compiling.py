"""`CompileStatus`: what XLA compiles at the moment, lines about the programs that take long, and the time it took."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax

from jaxrl_llm.distributed.host_memory import return_memory
from jaxrl_llm.training.logging.stopwatch import Stopwatch

EVENT = "/jax/core/compile/backend_compile_duration"  # a scalar where a compilation begins, a duration where it ends
STAGES = (EVENT, "/jax/core/compile/jaxpr_trace_duration", "/jax/core/compile/jaxpr_to_mlir_module_duration")
LONG = 5.0  # seconds of a compilation that is worth a line
HEAVY = 1.0  # of one that leaves memory worth returning: of an update of SmolLM2-135M 0.27 GB
# The thread that decodes what agents ask for (`serving.queue.THREAD`), and the phase in which a step waits for it.
DECODING, ROLLOUT = "decoding", "rollout"


class CompileStatus:
    """A context manager that calls `show` with the programs that are compiled now (an empty text: none) and the
    time.monotonic() at which the oldest of them began, and `note` with a line when one has taken `LONG` seconds, and
    another when that one is done.

    Both are called on the threads that compile, and `note` on one of its own. What tracing and compiling takes on the
    thread that made this counts in `watch` as the phase compile, and so does what the thread that decodes for agents
    takes while the other waits for their rollout; programs that others compile hold nobody up.
    """

    def __init__(self, show: Callable[[str, float], None], note: Callable[[str], None], watch: Stopwatch):
        self._show, self._note, self._watch = show, note, watch
        self._thread = threading.get_ident()
        # (begin, seconds) of the stages on a thread, of which later ones may hold some.
        self._counted: dict[int, list[tuple[float, float]]] = defaultdict(list)
        self._lock = threading.Lock()
        self._running: dict[tuple[int, str], tuple[float, threading.Timer]] = {}

    def __enter__(self) -> "CompileStatus":
        jax.monitoring.register_scalar_listener(self._begin)
        jax.monitoring.register_event_duration_secs_listener(self._end)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_scalar_listener(self._begin)
        jax.monitoring.unregister_event_duration_listener(self._end)
        with self._lock:  # other threads may still compile
            for began_and_timer in self._running.values():
                began_and_timer[1].cancel()

    def _begin(self, event: str, value: float, **facts: Any) -> None:
        if event != EVENT:
            return
        name = _name(facts)
        timer = threading.Timer(LONG, self._note, (f"compiling {name} ...",))
        timer.daemon = True
        with self._lock:
            self._running[threading.get_ident(), name] = time.monotonic(), timer
            self._show_running()
        timer.start()

    def _end(self, event: str, duration_secs: float, **facts: Any) -> None:
        thread, key = threading.current_thread(), (threading.get_ident(), _name(facts))
        waited_for = thread.name == DECODING and self._watch.phases[-1:] == [ROLLOUT]
        if event in STAGES and (thread.ident == self._thread or waited_for):
            begin, inside, counted = time.perf_counter() - duration_secs, 0.0, self._counted[key[0]]
            while counted and counted[-1][0] >= begin:  # a function that is traced within another one
                inside += counted.pop()[1]
            counted.append((begin, duration_secs))
            self._watch.charge("compile", max(duration_secs - inside, 0.0))
        if event != EVENT or key not in self._running:
            return
        with self._lock:
            began, timer = self._running.pop(key)
            self._show_running()
        timer.cancel()
        if (seconds := time.monotonic() - began) > HEAVY:
            return_memory()  # of the compiler, before the program needs it for its arrays
        if seconds > LONG:
            self._note(f"compiled {key[1]} in {seconds:.0f} s")

    def _show_running(self) -> None:
        names, began = [name for _, name in self._running], [began for began, _ in self._running.values()]
        self._show(f"compiling {', '.join(names)}" if names else "", min(began, default=time.monotonic()))


def _name(facts: dict[str, Any]) -> str:
    """The name of the function that is compiled: JAX says `jit(update)`."""
    return str(facts.get("fun_name", "a program")).removeprefix("jit(").removesuffix(")")
