"""Every `python -m jaxrl_llm...` of the README, the pages and the first screen: parsed always, run where it can be."""

import contextlib
import importlib
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from jaxrl_llm.commands.welcome import welcome
from jaxrl_llm.config.flags import load_flags, load_options
from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.config.schema import BY_NAME, SECTIONS
from jaxrl_llm.distributed.devices import named
from jaxrl_llm.tools.migrate import LIBRARIES
from jaxrl_llm.tools.migrate.table import find, table

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"(?:python -m jaxrl_llm[. ]|\bjaxrl-llm )(\w+(?:\.\w+)*)(?![\w.*])(.*)")
WITH_CONFIG = {"train", "evaluate", "compare", "data", "preview", "plan", "verify"}
NO_FLAGS = {"config", "rewards.built_in"}  # they print a page
# What stands for something of the reader's.
STANDS_FOR = {
    "--config=...": "--config=configs/grpo.py",
    "--config=configs/NAME.py": "--config=configs/grpo.py",
    "--config.seed=SEED": "--config.seed=1",
    "--step=STEP": "--step=1",
    "--help": "",
    "--help=all": "",
}
NOT_RUN = {
    "--config.model.path=Qwen/Qwen3-8B": "reads config.json from the hub",
    "--config.model.path=Qwen/Qwen2.5-7B": "reads config.json from the hub",
    "--config.model.path=Qwen/Qwen3-30B-A3B": "a model of the hub; tests/training/test_expert_adapters_training.py",
    "--config.model.path=openai/gpt-oss-20b": "a model of the hub; tests/models/files/test_mxfp4.py",
    "--config.model.path=meta-llama/Llama-3.1-70B-Instruct": "reads config.json from the hub",
    "--config.logging.backends=console,jsonl,wandb,tensorboard": "wandb asks for an account; "
    "tests/training/logging/test_backends.py",
    "--model=HuggingFaceTB/SmolVLM-256M-Instruct": "reads a model of the hub; tests/serving/test_images.py",
    "--push_to_hub=me/my-model": "asks for an account; tests/tools/test_hub.py",
    "--config.export.push_to_hub=me/my-model": "asks for an account; tests/tools/test_hub.py",
    "--png=pictures": "needs matplotlib, which is no dependency; tests/tools/test_report.py",
    "--config=recipes/": "reads models and data of the hub; tests/docs/test_recipes.py",
    "--config=my_config.py": "it names a model of the hub; tests/tools/test_migrate.py",
}


class Command(NamedTuple):
    """A command of a page: the module and its arguments."""

    page: str
    module: str
    arguments: tuple[str, ...]

    @property
    def options(self) -> list[str]:
        """The arguments that are flags, as parsed: without what only stands for something."""
        given = [STANDS_FOR.get(argument, argument) for argument in self.arguments]
        return [argument for argument in given if argument.startswith("--")]


SERVER = "http://localhost:8000/v1"  # of our own, which the test starts


def lines_of_shell(text: str) -> list[str]:
    """The lines of a page in fenced blocks that are no Python or data, and in indented ones; joined at backslashes."""
    inside, language, kept = False, "", []
    for line in text.splitlines():
        fence = re.match(r" *`{3,}(\w*)", line)
        if fence:
            inside, language = not inside, "" if inside else fence[1]
        elif (inside and language in ("", "bash", "sh", "console")) or (not inside and re.match(r" {4,}\S", line)):
            kept.append(line.strip())
    return re.sub(r"\\\n", " ", "\n".join(kept)).splitlines()


def commands_of(page: str, lines) -> list[Command]:
    """The commands of our own in lines of shell, without comments."""
    found = []
    for line in lines:
        for part in re.split(r" && | \| ", line):
            if match := COMMAND.search(part):
                found.append(Command(page, match[1], tuple(shlex.split(match[2], comments=True))))
    return found


