"""Orbax, without what its logging does to the program's: it is imported from here."""

import logging
from types import SimpleNamespace

import absl.logging

# Orbax logs by absl, which gives a root logger without handlers one, at Orbax's import already: every message of a
# library would appear in its form, and the user's own logging.basicConfig, later, would do nothing.
absl.logging.logging = SimpleNamespace(**vars(logging) | {"basicConfig": lambda: None})  # pyright: ignore[reportAttributeAccessIssue]

import orbax.checkpoint as ocp  # noqa: E402
from orbax.checkpoint import checkpoint_managers as policies  # noqa: E402

__all__ = ["ocp", "policies"]

# Orbax logs each failure several times with its traceback, and raises it; `Checkpoints` tells it in a line.
logging.getLogger("absl").addFilter(lambda record: record.levelno < logging.ERROR or "orbax" not in record.pathname)
logging.getLogger("asyncio").addFilter(lambda record: "orbax" not in record.getMessage())
