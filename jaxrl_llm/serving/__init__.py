"""Serving: requests that come and go share one slot grid of the engine, behind an HTTP interface of OpenAI's form."""
