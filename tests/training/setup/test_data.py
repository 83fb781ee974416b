"""Rows before weights: epochs, held-out shares, data without a split to evaluate on, columns, templates, overrides."""

import json

import pytest

import jaxrl_llm
from jaxrl_llm.config import ConfigError, default
from jaxrl_llm.config.flags import load_flags
from jaxrl_llm.models.model import load_model
from jaxrl_llm.training.checkpoint.settings import changed_settings, start_record
from jaxrl_llm.training.setup import models
from jaxrl_llm.training.setup.data import read_data, tokenizer_of
from jaxrl_llm.training.setup.given import Given
from tests.data.bpe_tokenizer import bpe_tokenizer

ROWS = [{"prompt": f"sort:{n}=", "completion": "".join(sorted(str(n)))} for n in range(100, 120)]


@pytest.fixture
def config(tmp_path):
    config = default()
    config.algorithm.name, config.data.path = "sft", str(tmp_path / "rows.jsonl")
    config.batch.prompts, config.output_dir, config.logging.backends = 8, str(tmp_path / "run"), ("console",)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return config


def read(config, train_dataset=None, eval_dataset=None):
    return read_data(config, Given(train_dataset, eval_dataset))


def test_epochs_are_counted_in_rows_that_are_used(config):
    config.num_epochs = 2.0
    data = read(config)
    assert data.config.total_steps == 5  # 40 rows by 8
    assert "20 rows, all 20 used; 2.5 steps an epoch of 8 rows; 5 steps are 2 epochs" in data.notes[0]
    config.num_epochs, config.batch.prompts = 1.1, 2
    assert read(config).config.total_steps == 11  # 1.1 * 20 / 2 is 11.000000000000002
    config.batch.prompts = 8
    config.data.max_length, config.data.overlong, config.num_epochs = 13, "filter", 0.4
    longer = [*ROWS, {"prompt": "sort:1000000=", "completion": "0000001"}]
    data = read(config, longer)
    assert data.config.total_steps == 1
    assert "21 rows, 20 used; 2.5 steps an epoch of 8 rows; 1 step is 0.4 epochs" in data.notes[0]
    config.data.packing, config.data.max_length, config.num_epochs = True, 44, 4.0
    data = read(config)
    assert data.config.total_steps == 4  # 20 rows of 13 tokens are 7 packed ones
    assert "as 7 packed rows" in data.notes[0]
    assert "some of them twice" in data.notes[1]


def test_settings_are_checked_with_the_steps_that_epochs_come_to(config, tmp_path):
    config.num_epochs, config.optimizer.schedule, config.optimizer.decay_steps = 2.0, "wsd", 200
    with pytest.raises(ConfigError, match=r"decay_steps is 200 .* total_steps = 5"):
        read(config)
    config.data.streaming = True
    with pytest.raises(ConfigError, match=r"num_epochs is 2.0, but data.streaming is true"):
        load_flags(["--config.num_epochs=2", "--config.data.streaming"])
    config = default()
    config.num_epochs = 3.0
    start_record(tmp_path, config, {}, None)
    config.total_steps = 7
    assert changed_settings(tmp_path, config) == {}  # it follows from the rows


def test_one_file_is_trained_on_and_not_evaluated(config):
    data = read(config)
    assert data.held_out == []
    assert any("no evaluation: " in note and "eval.fraction" in note for note in data.notes)
    config.data.eval_split = "validation"
    with pytest.raises(ConfigError, match="only the split 'train', not 'validation': hold rows out"):
        read(config)
    config.data.eval_split, config.checkpoint.best, config.checkpoint.every = None, "eval/loss", 25
    with pytest.raises(ConfigError, match=r"there is no data to evaluate on .*checkpoint.best"):
        read(config)


