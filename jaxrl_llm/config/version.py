"""The version of the package, which errors, model cards and `jaxrl_llm.__version__` name."""

__version__ = "0.3.0"
