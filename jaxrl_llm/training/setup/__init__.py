"""From the configuration to what a run is made of: small frozen dataclasses, and the parts built from them.

`run.py` builds a whole run; `specs.py`, `objectives.py`, `evaluation.py` and `records.py` resolve the sections,
`memory.py` what depends on the devices. Nothing below this folder reads the configuration.
"""
