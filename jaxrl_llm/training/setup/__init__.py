"""From the configuration to what a run is made of: small frozen dataclasses, and the parts built from them.

`run.py` builds a whole run, of objects too that stand in place of names (`given.py`): on a mesh (`mesh.py`), of models
(`models.py`), teachers (`teachers.py`) and the sources of their batches (`sources.py`), those of samples by a worker
(`worker.py`). `specs.py`, `objectives.py`, `evaluation.py` and `records.py` resolve the sections, `data.py` what
follows from the rows, `learning_rate.py` what follows from the model, `memory.py` what depends on the devices.
`resume.py` says from which checkpoint a run starts, and whether it may. The rest of `training` takes what is made here;
beside this folder only an entry (`sampler.py`, as train.py is one) and what hands settings on or compares them
(callbacks, and `checkpoint/settings.py`) have a configuration.
"""
