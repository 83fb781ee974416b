"""Checks of settings against each other, by section, and what follows from several of them."""