def inline(text: str) -> list[str]:
    """The texts in single backquotes."""
    return [span for line in text.splitlines() for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", line)]


def all_commands() -> tuple[list[Command], list[Command]]:
    """Those in blocks, and the others: of running text, the first screen and the docstrings of `configs/`."""
    with contextlib.chdir(ROOT):
        screen = re.sub(r"\\\n", " ", welcome()).splitlines()
    typed = (re.sub(r"(python -m \S+) {2,}.*", r"\1", line) for line in screen if line.startswith("  python"))
    blocks, others = [], commands_of("first screen", typed)
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        blocks += commands_of(page.name, lines_of_shell(text))
        others += commands_of(page.name, inline(text))
    for path in sorted((ROOT / "configs").glob("*.py")):
        lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
        others += commands_of(path.name, (line for line in lines if line.startswith("python -m")))
    return list(dict.fromkeys(blocks)), [command for command in dict.fromkeys(others) if command not in blocks]


BLOCKS, OTHERS = all_commands()
RUN = [command for command in BLOCKS if command.page != "tutorial.md"]  # which is run as a whole


def name_of(command: Command) -> str:
    return f"{command.page}: {command.module} {' '.join(command.arguments)}".strip()


def tutorial_files(folder: Path) -> None:
    """Writes the Python files of the tutorial: the blocks whose first line is a name."""
    text = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        name = re.match(r"# (\w+\.py)\n", code)
        assert name, code
        (folder / name[1]).write_text(code, encoding="utf-8")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Path:
    """A folder with `configs` and the files of the tutorial."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "configs").symlink_to(ROOT / "configs")
    tutorial_files(folder)
    text = (ROOT / "docs" / "callbacks.md").read_text(encoding="utf-8")
    for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", text, re.DOTALL):
        (folder / name).write_text(code, encoding="utf-8")
    return folder


def shell(folder: Path, *arguments: str, devices: int = 1) -> str:
    """The output of `python ARGUMENTS` in `folder`, with this checkout; it must succeed. One line is in its input."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        input="sort:4821=\n",
        text=True,
        capture_output=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, f"{arguments}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@contextlib.contextmanager
def served(folder: Path, *arguments: str) -> Iterator[str]:
    """The line in which `python ARGUMENTS` in `folder` says where it listens; told to end, it must end well."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(
        [sys.executable, *arguments], cwd=folder, env=environment, stderr=subprocess.PIPE, text=True
    ) as server:
        timer = threading.Timer(600, server.kill)
        timer.start()
        assert server.stderr is not None
        line = next((line for line in server.stderr if re.search(r"at http://\S+/v1", line)), "")
        try:
            yield line
        finally:
            server.terminate()
            rest = server.stderr.read()
            timer.cancel()
    assert server.returncode == 0, line + rest


# --- parsed ---


def test_the_pages_have_commands():
    assert len(BLOCKS) > 20 and len(OTHERS) > 30
    assert {"train", "generate", "chat", "evaluate", "export", "preview", "migrate", "plan", "report"} <= {
        c.module for c in BLOCKS
    }


@pytest.mark.parametrize("page", [page.name for page in PAGES] + ["first screen", "configs"])
def test_every_command_is_understood(page, workspace, monkeypatch):
    """Flags exist, values have the right type, and the configuration is valid."""
    monkeypatch.chdir(workspace)
    wrong = []
    for command in BLOCKS + OTHERS:
        if command.page == page or (page == "configs" and command.page.endswith(".py")):
            try:
                understand(command)
            except (ConfigError, ImportError) as error:
                wrong.append(f"{name_of(command)}\n  {error}")
    assert not wrong, "\n".join(wrong)


def understand(command: Command) -> None:
    """Raises ConfigError or ImportError for a command that the program would not take."""
    if command.module in NO_FLAGS:
        importlib.import_module(f"jaxrl_llm.{command.module}")
        assert not command.options
        return
    place = "jaxrl_llm.train" if command.module == "train" else f"jaxrl_llm.commands.{command.module}"
    module = importlib.import_module(place)
    if command.module == "train":
        load_flags(command.options, "", (module.DRY_RUN,))
    elif command.module in WITH_CONFIG:
        options = load_flags(command.options, "", module.FLAGS).options
        if command.module == "plan":
            named(options["device"])
    else:
        load_options(command.options, "", module.FLAGS)


def test_a_wrong_flag_in_a_page_is_found(workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    text = "```bash\npython -m jaxrl_llm.train \\\n  --config=configs/grpo.py --config.batch.prompt=3  # few\n```\n"
    (command,) = commands_of("page", lines_of_shell(text))
    assert command == ("page", "train", ("--config=configs/grpo.py", "--config.batch.prompt=3"))
    with pytest.raises(ConfigError, match=r"config\.batch\.prompts"):
        understand(command)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub and the site give the headings of a page."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_pages_lead_somewhere():
    """To files, and to headings of pages. Files that a benchmark writes into its folder of results are left out."""
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8")):
            if "://" in target or target.startswith("../benchmarks/results/"):
                continue
            path = (page.parent / target).resolve() if target else page
            assert path.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(path), f"{page.name}: {target}#{anchor}"


def test_settings_that_pages_name_exist():
    """Those of other libraries stand in the tables of keys that are migrated."""
    tables = [table(library) for library in LIBRARIES]
    setting = re.compile(rf"`(?:--config\.)?((?:{'|'.join(filter(None, SECTIONS))})\.\w+)(?=[`=])")
    for page in PAGES:
        named = set(setting.findall(page.read_text(encoding="utf-8"))) - {"model.norm", "model.safetensors"}
        unknown = [name for name in named - BY_NAME.keys() if not any(find(entries, name) for entries in tables)]
        assert not unknown, f"{page.name}: {unknown}"


def test_the_map_and_the_navigation_have_every_page():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    missing = [page.name for page in PAGES[1:] if page.name != "index.md" and f"]({page.name})" not in index]
    assert not missing, missing
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    missing = [page.name for page in PAGES[1:] if f"- {page.name}\n" not in navigation]
    assert not missing, missing
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        assert f"](../notebooks/{path.name})" in index, path.name


# --- run ---


@pytest.fixture(scope="module")
def runs(workspace) -> Path:
    """The workspace with what commands read: the runs `grpo` and `grpo_lora`, a file of TRL's, a model's folder."""
    for name in ("grpo", "grpo_lora"):
        shell(workspace, "-m", "jaxrl_llm.train", f"--config=configs/{name}.py:tiny")
    trl = "from trl import GRPOConfig\n\nargs = GRPOConfig(output_dir='out', max_steps=9, num_generations=4)\n"
    (workspace / "FILE").with_suffix(".py").write_text(trl, encoding="utf-8")
    page = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    (workspace / "responses.jsonl").write_text(row, encoding="utf-8")
    score = "def compute_score(solution_str, ground_truth):\n    return float(solution_str == ground_truth)\n"
    (workspace / "my_score.py").write_text(score, encoding="utf-8")
    return workspace


def test_what_is_not_run_is_tested_elsewhere():
    for reason in NOT_RUN.values():
        assert all((ROOT / path).is_file() for path in re.findall(r"\S+\.py", reason)), reason


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(RUN)), ids=[name_of(command) for command in RUN])
def test_every_command_runs(number, runs):
    """With two steps (the `tiny` argument of a config file) and an output folder of its own."""
    command = RUN[number]
    reasons = [reason for start, reason in NOT_RUN.items() if any(x.startswith(start) for x in command.arguments)]
    if reasons:
        pytest.skip(reasons[0])
    steps = 5 if any("profile_steps" in argument for argument in command.arguments) else None
    arguments = [shortened(argument, number) for argument in command.arguments]
    if command.module == "train" and not any("output_dir" in argument for argument in arguments):
        arguments.append(f"--config.output_dir=runs/docs_{number}")
    if steps:
        arguments.append(f"--config.total_steps={steps}")
    several = (".mesh.", ".rollout.devices")
    meshed = command.module == "train" and any(key in argument for argument in arguments for key in several)
    if meshed and not any("batch.prompts" in argument for argument in arguments):
        arguments.append("--config.batch.prompts=8")
    module = (f"jaxrl_llm.{command.module}",)
    if command.module not in {"train", *NO_FLAGS}:
        module = ("jaxrl_llm", command.module)
    if command.module == "serve":
        with served(runs, "-m", *module, *arguments) as line:
            assert line
        return
    with contextlib.ExitStack() as stack:
        if any(SERVER in argument for argument in arguments):
            line = stack.enter_context(served(runs, "-m", "jaxrl_llm", "serve", "runs/grpo", "--port=0"))
            (found,) = re.findall(r"http://\S+/v1", line)
            arguments = [argument.replace(SERVER, found) for argument in arguments]
        assert shell(runs, "-m", *module, *arguments, devices=8 if meshed else 1).strip()


def shortened(argument: str, number: int) -> str:
    """The argument with what the reader would write in place of FOLDER, RUN and FILE, and the tiny configuration."""
    if re.fullmatch(r"--config=(configs/\w+\.py|[a-z]\w*)", argument):
        return f"{argument}:tiny"
    known = {
        "--output=FOLDER": f"--output=exported_{number}",
        "--output=my_config.py": f"--output=migrated_{number}.py",  # there is one of the tutorial's
        "--run=RUN": "--run=runs/grpo_lora",
        "--config=configs/sdpo.py:start": "--config=configs/sft_tiny.py:tiny",  # that with other rows, and more of them
        "--config.model.path=FOLDER": "--config.model.path=runs/grpo/hf",
        "--port=8000": "--port=0",  # any that is free
        "FILE": "FILE.py",
        "runs/gspo": "runs/grpo",
        "runs/dapo": "runs/grpo_lora",
    }
    return known.get(argument, argument)


@pytest.mark.slow
def test_tutorial_from_an_empty_folder(tmp_path):
    """Every block in the order of the page; training is cut to four steps."""
    tutorial_files(tmp_path)
    text, short = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8"), "--config.total_steps=4"
    printed = {}
    for line in re.findall(r"^python .*$", "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL)), re.MULTILINE):
        arguments = shlex.split(line)[1:]
        cut = [short] if arguments[:2] == ["-m", "jaxrl_llm.train"] and len(arguments) > 2 else []
        printed[line] = shell(tmp_path, *arguments, *cut)
    assert len(printed) == 11
    assert "--config=grpo" in printed["python -m jaxrl_llm.train"]
    (completion,) = [out for line, out in printed.items() if "generate" in line]
    assert re.fullmatch(r"\d+\n", completion)
    assert re.match(r"sort:4821=\d", printed["python use_it.py"])
    assert "<html" in (tmp_path / "report.html").read_text(encoding="utf-8")[:2000]
