import json

import pytest
from transformers import AutoTokenizer

from jaxrl_llm.commands.preview import boundary_merges, main, marked, preview, statistics
from jaxrl_llm.config import default
from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.data import tasks
from jaxrl_llm.data.length_limit import HOPELESS, LimitedTokenizer
from jaxrl_llm.data.tokenize import RowTokenizer
from jaxrl_llm.models.files.hf import EMBEDDED


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(EMBEDDED / "sort")


def test_learned_tokens_are_marked(tokenizer):
    ids, mask = [*b"ab", *b"cd", 257], [0, 0, 1, 1, 1]
    assert marked(tokenizer, ids, mask, colour=False) == "ab⟦cd<|end|>⟧"
    assert marked(tokenizer, ids, mask, colour=True) == "\x1b[2mab\x1b[0m\x1b[1;32mcd<|end|>\x1b[0m"


def test_statistics_count_before_cutting(tokenizer):
    tokenize = LimitedTokenizer(RowTokenizer("completions", tokenizer), 4, "truncate_right", lengths=[])
    rows = [tokenize({"prompt": "a" * n, "completion": "b"}) for n in (1, 2, 3, 8)]
    found = statistics(tokenize, [row for row in rows if row is not None])
    assert found["rows"] == "4, of which 3 are used"
    assert found["tokens"] == "mean 5.5, p50 4, p95 9, max 10"
    assert found["over 4 tokens"] == "2 (50.0%)"
    # 2 of 3, 2 of 4 and, cut, 1 of 4.
    assert found["learned tokens"] == f"{5 / 11:.1%}"
    assert found["dropped, as nothing is learned"] == "1"


def test_statistics_count_rows_too_long_to_tokenise(tokenizer):
    tokenize = LimitedTokenizer(RowTokenizer("completions", tokenizer), 4, "filter", lengths=[])
    for prompt in ("a", "b" * 9, "c" * HOPELESS):
        tokenize({"prompt": prompt, "completion": "d"})
    assert len(tokenize.lengths) == 2, "the last is not tokenised"
    assert statistics(tokenize, [])["over 4 tokens"] == "2 (66.7%)"


def test_merges_across_the_boundary():
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"a": 0, "b": 1, "c": 2, "d": 3, "bc": 4, "<end>": 5}
    merging = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE(vocabulary, [("b", "c")])), eos_token="<end>")
    tokenize = RowTokenizer("completions", merging)
    rows = [tokenize({"prompt": prompt, "completion": "cd"}) for prompt in ("ab", "a")]
    assert boundary_merges("completions", [row for row in rows if row], merging) == 1
    pairs = RowTokenizer("pairs", merging)
    both = pairs({"prompt": "ab", "chosen": "cd", "rejected": "c"})
    assert boundary_merges("pairs", [both], merging) == 1, "rows are counted, not sequences"


@pytest.fixture
def pairs(tmp_path):
    rows = [{"question": "q" * n, "chosen": "yes", "rejected": "no"} for n in (1, 2, 30)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = default()
    config.algorithm.name, config.algorithm.loss, config.algorithm.beta = "preference", "dpo", 0.1
    config.data.path, config.data.eval_split = str(tmp_path / "pairs.jsonl"), "train"
    config.data.format = "user_defined.default(field_prompt='question')"
    config.data.max_length = 10
    return config


def test_preview_of_pairs(pairs):
    text = preview(pairs, rows=1)
    assert "[chosen, 5 tokens, 4 learned]\nq⟦yes<|end|>⟧\n[rejected, 4 tokens, 3 learned]\nq⟦no<|end|>⟧" in text
    assert "1 (33.3%): training stops at the first (data.overlong=error)" in text
    assert "3, of which 2 are used" in text
    assert "evaluated on" in text
    pairs.data.overlong = "filter"
    assert "1 (33.3%): dropped (data.overlong=filter)" in preview(pairs, rows=0)


def test_preview_of_prompts():
    config = default()
    text = preview(config, rows=1, measure=20)
    assert "[answer]\n" in text
    assert f"rows                   {tasks.SIZES['train']}; of the first 20, 20 are used" in text
    config.eval.every = -1
    assert "evaluated on" not in preview(config, rows=1, measure=20)


def test_preview_while_streaming(pairs):
    pairs.data.streaming = True
    assert "3, of which 2 are used" in preview(pairs)


def test_the_command(root, capsys):
    """No terminal: no colours."""
    main([f"--config={root}/configs/dpo.py", "--rows=1", "--measure=50"])
    text = capsys.readouterr().out
    assert "[chosen, " in text
    assert "⟦" in text
    assert "\x1b" not in text


@pytest.mark.slow
def test_the_command_as_a_module(root, run_python):
    result = run_python("-m", "jaxrl_llm", "preview", f"--config={root}/configs/dpo.py", "--rows=1", "--measure=50")
    assert result.returncode == 0, result.stderr
    assert "[chosen, " in result.stdout
    assert "⟦" in result.stdout
    assert "\x1b" not in result.stdout


def test_errors(tmp_path):
    config = default()
    config.data.eval_split = "nothing"
    with pytest.raises(ConfigError, match="for the evaluation: task:sort has no split 'nothing'"):
        preview(config, measure=5)
    config.model.path = str(tmp_path)
    with pytest.raises(ConfigError, match="has no tokenizer files"):
        preview(config)
    with pytest.raises(ConfigError, match="unknown flag --row"):
        main(["--row=1"])
