"""From the configuration to what a run is made of: small frozen dataclasses, and the parts built from them.

`run.build` makes a `Run`, in this order:

| file | of the configuration, and the objects that stand in place of its names (`given.py`) |
|---|---|
| `data.py` | tokenizer, rows, evaluation sets, and the number of steps |
| `models.py` | the policy and PPO's critic, on the devices of `mesh.py` |
| `worker.py` | `Setup`, what is open by then, of which all else is built; and what samples for the next two |
| `sources.py` | the batches: of samples (producer, learner, `teachers.py`, the queue between them), of rows, or both |
| `evaluation.py` | the evaluations, by the loss or by samples |
| `run.py` | the optimizers, the updates, and the state before the first step |

`specs.py`, `objectives.py` and `records.py` resolve the sections, `learning_rate.py` what follows from the model,
`memory.py` what depends on the devices. `resume.py` says from which checkpoint a run starts, and whether it may. The
rest of `training` takes what is made here; beside this folder only an entry (`sampler.py`, as train.py is one) and what
hands settings on or compares them (callbacks, and `checkpoint/settings.py`) have a configuration.
"""
