"""Prints docs/configuration.md: `python -m jaxrl_llm.config`."""

import sys

from jaxrl_llm.config.tree import reference

if __name__ == "__main__":
    sys.stdout.write(reference())
