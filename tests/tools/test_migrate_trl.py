"""Scripts of TRL 1.16: arguments of the trainers themselves, and functions and classes that are given to them."""

import ast
import importlib.util
import json
import re
from pathlib import Path

import pytest

import jaxrl_llm
from jaxrl_llm.config import assign
from jaxrl_llm.config.resolve import resolve
from jaxrl_llm.data.formats.lookup import find as find_format
from jaxrl_llm.data.sources import load
from jaxrl_llm.tools.migrate import migrate
from jaxrl_llm.tools.migrate.table import find, rules, table


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Every test works in a folder of its own, where configs and their functions are written."""
    monkeypatch.chdir(tmp_path)


def migrated(script):
    """The configuration of a script, and the text of its file with single spaces."""
    Path("script.py").write_text(script)
    config, text = migrate("script.py", output="config.py")
    return config, " ".join(text.replace("#", "").split())


def test_every_argument_of_every_trainer_is_known():
    """Read from the sources of the TRL that is installed, as importing all of it takes long."""
    (root,) = importlib.util.find_spec("trl").submodule_search_locations
    known, by_position, seen = table("trl"), rules("scripts")["trl"], 0
    for file in (*Path(root).glob("trainer/*_trainer.py"), *Path(root).glob("experimental/*/*_trainer.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name in by_position:
                made = next((part for part in node.body if getattr(part, "name", "") == "__init__"), None)
                if isinstance(made, ast.FunctionDef) and made.args.args[1:]:  # others are as the class they build on
                    names, seen = [argument.arg for argument in made.args.args[1:]], seen + 1
                    assert not [name for name in names if find(known, name) is None], node.name
                    assert by_position[node.name].split() == names[: len(by_position[node.name].split())], node.name
    assert seen >= 18


@pytest.mark.parametrize(
    ("options", "quantize"),
    [
        ("load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_compute_dtype=torch.bfloat16", "nf4"),
        ("load_in_4bit=True, bnb_4bit_quant_type='fp4'", "int4"),
        ("load_in_4bit=True", "int4"),  # fp4 is the default of bitsandbytes, nf4 that of TRL's own arguments
        ("load_in_8bit=True, llm_int8_threshold=6.0", "int8"),
    ],
)
def test_a_trainer_that_quantises_its_model(options, quantize):
    config, text = migrated(
        "import torch\nfrom peft import LoraConfig\nfrom transformers import BitsAndBytesConfig\n"
        "from trl import SFTConfig, SFTTrainer\n"
        f"bnb = BitsAndBytesConfig({options})\n"
        "SFTTrainer('org/m', SFTConfig(max_steps=2), train_dataset=load_dataset('d', split='train'),\n"
        "           quantization_config=bnb, peft_config=LoraConfig(r=4, target_modules='all-linear')).train()\n"
    )
    assert (config.model.quantize, config.lora.rank) == (quantize, 4)
    assert "no known key" not in text and "script runs" not in text
    assert ("nf4' loses less" in " ".join(text.split())) == (quantize == "int4")


def test_a_quantisation_that_is_made_when_the_script_runs():
    config, text = migrated(
        "from trl import SFTConfig, SFTTrainer\n"
        "SFTTrainer('org/m', SFTConfig(max_steps=2), train_dataset=load_dataset('d', split='train'),\n"
        "           quantization_config=chosen()).train()\n"
    )
    assert config.model.quantize == "none" and "quantization_config = chosen() is not read: set model.quantize" in text


@pytest.mark.parametrize(
    ("functions", "given", "text"),
    [
        ("EOS = '</s>'\ndef written(row):\n    return row['q'] + row['a'] + EOS\n", "written", "1+1=2</s>"),
        ("", "lambda row: f\"{row['q']} {row['a']}\"", "1+1= 2"),
        ("from json import dumps\n", "dumps", '{"q": "1+1=", "a": "2"}'),
    ],
)
def test_a_function_that_makes_the_text_of_a_row(functions, given, text):
    config, written = migrated(
        f"from trl import SFTConfig, SFTTrainer\n{functions}"
        "SFTTrainer('org/m', SFTConfig(max_steps=2), train_dataset=load_dataset('d', split='train'),\n"
        f"           formatting_func={given}).train()\n"
    )
    assert resolve(config.data.format, {})({"q": "1+1=", "a": "2"}) == {"text": text}
    assert config.data.loss_on == "all" and "no known key" not in written


def test_a_function_that_makes_the_text_of_what_another_makes_of_a_row():
    config, text = migrated(
        "from trl import SFTConfig, SFTTrainer\nrows = load_dataset('d', split='train')\n"
        "def question(row):\n    return {'q': row['question'].strip()}\n"
        "def written(row):\n    return row['q'] + MARK\n"
        "rows = rows.map(question)\nMARK = tokenizer.eos_token\n"
        "SFTTrainer('org/m', SFTConfig(max_steps=2), train_dataset=rows, formatting_func=written).train()\n"
    )
    assert "text_of reads MARK, which only the script makes: define it in" in text
    companion = Path("config_functions.py")
    companion.write_text(companion.read_text() + "\n\nMARK = '!'\n")
    assert resolve(config.data.format, {})({"question": " why "}) == {"text": "why!"}


def test_what_is_learned_by_a_collator_of_earlier_versions():
    config, text = migrated(
        "from trl import DataCollatorForCompletionOnlyLM, SFTConfig, SFTTrainer\n"
        "collator = DataCollatorForCompletionOnlyLM('### Answer:', tokenizer=tokenizer)\n"
        "SFTTrainer('org/m', SFTConfig(max_steps=2), train_dataset=load_dataset('d', split='train'),\n"
        "           data_collator=collator).train()\n"
    )
    assert config.data.loss_on == "completion" and "learns what follows its template" in text


ENVIRONMENT = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

class Base:
    def get_reward(self) -> float:
        return float(self.count == 10)

class Counter(Base):
    def reset(self, seed=3, **row):
        self.count = seed % 10
        return f"Start at {self.count}."

    def increment(self, step: int) -> str:
        '''Increments the counter.

        Args:
            step: By how much.
        '''
        self.count += step
        return str(self.count)

class Plain:
    def reset(self, **row): ...

    def wait(self) -> str:
        '''Waits.'''
        return "waited"

def short(completions, **columns):
    return [-float(len(completion)) for completion in completions]

"""


