"""`jaxrl_llm.generate` and its command line: greedy text equals transformers', and settings do what they say."""

import copy
import importlib
import inspect
import io
import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import jaxrl_llm
from jaxrl_llm.commands import chat
from jaxrl_llm.config import ConfigError, to_json
from jaxrl_llm.distributed.sharding import make_mesh
from jaxrl_llm.models.files.hf import EMBEDDED, load_tokenizer, remember_images
from jaxrl_llm.models.model import Model
from jaxrl_llm.train import Result
from jaxrl_llm.training.setup.run_models import load_named
from tests.data.coded_tokenizer import coded_folder, kind

module = importlib.import_module("jaxrl_llm.commands.generate")

PROMPTS = ["sort:4821=", "sort:90817=", "x", "sort:5505213="]
CHAT = [{"role": "user", "content": "sort:4821="}]


@pytest.fixture(scope="module")
def model() -> Model:
    return jaxrl_llm.load_model("embedded:sort")


# --- against transformers ---


def oracle_texts(folder, prompts, max_new_tokens: int) -> list[str]:
    """Greedy texts of the model folder in transformers, one prompt at a time."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts = []
    for prompt in prompts:
        if isinstance(prompt, list):
            prompt = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        inputs = tokenizer(prompt, return_tensors="pt")
        with torch.no_grad():
            ids = oracle.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
        texts.append(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    return texts


@pytest.mark.slow
def test_greedy_text_of_a_run_is_that_of_transformers(tiny_run):
    folder = tiny_run.output_dir / "hf"
    prompts = [*PROMPTS, CHAT]
    expected = oracle_texts(folder, prompts, 40)
    assert jaxrl_llm.generate(jaxrl_llm.load_model(folder), prompts, 40, temperature=0) == expected
    assert jaxrl_llm.generate(tiny_run.model, prompts, 40, temperature=0) == expected
    assert expected[0].isdigit() and len(expected[0]) == 4
    assert len(set(expected)) > 2


# --- the function ---


def test_a_path_in_the_place_of_a_model(tmp_path):
    for call in (lambda: jaxrl_llm.generate("runs/x/hf", ["a"]), lambda: jaxrl_llm.save_hf("runs/x/hf", tmp_path)):
        with pytest.raises(ConfigError, match=r"takes a model, not 'runs/x/hf': load it first, jaxrl_llm.load_model"):
            call()


def test_another_object_in_the_place_of_a_model(model, tmp_path):
    """The Result of a run, and a model of transformers: attributes that these lack would be all that is said."""
    for given, way_out in (
        (Result(model, [], tmp_path), "give its .model"),
        (object(), "load it with jaxrl_llm.load_mo"),
    ):
        for call in (jaxrl_llm.generate, jaxrl_llm.save_hf, jaxrl_llm.save_adapter):
            message = rf"{call.__name__} takes a model of this library, not a \w+ {type(given).__name__}: {way_out}"
            with pytest.raises(ConfigError, match=message):
                call(given, ["a"] if call is jaxrl_llm.generate else tmp_path)


def test_defaults_are_those_of_the_flags():
    defaults = {name: p.default for name, p in inspect.signature(jaxrl_llm.generate).parameters.items()}
    assert defaults.pop("images") is None and defaults.pop("columns") is None  # of many prompts
    assert {flag.name: flag.default for flag in (*module.SAMPLING, module.SAMPLES)} == dict(list(defaults.items())[2:])


@pytest.mark.slow
def test_penalties_and_guides(model):
    assert jaxrl_llm.generate(model, PROMPTS[:1], 12, temperature=0, stop_token_ids=(ord("2"),)) == ["12"]
    (text,) = jaxrl_llm.generate(model, PROMPTS[:1], 12, temperature=0, bad_words=("24",), frequency_penalty=2.0)
    assert text.startswith("12") and "24" not in text
    biased = {"logit_bias": (f"{ord('7')}=100",), "min_new_tokens": 3}
    (text,) = jaxrl_llm.generate(model, PROMPTS[:1], 12, temperature=0, **biased)
    assert text.startswith("777")
    schema = '{"type": "array", "items": {"enum": [7, 12]}, "maxItems": 2, "minItems": 1}'
    (text,) = jaxrl_llm.generate(model, PROMPTS[:1], 40, temperature=0, structured_json=schema)
    assert set(json.loads(text)) <= {7, 12}


def test_a_stop_string_and_settings_against_each_other(model):
    assert jaxrl_llm.generate(model, PROMPTS[:1], 8, temperature=0, stop=("24",)) == ["124"]  # without it 1248
    with pytest.raises(ConfigError, match="min_new_tokens is 5, more than max_new_tokens = 4"):
        jaxrl_llm.generate(model, PROMPTS, 4, min_new_tokens=5)
    with pytest.raises(ConfigError, match="structured_regex is 'a', and ignore_eos = True may forbid"):
        jaxrl_llm.generate(model, PROMPTS, structured_regex="a", ignore_eos=True)


def test_samples_are_lists_and_depend_on_the_seed_only(model):
    texts = jaxrl_llm.generate(model, PROMPTS, 8, samples=3, seed=1)
    assert [len(group) for group in texts] == [3, 3, 3, 3]
    assert texts == jaxrl_llm.generate(model, PROMPTS, 8, samples=3, seed=1)
    assert texts != jaxrl_llm.generate(model, PROMPTS, 8, samples=3, seed=2)
    assert len(set(texts[0])) > 1


@pytest.mark.slow
def test_batching_changes_nothing(model, monkeypatch):
    texts = jaxrl_llm.generate(model, PROMPTS, 8, samples=2)
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 6)  # three prompts, then one and two copies of it
    assert jaxrl_llm.generate(model, PROMPTS, 8, samples=2) == texts


def test_smaller_grids_are_worth_their_programs(model):
    """As in training: of a small model a call of some hundred rows takes less time than another program."""
    assert not module.engine_of(model, {}).worth_shrinking(parameters=400_000, left=32, slots=256)


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 0.001}, {"temperature": 1e-30}]
)
def test_a_narrow_filter_is_greedy(setting, model):
    greedy = jaxrl_llm.generate(model, PROMPTS, 8, temperature=0)
    assert jaxrl_llm.generate(model, PROMPTS, 8, **setting) == greedy
    assert jaxrl_llm.generate(model, PROMPTS, 8) != greedy


@pytest.mark.slow
def test_max_new_tokens_cuts(model):
    longer = jaxrl_llm.generate(model, PROMPTS, 8, temperature=0)
    assert jaxrl_llm.generate(model, PROMPTS, 2, temperature=0) == [text[:2] for text in longer]


@pytest.mark.slow
def test_chat_is_its_rendered_text(model):
    rendered = "<|user|>sort:4821=<|end|><|assistant|>"
    assert jaxrl_llm.generate(model, [CHAT], 8, seed=3) == jaxrl_llm.generate(model, [rendered], 8, seed=3)


def test_no_prompts_no_texts(model):
    assert jaxrl_llm.generate(model, []) == []


@pytest.mark.parametrize(
    ("prompts", "settings", "words"),
    [
        ("sort:1=", {}, "takes a list"),
        (CHAT, {}, "takes a list"),
        (["a", ""], {}, "prompt 1 has no tokens"),
        ([5], {}, "prompt 0 is 5; it takes a text, or a list of messages"),
        (["a", [{"from": "human", "value": "x"}]], {}, "prompt 1 is "),
        (["a"], {"temperature": -1}, "temperature is -1, but it takes a number >= 0"),
        (["a"], {"top_p": 0}, "top_p is 0"),
        (["a"], {"max_new_tokens": 0}, "max_new_tokens is 0"),
        (["a"], {"samples": 1.5}, "samples is 1.5, but it takes an integer"),
    ],
)
def test_errors(prompts, settings, words, model):
    with pytest.raises(ConfigError, match=words):
        jaxrl_llm.generate(model, prompts, **settings)


def test_a_model_without_tokenizer_cannot_read(model):
    with pytest.raises(ConfigError, match="no tokenizer"):
        jaxrl_llm.generate(replace(model, tokenizer=None), ["a"])


# --- the command line ---


def test_command_prints_one_completion_as_it_is(model, capsys):
    module.main(["--model=embedded:sort", "--prompt=sort:4821=", "--temperature=0", "--max_new_tokens=8"])
    assert capsys.readouterr().out == jaxrl_llm.generate(model, ["sort:4821="], 8, temperature=0)[0] + "\n"


def test_the_folder_of_a_run_leads_to_its_model(tmp_path):
    (tmp_path / "config.json").write_text(to_json(jaxrl_llm.default_config()))
    for model, words in (("", "export --run="), ("hf_steps/00002", "give .*hf_steps/00002"), ("hf", "give .*/hf$")):
        if model:
            (tmp_path / model).mkdir(parents=True)
            (tmp_path / model / "config.json").write_text("{}")
        with pytest.raises(ConfigError, match=f"is the folder of a run.*{words}"):
            jaxrl_llm.load_model(tmp_path)
    (step := tmp_path / "checkpoints" / "20").mkdir(parents=True)
    said = f"is a checkpoint, which is no model yet: jaxrl-llm export --run={tmp_path} --step=20 --output=FOLDER"
    with pytest.raises(ConfigError, match=said):
        jaxrl_llm.load_model(step)


@pytest.mark.slow
def test_command_on_many_devices(model, run_python, tmp_path):
    (tmp_path / "prompts.txt").write_text("\n\n".join(PROMPTS) + "\n", encoding="utf-8")
    arguments = ("--prompts_file=prompts.txt", "--samples=2", "--max_new_tokens", "8", "--seed=5", "--tensor=2")
    result = run_python("-m", "jaxrl_llm", "generate", "--model=embedded:sort", *arguments, devices=8)
    assert result.returncode == 0, result.stderr
    texts = jaxrl_llm.generate(model, PROMPTS, 8, samples=2, seed=5)
    expected = [{"prompt": p, "completion": text} for p, group in zip(PROMPTS, texts, strict=True) for text in group]
    assert [json.loads(line) for line in result.stdout.splitlines()] == expected


def test_prompts_of_a_jsonl_file(tmp_path, model, capsys):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt, "id": 1}) + "\n" for prompt in PROMPTS), encoding="utf-8")
    module.main(["--model=embedded:sort", f"--prompts_file={file}", "--temperature=0", "--max_new_tokens=8"])
    printed = [json.loads(line)["completion"] for line in capsys.readouterr().out.splitlines()]
    assert printed == jaxrl_llm.generate(model, PROMPTS, 8, temperature=0)


def test_a_file_may_say_what_the_chat_template_shows(model, tmp_path):
    """Its columns tools and chat_template_kwargs, each row its own, as in training."""
    tokenizer = copy.copy(model.tokenizer)
    tokenizer.chat_template = "{{ tools | tojson if tools else '' }}{{ mood }}{{ messages[0].content }}"
    tools = [{"type": "function", "function": {"name": name, "parameters": {name: {}}}} for name in ("add", "sub")]
    rows = [{"tools": tools[:1]}, {"tools": tools[1:], "chat_template_kwargs": {"mood": "glad"}}, {}]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": CHAT, **row}) + "\n" for row in rows), encoding="utf-8")
    asked = module.read_prompts("", str(file), chat=False)
    rendered = module.prompt_rows(replace(model, tokenizer=tokenizer), asked.prompts, asked.images, asked.columns)
    texts = [tokenizer.decode(row["prompt_ids"]) for row in rendered]
    shown = [json.dumps([tool], ensure_ascii=False) for tool in tools]
    assert texts == [f"{shown[0]}sort:4821=", f"{shown[1]}gladsort:4821=", "sort:4821="]
    assert module.read_prompts("sort:4821=", "", chat=True)[1:] == (None, None)
    with pytest.raises(ConfigError, match="columns has 1 entries for 2 prompts; give an object for each"):
        jaxrl_llm.generate(model, PROMPTS[:2], columns=[{}])


def test_a_prompt_that_lacks_its_image_is_refused_before_it_is_sampled(model):
    tokenizer = load_tokenizer(EMBEDDED / "shapes")
    remember_images(tokenizer, EMBEDDED / "shapes")
    with pytest.raises(ConfigError, match=r"no images, and its text has <\|image\|>, .*: give its images .* or r"):
        module.prompt_rows(replace(model, tokenizer=tokenizer), ["<|image|> colour"])


def test_the_command_reads_the_columns_of_a_file(tmp_path, monkeypatch):
    file, given = tmp_path / "prompts.jsonl", []
    file.write_text(json.dumps({"prompt": CHAT, "chat_template_kwargs": {"a": 1}}) + "\n", encoding="utf-8")
    monkeypatch.setattr(module, "generate", lambda *_, **options: given.append(options["columns"]) or ["x"])
    module.main(["--model=embedded:sort", f"--prompts_file={file}"])
    assert given == [[{"chat_template_kwargs": {"a": 1}}]]


def test_flags_of_conversations(tmp_path, monkeypatch, model, capsys):
    """What a row of the file says goes before; texts have no template, and are refused."""
    tokenizer = copy.copy(model.tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ end }}{{ mood }}"
    monkeypatch.setattr(module, "load_named", lambda *_, **__: replace(model, tokenizer=tokenizer))
    flags = ["--model=m", "--temperature=0", "--max_new_tokens=8", "--system=sort:"]
    module.main([*flags, "--chat", "--prompt=4821", "--chat_template_kwargs=end='='"])
    assert capsys.readouterr().out == jaxrl_llm.generate(model, ["sort:4821="], 8, temperature=0)[0] + "\n"
    file, given = tmp_path / "prompts.jsonl", []
    system = {"role": "system", "content": "be brief"}
    rows = [{"prompt": CHAT, "chat_template_kwargs": {"mood": "b"}}, {"prompt": [system, *CHAT]}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    monkeypatch.setattr(module, "generate", lambda *args, **options: given.append((args, options)) or ["x", "y"])
    module.main([*flags, f"--prompts_file={file}", "--chat_template_kwargs=end='=', mood='a'"])
    (((_, prompts), options),) = given
    columns = options["columns"]
    assert prompts == [[{"role": "system", "content": "sort:"}, *CHAT], [system, *CHAT]]
    assert [row["chat_template_kwargs"] for row in columns] == [{"end": "=", "mood": "b"}, {"end": "=", "mood": "a"}]
    for flag in ("--system=a", "--chat_template_kwargs=a=1"):
        with pytest.raises(ConfigError, match=f"{flag.partition('=')[0]} is for conversations, .*: add --chat"):
            module.main(["--model=m", "--prompt=4821", flag])


def test_code_of_a_tokenizer_is_run_where_it_is_trusted(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(module, "generate", lambda model, *_, **__: [kind(model.tokenizer)])
    monkeypatch.setattr(chat, "answerer", lambda model, *_, **__: lambda prompt, turn: kind(model.tokenizer))
    folder = str(coded_folder(tmp_path / "coded"))
    for main, flags in ((module.main, ["--prompt=a"]), (chat.main, [])):
        with pytest.raises(ConfigError, match=r"the tokenizer in .* cannot be read: .*trust_remote_code"):
            main([f"--model={folder}", *flags])
        monkeypatch.setattr("sys.stdin", io.StringIO("a"))
        main([f"--model={folder}", *flags, "--trust_remote_code"])
        assert capsys.readouterr().out == "CodedTokenizer\n"
    with pytest.raises(ConfigError, match="trust_remote_code"):
        load_named(folder, "auto", make_mesh())
    assert kind(load_named(folder, "auto", make_mesh(), True).tokenizer) == "CodedTokenizer"


def test_a_byte_order_mark_is_no_part_of_the_first_prompt(tmp_path):
    """As editors on Windows write it."""
    file = tmp_path / "prompts.txt"
    file.write_text("sort:21=\nsort:43=\n", encoding="utf-8-sig")
    assert module.read_prompts("", str(file), chat=False).prompts == ["sort:21=", "sort:43="]


def test_prompts_are_read_from_messages_too(tmp_path):
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"prompt": CHAT}) + "\n", encoding="utf-8")
    assert module.read_prompts("", str(file), chat=True).prompts == [CHAT]
    assert module.read_prompts("sort:4821=", "", chat=True).prompts == [CHAT]
    assert module.read_prompts("sort:4821=", "", chat=False).prompts == ["sort:4821="]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt=a"], ["--model is missing"]),
        (["--model=embedded:sort"], ["--prompt=TEXT or --prompts_file=FILE"]),
        (["--model=embedded:sort", "--prompt=a", "--prompts_file=b"], ["one of them"]),
        (["--model=embedded:sort", "--prompts_file=nothing.txt"], ["no file nothing.txt"]),
        (["--model=embedded:srt", "--prompt=a"], ["embedded:srt", "embedded:sort"]),
        (["--model=embedded:sort", "--promt=a"], ["unknown flag --promt", "--prompt"]),
        (["--model=embedded:sort", "--config.seed=1"], ["unknown flag --config.seed", "closest is --seed"]),
        (["embedded:sort", "--prompt=a"], ["unexpected argument 'embedded:sort'", "such as --model=embedded:sort"]),
        (["--model=embedded:sort", "--prompt=a", "--top_p=2"], ["top_p is 2.0"]),
        (["--model=embedded:sort", "--prompt=a", "--tensor=3"], ["tensor=3", "the 1 device at hand"]),
    ],
)
def test_command_errors(arguments, words):
    with pytest.raises(ConfigError) as error:
        module.main(arguments)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"\n \n", "the file has empty lines alone"),
        (b"\xef\xbb\xbf\n", "no prompts"),
        (b"", "the file is empty"),
        (b"a\n\xe9t\xe9\n", r"line 2 is not UTF-8 \(byte 0xe9\)"),
        (b'{"question": "a"}', "no column prompt; it has question"),
    ],
)
def test_files_without_prompts(text, words, tmp_path):
    file = tmp_path / f"prompts.{'jsonl' if b'{' in text else 'txt'}"
    file.write_bytes(text)
    with pytest.raises(ConfigError, match=words):
        module.read_prompts("", str(file), False)
