"""Rollouts: who samples them (engine, agents, a function, processes), which are kept, and the way to the learner.

| file | has |
|---|---|
| `worker.py` | steps 2 and 3 of an online algorithm: completions, of the engine or of one of the next, and rewards |
| `external_rollout.py` | the user's function, what it is given (`rollout_trainer.py`), in all processes (`rounds.py`) |
| `agent_rollout.py` | programs that talk to an endpoint; `episode_agent.py` is one, which plays environments |
| `partial_rollouts.py` | the engine over several steps |
| `arrivals.py` | policies that come to rollouts under way, written down |
| `dynamic_sampling.py`, `replay.py` | other groups in the place of those that teach nothing |
| `rollout_queue.py` | batches that a thread makes ahead |
| `file_queue.py` | batches of processes that only sample (`sampler.py`), by files (`rollout_files.py`) |
| `experience.py` | what goes through the queue, and what is trained on |
"""