@pytest.mark.parametrize(
    ("arguments", "name", "functions", "weights", "path"),
    [
        ("environment_factory=Counter", "Counter", ("environment",), (), "task:seeds"),
        (
            "reward_funcs=short, args=GRPOConfig(max_steps=2, reward_weights=[0.5]), environment_factory=Counter",
            "Counter",
            ("config_functions.py:short", "environment"),
            (0.5, 1.0),
            "task:seeds",
        ),
        (
            "reward_funcs=[short], environment_factory=Plain, train_dataset=load_dataset('d', split='train')",
            "Plain",
            ("config_functions.py:short",),
            (),
            "d",
        ),
        (
            "environment_factory={'count': Counter, 'plain': Plain}, train_dataset=load_dataset('d')['train']",
            "made_1",
            ("environment",),
            (),
            "d",
        ),
    ],
)
def test_environments(arguments, name, functions, weights, path):
    script = f"{ENVIRONMENT}\nargs = GRPOConfig(max_steps=2)\nGRPOTrainer('org/m', {arguments}).train()\n"
    config, text = migrated(script)
    assert config.environment.name == f"config_functions.py:{name}"
    assert (config.rewards.functions, config.rewards.weights, config.data.path) == (functions, weights, path)
    assert ("the column seed" in text) == (path == "task:seeds") and "no known key" not in text
    made = resolve(config.environment.name, {})
    assert sorted(made) == ["count", "plain"] if isinstance(made, dict) else made.__name__ == name


def test_parts_of_an_object_that_a_script_makes():
    """As TRL's HarborSpec, whose attributes are the arguments of a trainer."""
    config, _ = migrated(
        "from dataclasses import dataclass\nfrom trl import GRPOConfig, GRPOTrainer\n"
        "@dataclass\nclass Spec:\n    size: int\n    def made(self):\n        return [self.size]\n"
        "    def reward(self, completions, **columns):\n        return [self.size for _ in completions]\n"
        "spec = Spec(3)\n"
        "GRPOTrainer('org/m', spec.reward, GRPOConfig(max_steps=2), train_dataset=load_dataset('d', split='train'),\n"
        "            environment_factory=spec.made).train()\n"
    )
    assert resolve(config.rewards.functions[0], {})(completions=["a", "b"]) == [3, 3]
    assert resolve(config.environment.name, {})() == [3]