def test_a_share_of_the_rows_is_held_out(config):
    config.eval.fraction, config.eval.prompts = 0.25, 3
    data = read(config)
    ((_, (held_out,)),) = data.held_out
    assert len(data.tokens.rows) == 15
    assert "evaluation: the first 3 of 5 rows (eval.prompts)" in data.notes[1]
    trained = {row["prompt"] for row in data.sources[0].rows}
    assert len(held_out.rows) == 3
    assert not trained & {row["prompt"] for row in held_out.rows}
    in_memory = read(config, ROWS)
    assert {row["prompt"] for row in in_memory.sources[0].rows} == trained
    with pytest.raises(ConfigError, match="eval_dataset is given"):
        read(config, ROWS, ROWS)
    config.eval.prompts = 5
    assert len(read(config).notes) == 1


def test_data_is_refused_before_weights_are_read(config, monkeypatch, tmp_path):
    def never(*arguments, **options):
        raise AssertionError("weights were read")

    monkeypatch.setattr(models, "load_model", never)
    config.data.path = str(tmp_path / "nothing.jsonl")
    with pytest.raises(ConfigError, match="no file or folder"):
        jaxrl_llm.train(config)


def test_columns_system_prompt_and_template(config, tokens_of):
    row = {"q": [{"role": "user", "content": "2+2?"}], "a": [{"role": "assistant", "content": "4"}]}
    config.data.prompt_key, config.data.completion_key = "q", "a"
    config.data.system_prompt, config.data.chat_template = "Count.", "chatml"
    opening = "<|im_start|>system\nCount.<|im_end|>\n"
    written = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
    assert tokens_of(config, row) == opening + written
    own = {"role": "system", "content": "Mine."}
    assert tokens_of(config, row | {"q": [own, *row["q"]]}) == opening.replace("Count", "Mine") + written
    with pytest.raises(ConfigError, match=r"no column 'q', which prompt_key .* names; it has prompt, a"):
        tokens_of(config, {"prompt": "2+2?", "a": "4"})
    with pytest.raises(ConfigError, match=r"data.system_prompt is for conversations, but the row begins with '2\+2"):
        tokens_of(config, {"q": "2+2?", "a": "4"})


@pytest.fixture
def tokens_of():
    def text(config, row):
        data = read(config, [row])
        return data.tokenizer.decode(data.tokens.rows[0]["ids"])

    return text


def test_labels_of_another_column(config):
    config.algorithm.name, config.algorithm.loss, config.algorithm.beta = "preference", "kto", 0.1
    config.data.label_key = "liked"
    data = read(config, [{"prompt": "a", "completion": "b", "liked": bool(n % 2)} for n in range(8)])
    assert [row["label"] for row in data.tokens.rows] == [False, True] * 4


def test_the_end_of_text(config, tmp_path):
    """`model.eos_token` ends plain rows, and is what the trained model stops at; so does that of another tokenizer."""
    other = tokenizer_of(config)
    other.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    other.save_pretrained(tmp_path / "with_turns")
    config.algorithm.name, config.total_steps = "sft", 0
    config.model.eos_token = "A"
    rows = [{"prompt": "2+2=", "completion": "4"}]
    data = read(config, rows)
    assert data.tokenizer.decode(data.tokens.rows[0]["ids"]) == "2+2=4A"
    folder = jaxrl_llm.train(config, rows).output_dir / "hf"
    saved = load_model(folder)
    assert saved.tokenizer.eos_token == "A"
    assert saved.generation is not None and saved.generation["eos_token_id"] == saved.tokenizer.eos_token_id
    config.model.eos_token = "<|turn|>"
    with pytest.raises(ConfigError, match=r"model.eos_token is '<\|turn\|>', which is no token of this tokenizer"):
        tokenizer_of(config)


def test_the_chat_template_of_another_tokenizer(config, tmp_path, caplog):
    other = tokenizer_of(config)
    other.chat_template, other.eos_token = "{{ messages[0]['content'] }}B", "B"
    other.save_pretrained(tmp_path / "other")
    config.data.chat_template = str(tmp_path / "other")
    found = tokenizer_of(config)
    assert (found.chat_template, found.eos_token) == (other.chat_template, "B")
    config.data.chat_template = "some/body"
    with pytest.raises(ConfigError, match=r"data.chat_template = 'some/body': there is no such folder here"):
        tokenizer_of(config)
    other.chat_template = None
    other.save_pretrained(tmp_path / "silent")
    config.data.chat_template = str(tmp_path / "silent")
    with pytest.raises(ConfigError, match="whose tokenizer has no chat template"):
        tokenizer_of(config)


