"""Commands: a file each, run as `python -m jaxrl_llm COMMAND` or `jaxrl-llm COMMAND`."""
