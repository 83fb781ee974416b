"""The overview that `jaxrl-llm` prints without a command: a first command, the configurations, and all commands."""

import re
import shutil
import textwrap
from pathlib import Path

from jaxrl_llm.config.flags import shipped_configs

# Each command is the file of its name in this folder, but `train`, which is jaxrl_llm/train.py.
COMMANDS = {
    "train": "Train a language model.",
    "generate": "Sample completions of prompts.",
    "chat": "Talk to a model, or to two side by side.",
    "serve": "Serve a model over HTTP, to any client of the OpenAI API.",
    "evaluate": "Measure a model on held-out prompts, or the responses in a file.",
    "compare": "Compare two models on the same prompts.",
    "export": "Write a checkpoint as a Hugging Face folder, and push it to the hub.",
    "add_tokens": "Add tokens to the vocabulary of a model.",
    "stages": "Train in stages, each from the model of an earlier one.",
    "preview": "Show the data of a run as the model will see it.",
    "plan": "Plan the memory, time and traffic of a run on devices that are not at hand.",
    "verify": "Verify that the numbers of a run do not depend on how they are computed.",
    "report": "Write an HTML page of one or several runs.",
    "migrate": "Convert a configuration of another library to a config file.",
}


def welcome() -> str:
    """The overview as text: config files in `./configs`, the shipped ones by name, and the commands.

    Config files are read for the first line of their docstring, not run.
    """
    local = {str(path): path for path in sorted(Path("configs").glob("*.py"))}
    here = {path.resolve() for path in local.values()}
    files = local | {name: path for name, path in shipped_configs().items() if path.resolve() not in here}
    texts = {name: path.read_text(encoding="utf-8", errors="replace") for name, path in files.items()}
    # All shipped configurations train the same model: without it and the papers their differences fit in a line.
    common = re.compile(r" \([^()]*\d{4}\.\d{5}[^()]*\)| (on|from) the embedded model( and task( of grpo\.py)?)?")
    configs = {
        name: common.sub("", text.split("\n")[0].strip('"'))
        for name, text in texts.items()
        if "\ndef get_config(" in text
    }
    start = "configs/grpo.py" if "configs/grpo.py" in configs else "grpo"
    return "\n".join(
        [
            "jaxrl_llm trains language models: reinforcement learning, preferences, supervised fine-tuning.",
            "",
            "Start here: GRPO on a small model that the package brings, without GPU or download, in a few minutes:",
            "",
            f"  python -m jaxrl_llm.train --config={start}",
            "",
            "The same with two steps, to see that everything works, and with a model and prompts of your own:",
            "",
            f"  python -m jaxrl_llm.train --config={start}:tiny --config.output_dir=runs/try",
            f"  python -m jaxrl_llm.train --config={start} --config.output_dir=runs/mine --config.model.path=FOLDER \\",
            "      --config.data.path=prompts.jsonl --config.rewards.functions=my_rewards.py:score",
            "",
            "Configurations, each for `--config=`:",
            *_columns(configs),
            "",
            "Commands, each with `--help`; installed, `jaxrl-llm` stands for `python -m jaxrl_llm`:",
            *_columns({f"python -m jaxrl_llm {name}": summary for name, summary in COMMANDS.items()}),
            "",
            "Every setting is listed by `python -m jaxrl_llm.train --help=all`. Documentation: docs/index.md, and",
            "https://jaxrl-llm.github.io/jaxrl_llm/.",
            "",
        ]
    )


def _columns(summaries: dict[str, str]) -> list[str]:
    """A line for each name and its summary, shortened to the width of the terminal."""
    column = max(map(len, summaries), default=0) + 2
    width = max(40, min(shutil.get_terminal_size((120, 24)).columns, 120) - column - 2)
    return [
        f"  {name:<{column}}{textwrap.shorten(text, width, placeholder=' ...')}" for name, text in summaries.items()
    ]