def test_a_tokenizer_whose_ids_are_other_tokens(config, caplog):
    """A run would train on texts that nobody wrote, with a loss that is merely high."""
    config.algorithm.name = "sft"
    rows, own = [{"text": "2+2=4"}], tokenizer_of(config)
    other = bpe_tokenizer(["2+2=4"] * 9, 300)
    model = load_model("embedded:sort")
    for given in (Given(rows, tokenizer=other), Given(rows, tokenizer=other, model=model)):
        caplog.clear()
        read_data(config, given)
        assert "of its 2" in caplog.text and "the tokenizer is not that of embedded:sort" in caplog.text
    caplog.clear()
    own.add_tokens(["<|more|>"])
    for given in (
        Given(rows),
        Given(rows, tokenizer=own),
        Given(rows, model=model),
        Given(rows, tokenizer=own, model=model),
    ):
        read_data(config, given)
    config.model.random_init = True
    read_data(config, Given(rows, tokenizer=other))
    assert "the tokenizer is not" not in caplog.text


def test_another_tokenizer_and_entries_of_config_json(config, tmp_path):
    tokenizer = tokenizer_of(default())
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    config.model.tokenizer, config.model.overrides = str(tmp_path / "tokenizer"), "rope_theta=500.0"
    config.total_steps, config.data.chat_template = 0, None
    result = jaxrl_llm.train(config)
    assert load_model(result.output_dir / "hf").tokenizer.chat_template == tokenizer.chat_template
    written = json.loads((result.output_dir / "hf" / "config.json").read_text())
    assert written.get("rope_theta", written.get("rope_parameters", {}).get("rope_theta")) == 500.0
    config.model.revision, config.checkpoint.resume = "v2", "never"
    with pytest.raises(ConfigError, match=r"model.revision is 'v2', but embedded:sort is a folder"):
        jaxrl_llm.train(config)


def test_entries_of_a_model_that_are_not_used_are_a_warning(config, capsys):
    yarn = "{'rope_type': 'yarn', 'factor': 2.0, 'original_max_position_embeddings': 64, 'attn_factor': 0.9}"
    config.model.overrides, config.total_steps = f"rope_scaling={yarn}, rope_thetta=500.0", 0
    jaxrl_llm.train(config)
    said = " ".join(capsys.readouterr().out.split())
    assert "attn_factor = 0.9 among the rotary parameters is not used" in said
    assert "model.overrides: rope_thetta is not in config.json of embedded:sort, and the network reads no such" in said


def test_a_family_of_ones_own(config, tmp_path):
    (tmp_path / "family.py").write_text(
        "from jaxrl_llm.models.families.llama import *\n"
        "from jaxrl_llm.models.families import llama\n"
        "MODEL_TYPE, ARCHITECTURE, KEYS = 'mine', llama.ARCHITECTURE, llama.KEYS\n"
        "to_config, from_config = llama.to_config, llama.from_config\n"
    )
    (tmp_path / "half.py").write_text("MODEL_TYPE = 'half'\n")
    config.model.register, config.model.overrides = (str(tmp_path / "family.py"),), "model_type='mine'"
    assert read(config).notes
    config.model.register = (str(tmp_path / "half.py"),)
    with pytest.raises(ConfigError, match="has MODEL_TYPE, as a family of models has, but no ARCHITECTURE"):
        read(config)


def test_an_evaluation_on_what_is_trained_on_says_so(config, tmp_path):
    def told() -> bool:
        notes = read(config).notes
        return any("rows.jsonl has the rows that are trained on, and nothing is held out" in note for note in notes)

    (tmp_path / "others.jsonl").write_text('{"prompt": "sort:31=", "completion": "13"}\n')
    config.data.eval_split = "train"
    assert told()
    config.data.eval_path = str(tmp_path / "others.jsonl")
    assert not told()
    config.data.eval_path = config.data.eval_split = None
    config.eval.fraction = 0.25
    assert not told()