def test_an_imported_environment_may_have_a_reward():
    config, text = migrated(
        "from my_games import Game\nfrom trl import GRPOConfig, GRPOTrainer\n"
        "def short(completions, **columns):\n    return [-float(len(x)) for x in completions]\n"
        "GRPOTrainer('org/m', short, GRPOConfig(max_steps=2), train_dataset=load_dataset('d', split='train'),\n"
        "            environment_factory=Game).train()\n"
    )
    assert config.environment.name == "my_games:Game"
    assert "my_games:Game: if it has get_reward, add environment to rewards.functions" in text


@pytest.mark.slow
def test_an_environment_that_makes_its_prompts_trains():
    """From the script to a run: rows are seeds, prompts come from reset, and the reward is the environment's."""
    config, _ = migrated(
        f"{ENVIRONMENT}\nGRPOTrainer('embedded:sort', args=GRPOConfig(max_steps=1), environment_factory=Counter)\n"
    )
    settings = {"batch.prompts": 2, "batch.microbatch_rows": 0, "rollout.group_size": 2, "model.dtype": "float32"}
    settings |= {"rollout.max_prompt_length": 64, "rollout.max_completion_length": 8, "checkpoint.every": 0}
    settings |= {"logging.completions_every": 1, "logging.backends": ("jsonl",), "eval.every": -1, "total_steps": 1}
    for key, value in settings.items():
        assign(config, key, value)
    result = jaxrl_llm.train(config)
    assert result.metrics[-1]["rewards/environment/mean"] == 0.0  # the model calls nothing, and seeds are below 10
    import pyarrow.parquet as parquet

    (file,) = (result.output_dir / "completions").glob("*.parquet")
    rows = parquet.read_table(file).to_pylist()
    prompts = {json.dumps(row["prompt"]) for row in rows}
    assert len(rows) == 4 and len(prompts) == 2 and all("Start at " in prompt for prompt in prompts)


def test_the_column_of_texts_and_offloaded_activations():
    script = (
        "from trl import SFTConfig, SFTTrainer\nrows = load_dataset('d', split='train')\n"
        "args = SFTConfig(max_steps=2, dataset_text_field=COLUMN, activation_offloading=True)\n"
        "SFTTrainer('org/m', args, None, rows)\n"
    )
    config, _ = migrated(script.replace("COLUMN", "'content'"))
    assert find_format(config.data.format, "completions")({"content": "x"})["text"] == "x"
    assert (config.data.format, config.model.remat) == ("completion(field='content')", "offload")
    config, _ = migrated(script.replace("COLUMN", "'text'"))
    assert config.data.format == "auto"
    mapped = "def made(row):\n    return {'content': row['a']}\nrows = rows.map(made)\n"
    config, text = migrated(script.replace("COLUMN", "'content'").replace("SFTTrainer(", f"{mapped}SFTTrainer(", 1))
    assert "dataset_text_field is 'content': have" in text


def test_rewards_that_trl_makes_and_callbacks_that_show():
    config, text = migrated(
        "from trl import GRPOConfig, GRPOTrainer, RichProgressCallback\n"
        "from trl.rewards import accuracy_reward\nlong = get_soft_overlong_punishment(100, soft_punish_cache=20)\n"
        "class Mine:\n    def on_step(self, moment): ...\n"
        "GRPOTrainer('org/m', [accuracy_reward, long, get_repetition_penalty_reward(4, max_penalty=-0.5),\n"
        "            get_cosine_scaled_reward(max_len=100)], GRPOConfig(max_steps=2),\n"
        "            load_dataset('d', split='train'), callbacks=[RichProgressCallback(), Mine()]).train()\n"
    )
    assert config.rewards.functions == (
        "math_accuracy",
        "soft_overlong(max_length=100, cache=20)",
        "repetition_penalty(ngram_size=4, max_penalty=-0.5)",
        "cosine_scaled(max_length=100)",
    )
    assert config.callbacks == ("config_functions.py:Mine",) and "RichProgressCallback is left out" in text
    assert "must be installed" not in text


def test_several_data_sets_to_evaluate_on():
    config, text = migrated(
        "from datasets import load_dataset\nfrom trl import DPOConfig, DPOTrainer\nhard = load_dataset('b', 'main')\n"
        "args = DPOConfig(max_steps=8, eval_strategy='steps', eval_steps=4, load_best_model_at_end=True,\n"
        "                 metric_for_best_model='eval_hard_rewards/accuracies', greater_is_better=True)\n"
        "DPOTrainer('org/m', args=args, train_dataset=load_dataset('a', split='train'),\n"
        "           eval_dataset={'easy': load_dataset('a', split='test'), 'hard': hard['validation']}).train()\n"
    )
    easy, hard = {"set": "easy", "path": "a", "split": "test"}, {"path": "b", "split": "validation", "name": "main"}
    assert config.eval.sets == (easy, {"set": "hard", **hard})
    assert (config.checkpoint.best, config.data.path) == ("eval/hard/rewards/accuracies", "a")
    assert "known only when" not in text


