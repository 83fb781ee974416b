"""The way to go on with a run that ends before it is done, in words for messages."""

from jaxrl_llm.config.schema import NEW

_words = "start the same command again"


def begin(resume: str, asked: str, output_dir: str) -> None:
    """Notes how the run of this process was started: `checkpoint.resume`, and output_dir as asked for and as it is."""
    global _words
    changes = ["checkpoint.resume=auto"] if resume == "never" else []
    changes += [f"output_dir={output_dir}"] if NEW in asked else []
    _words = f"start it again with {' and '.join(changes)}" if changes else "start the same command again"


def way_on() -> str:
    """What a message asks for: the same command, but where that would begin anew."""
    return _words
