"""From configurations of TRL, verl, axolotl and Harmony to ours: tables of keys, and the rules that join several.

`reading.py` says what a file sets, the tables (`*_keys.py`) name every key with ours and what differs, the rules
(`trl.py`, `verl.py`, `axolotl.py`, `harmony.py`) fill a `Draft`, and that is written as a config file.
"""