@pytest.mark.parametrize(
    ("joined", "weights"),
    [
        ("concatenate_datasets([a, b]).shuffle(seed=1)", (None, None)),
        ("interleave_datasets(both, probabilities=[0.75, 0.25], seed=1)", (0.75, 0.25)),
        ("interleave_datasets((a, b))", (1.0, 1.0)),
    ],
)
def test_data_sets_that_are_joined(joined, weights):
    config, text = migrated(
        "from datasets import concatenate_datasets, interleave_datasets, load_dataset\nfrom trl import SFTTrainer\n"
        "def made(row):\n    return {'text': row['q']}\n"
        "a, b = load_dataset('a', split='train'), load_dataset('b', 'main', split='train[:10%]').map(made)\n"
        f"both = [a, b]\nSFTTrainer('org/m', SFTConfig(max_steps=8), train_dataset={joined}).train()\n"
    )
    other = {"path": "b", "split": "train[:10%]", "name": "main", "format": "config_functions.py:made"}
    sources = [{"path": "a", "split": "train"}, other]
    assert config.data.sources == tuple(
        one if weight is None else {"weight": weight, **one} for one, weight in zip(sources, weights, strict=True)
    )
    assert "known only when" not in text and "no known key" not in text


@pytest.mark.parametrize(
    ("launch", "rows", "fsdp"),
    [
        ("--accelerate_config zero3", 16, -1),
        ("--accelerate_config fsdp2 --num_processes 4", 8, -1),
        ("--accelerate_config single_gpu", 2, 1),
        ("--accelerate_config multi_gpu", 16, 1),
    ],
)
def test_how_accelerate_starts_a_command(launch, rows, fsdp):
    Path("run.sh").write_text(
        f"trl dpo --model_name_or_path m --dataset_name d --max_steps 2 --per_device_train_batch_size 2 {launch}\n"
    )
    config, text = migrate("run.sh")
    assert (config.batch.prompts, config.mesh.fsdp) == (rows, fsdp)
    assert "no known key" not in text and "one device is assumed" not in text


def test_completions_without_a_limit():
    config, text = migrated(
        "from trl import GRPOConfig, GRPOTrainer\ndef look(word: str) -> str:\n    return word\n"
        "GRPOTrainer('org/m', 'org/judge', GRPOConfig(max_steps=2, max_completion_length=None), tools=[look])\n"
    )
    assert (config.rollout.max_completion_length, config.environment.max_turns) == (1024, 1024)
    assert "max_completion_length is None, which is no limit" in text


@pytest.mark.parametrize(
    ("more", "delta"), [("", 0.02), ("entropy_coef_delta=0.01,", 0.04), ("num_iterations=1,", 0.01)]
)
def test_an_entropy_coefficient_that_moves_with_each_update(more, delta):
    """Of the four updates of a step here: two batches, each twice."""
    given = f"max_steps=8, use_adaptive_entropy=True, steps_per_generation=2, {more}"
    given += "" if "iterations" in more else "num_iterations=2,"
    config, _ = migrated(
        "from trl import GRPOConfig, GRPOTrainer\n"
        f"GRPOTrainer('org/m', 'org/judge', GRPOConfig({given}), load_dataset('d', split='train')).train()\n"
    )
    assert config.algorithm.entropy_controller == "adaptive"
    assert config.algorithm.entropy_delta == pytest.approx(delta)


