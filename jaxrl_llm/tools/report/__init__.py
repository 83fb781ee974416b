"""The parts of `python -m jaxrl_llm report`: reading runs, the page, and pictures."""
