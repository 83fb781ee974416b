"""Commands: a file each, run as `jaxrl-llm COMMAND`; train is train.py, dry_run a flag of it, welcome the overview."""