def test_rows_that_a_script_makes():
    """As those of TRL's page with two tasks, and of its OpenEnv examples; they are made where the run asks for them."""
    script = (
        "from datasets import Dataset, load_dataset\nfrom trl import GRPOConfig, GRPOTrainer\n"
        "PROMPT = 'What is 2+2?'\nrows = [{'prompt': PROMPT, 'task': 'math'}, {'prompt': 'Sum.', 'task': 'code'}]\n"
        "dataset = Dataset.from_list(rows)\n"
        "dataset = dataset.filter(lambda row: row['task'] == 'math').shuffle(seed=1)\n"
        "def math(prompts, completions, task, **kwargs):\n    return [1.0 if t == 'math' else None for t in task]\n"
        "GRPOTrainer('org/m', math, GRPOConfig(max_steps=2), train_dataset=dataset,\n"
        "            eval_dataset=Dataset.from_dict({'prompt': [[{'role': 'user', 'content': PROMPT}]] * 3})).train()\n"
    )
    config, text = migrated(script)
    assert (config.data.path, config.data.eval_path) == (
        "config_functions.py:train_rows", "config_functions.py:eval_rows",
    )  # fmt: skip
    assert load(config.data.path).to_list() == [{"prompt": "What is 2+2?", "task": "math"}]
    assert len(load(config.data.eval_path)) == 3 and "known only when" not in text and "not done here" not in text
    assert "from_list" not in Path("config_functions.py").read_text().partition("def train_rows")[0]
    parsed = "made(argparse.ArgumentParser().parse_args().n)"
    for other, more in (("rows * arguments.copies", ""), (parsed, "def made(n): ...\n"), ("rows", "rows.append({})\n")):
        config, text = migrated(more + script.replace("from_list(rows)", f"from_list({other})"))
        assert config.data.path == "DATA" and "train_dataset = Dataset.from_list" in text and "known only when" in text


@pytest.mark.parametrize(
    ("rows", "kept"),
    [
        ("data.filter(ok).map(form)", ["1", "3"]),
        ("data.map(form).select([2, 0])", ["3", "1"]),
        ("data.map(lambda row: {'t': row['t'] * 2}).map(form)", ["11", "22", "33"]),
        ("data.filter(ok)\nrows = rows.map(form)\nnamed = rows\nrows = named", ["1", "3"]),
        ("concatenate_datasets([data.filter(ok), data.select([1])])", None),
    ],
)
def test_rows_that_a_script_changes(rows, kept):
    """By a function of a file of rows, which does all that the script does."""
    Path("rows.jsonl").write_text("".join(json.dumps({"t": str(n)}) + "\n" for n in (1, 2, 3)))
    config, text = migrated(
        "from datasets import concatenate_datasets, load_dataset\nfrom trl import SFTConfig, SFTTrainer\n"
        "def ok(row):\n    return row['t'] != '2'\n\ndef form(row):\n    return {'text': row['t']}\n\n"
        "data = load_dataset('json', data_files='rows.jsonl', split='train')\n"
        f"rows = {rows}\nSFTTrainer('org/m', SFTConfig(max_steps=2), train_dataset=rows).train()\n"
    )
    assert "not done here" not in text and config.data.format == "auto"
    if kept is None:
        found = [[row["t"] for row in load(source["path"]).to_list()] for source in config.data.sources]
        assert found == [["1", "3"], ["2"]]
    else:
        assert config.data.path == "config_functions.py:train_rows"
        assert [row["text"] for row in load(config.data.path).to_list()] == kept


def test_a_trainer_with_the_arguments_of_transformers():
    """What these leave out is as in transformers, not as in SFTConfig."""
    config, _ = migrated(
        "from transformers import TrainingArguments\nfrom trl import SFTTrainer\n"
        "SFTTrainer('org/m', TrainingArguments('out', max_steps=7, optim='adamw_torch'), train_dataset='d').train()\n"
    )
    assert (config.output_dir, config.total_steps, config.optimizer.learning_rate) == ("out", 7, 5e-5)
    assert config.model.remat == "auto"


def test_a_notebook():
    """Its commands and cells of other languages are no Python, and one with a mistake is left out."""
    script = [
        "%%capture\n!pip install trl \\\n    datasets\nimport os\nif os.name:\n    %cd here",
        "%%bash\nfor x in *; do echo $x; done",
        "from trl import SFTConfig, SFTTrainer",
        "print('wrong'",
        "SFTTrainer('org/m', SFTConfig(max_steps=3), train_dataset='d').train()",
    ]
    cells = [{"cell_type": "code", "source": cell.splitlines(keepends=True)} for cell in script]
    Path("a.ipynb").write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": ["a ' b"]}, *cells]}))
    config, text = migrate("a.ipynb", output="config.py")
    assert (config.model.path, config.total_steps, config.algorithm.name) == ("org/m", 3, "sft")
    assert "code cell 4 is not read, as it is no Python" in " ".join(text.split())


UNSLOTH = """
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from unsloth import FastModel
from unsloth.chat_templates import get_chat_template, standardize_sharegpt, train_on_responses_only
model, tokenizer = FastModel.from_pretrained("org/m", max_seq_length=512, load_in_4bit=True)
model = FastModel.get_peft_model(model, r=4, ADAPTERS)
tokenizer = get_chat_template(tokenizer, chat_template="llama-3.1")
def form(examples):
    texts = [tokenizer.apply_chat_template(talk, tokenize=False) for talk in examples["conversations"]]
    return {"text": texts}
def talk(row):
    return {"messages": [{"role": "user", "content": row["q"]}, {"role": "assistant", "content": row["a"]}]}
rows = load_dataset("org/rows", split="train")
ROWS
trainer = TRAINER(model=model, tokenizer=tokenizer, train_dataset=rows, args=SFTConfig(max_steps=2))
MORE
"""


def unsloth(adapters="bias='none'", rows="", trainer="SFTTrainer", more=""):
    filled = {"ADAPTERS": adapters, "ROWS": rows, "TRAINER": trainer, "MORE": more}
    return migrated(re.sub("|".join(filled), lambda word: filled[word[0]], UNSLOTH))


def test_conversations_of_unsloth():
    """ShareGPT's rows, which the chat template writes: the run reads and writes them by itself."""
    rows = "rows = standardize_sharegpt(rows)\nrows = rows.map(form, batched=True)"
    config, text = unsloth(rows=rows, more="trainer = train_on_responses_only(trainer)")
    assert (config.data.path, config.data.format, config.data.loss_on) == ("org/rows", "auto", "completion")
    assert "not done here" not in text and "template 'llama-3.1'; here the tokenizer's own is used" in text
    config, text = unsloth(rows="rows = rows.map(form, batched=True)\n".replace("form", "other"))
    assert "not done here: map(other, batched=True)" in text and config.data.loss_on == "all"
    config, text = unsloth(rows="rows = [talk(row) for row in rows]")
    assert (config.data.path, config.data.format) == ("org/rows", "config_functions.py:talk")
    assert "not done here" not in text
    config, _ = unsloth(rows="rows = [talk(row) for row in rows if row['q']]")
    assert config.data.path == "config_functions.py:train_rows"


@pytest.mark.parametrize(
    ("attention", "mlp", "targets"),
    [
        (True, True, ("all-linear",)),
        (True, False, ("q_proj", "k_proj", "v_proj", "o_proj")),
        (False, True, ("gate_proj", "up_proj", "down_proj")),
    ],
)
def test_adapters_that_unsloth_chooses_by_kind(attention, mlp, targets):
    kinds = f"finetune_attention_modules={attention}, finetune_mlp_modules={mlp}"
    config, text = unsloth(f"finetune_vision_layers=True, finetune_language_layers=True, {kinds}")
    assert (config.lora.targets, config.model.vision) == (targets, "lora")
    assert "known key" not in text and "PEFT chooses" not in text
    config, text = unsloth(f"finetune_vision_layers=False, finetune_language_layers=False, {kinds}")
    assert config.model.vision == "frozen" and "adapters are on the decoder here too" in text


def test_embeddings_of_unsloth_have_a_rate_of_their_own():
    config, text = unsloth(
        "target_modules=['q_proj', 'embed_tokens', 'lm_head']", trainer="UnslothTrainer",
        more="UnslothTrainingArguments(max_steps=3, learning_rate=5e-5, embedding_learning_rate=1e-5)",
    )  # fmt: skip
    assert (config.algorithm.name, config.lora.targets) == ("sft", ("q_proj",))
    assert config.lora.modules_to_save == ("embed_tokens", "lm_head")
    assert config.optimizer.rate_factors == ("embed_tokens|lm_head=0.2",)
    assert "no modules with adapters" not in text


def test_a_script_of_online_dpo_with_its_command():
    """As TRL's example: the name of the file says online_dpo, and dpo is another trainer."""
    Path("online_dpo.py").write_text(
        '"""Usage:\n\npython online_dpo.py --model_name_or_path org/m --reward_model_path org/rm --dataset_name d '
        '--learning_rate 5.0e-7 --max_steps 2\n"""\n'
        "from trl import TrlParser\nfrom trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer\n"
        "args = TrlParser((OnlineDPOConfig,)).parse_args_and_config()\n"
        "OnlineDPOTrainer(model=args.model, reward_funcs=args.reward_model, args=args).train()\n"
    )
    config, _ = migrate("online_dpo.py")
    assert (config.algorithm.name, config.rewards.functions) == ("online_preference", ("model:org/rm",))
