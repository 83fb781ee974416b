"""What is measured: models, shapes, prompts and lengths, the same for every library. Needs numpy alone."""

import dataclasses
from string import ascii_letters

import numpy as np

VOCABULARY = 49152  # ids of the tokenizer; a model may have more
WORDS = VOCABULARY - 1250  # ids that appear in prompts and rows; those behind are parts of words, see folders.py
FIRST_WORD = 16  # smaller ids are special, or could be
OURS, TRL, TUNIX, LIMIT = "jaxrl_llm", "trl", "tunix", "limit"
LIBRARIES = (OURS, TRL, TUNIX, LIMIT)


@dataclasses.dataclass(frozen=True)
class Shape:
    """One model's workloads. Rows of dpo and sft have `row` tokens, the end-of-text token included.

    `lora` is the rank of the adapters that are trained, on all linear maps of a frozen model; 0 trains the model.
    """

    prompts: int
    group: int  # completions of a prompt
    new: int  # tokens of each completion at full length
    mean: int  # of the geometric lengths
    longest: int  # of the geometric lengths
    pairs: int
    rows: int
    row: int = 128
    prompt: int = 64  # tokens of every prompt
    lora: int = 0
    config: dict = dataclasses.field(default_factory=dict)  # of the model, in Hugging Face's words

    @property
    def completions(self) -> int:
        """Rows of a rollout."""
        return self.prompts * self.group


QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 256, "intermediate_size": 1408,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "use_sliding_window": False, "vocab_size": VOCABULARY,
}  # fmt: skip
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "attention_bias": False, "mlp_bias": False,
    "vocab_size": VOCABULARY,
}  # fmt: skip
QWEN25 = QWEN2 | {"rope_theta": 1e6, "max_position_embeddings": 32768, "vocab_size": 151936}
HALF = QWEN25 | {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
                 "num_key_value_heads": 2}  # fmt: skip
LARGE = QWEN25 | {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
                  "num_key_value_heads": 2}  # fmt: skip
SEVEN = QWEN25 | {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
                  "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False}  # fmt: skip
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "head_dim": 128,
    "num_key_value_heads": 8, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "max_position_embeddings": 40960, "attention_bias": False,
}  # fmt: skip
SMALL = QWEN3 | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
SHAPES = {
    "qwen2": Shape(8, 8, 64, 32, 128, pairs=16, rows=32, config=QWEN2),
    "smollm2": Shape(4, 4, 32, 16, 64, pairs=4, rows=8, config=SMOLLM2),
    # For accelerators: the shapes of Qwen2.5 and Qwen3, with the number of completions. Those of qwen3-0.6b-64 are the
    # rows of benchmarks/compiled.py.
    "qwen2.5-0.5b-64": Shape(8, 8, 256, 128, 512, pairs=32, rows=64, row=512, config=HALF),
    "qwen2.5-0.5b-512": Shape(64, 8, 256, 128, 512, pairs=32, rows=64, row=512, config=HALF),
    "qwen2.5-1.5b-64": Shape(8, 8, 256, 128, 512, pairs=32, rows=64, row=512, config=LARGE),
    "qwen2.5-1.5b-256": Shape(32, 8, 256, 128, 512, pairs=32, rows=64, row=512, config=LARGE),
    "qwen2.5-7b-lora-64": Shape(8, 8, 256, 128, 512, pairs=16, rows=32, row=512, lora=16, config=SEVEN),
    "qwen3-0.6b-64": Shape(8, 8, 1024, 512, 2048, pairs=32, rows=64, row=1536, prompt=512, config=SMALL),
    # For tests of the benchmarks themselves: seconds each.
    "toy": Shape(2, 2, 8, 4, 12, pairs=2, rows=4, row=80,
                 config=QWEN2 | {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}),
}  # fmt: skip
DEVICES = {
    "cpu": ("qwen2", "smollm2"),
    "gpu": (
        "qwen2.5-0.5b-64",
        "qwen2.5-0.5b-512",
        "qwen2.5-1.5b-64",
        "qwen2.5-1.5b-256",
        "qwen2.5-7b-lora-64",
        "qwen3-0.6b-64",
    ),
}
# What a row of the table is, and which libraries can do it.
CASES = {
    "rollout_full": LIBRARIES,
    "rollout_geometric": LIBRARIES,
    "grpo": LIBRARIES,
    "grpo_kl": LIBRARIES,
    "grpo_geometric": (OURS, TRL, LIMIT),
    "dpo": LIBRARIES,
    "sft": LIBRARIES,
    "scaling": (OURS,),
}
DEFAULT_CASES = tuple(name for name in CASES if name != "grpo_geometric")
BETA = {"grpo": 0.0, "grpo_kl": 0.04, "grpo_geometric": 0.0}
TITLES = {
    "rollout_full": "rollout, full length",
    "rollout_geometric": "rollout, geometric lengths",
    "grpo": "GRPO step, beta 0",
    "grpo_kl": "GRPO step, beta 0.04",
    "grpo_geometric": "GRPO step, geometric lengths",
    "dpo": "DPO step",
    "sft": "SFT step",
    "scaling": "GRPO step against tokens",
}


def head_size(config: dict) -> int:
    """Numbers of a head's query, key or value."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def usual_dtype(device: str) -> str:
    """What is computed in where nothing else is said: as `model.dtype = auto`."""
    return "float32" if device == "cpu" else "bfloat16"


def prompts(shape: Shape) -> np.ndarray:
    """Token ids `[B, shape.prompt]`."""
    return np.random.default_rng(0).integers(FIRST_WORD, WORDS, (shape.prompts, shape.prompt))


def texts(count: int, length: int) -> np.ndarray:
    """Token ids `[count, length]` of given rows."""
    return np.random.default_rng(2).integers(FIRST_WORD, WORDS, (count, length))


def pairs(shape: Shape) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token ids of prompts `[pairs, prompt]`, and of chosen and rejected answers, which fill a row."""
    answer = shape.row - shape.prompt
    rows = texts(3 * shape.pairs, max(shape.prompt, answer))
    return rows[::3, : shape.prompt], rows[1::3, :answer], rows[2::3, :answer]


def lengths(shape: Shape) -> np.ndarray:
    """Where each row of the geometric cases stops, `[N]`."""
    drawn = np.random.default_rng(1).geometric(1 / shape.mean, shape.completions)
    return np.minimum(drawn, shape.longest)


def is_geometric(case: str) -> bool:
    """True for a case whose rows stop at `lengths`."""
    return case.endswith("geometric")


def useful_tokens(case: str, shape: Shape) -> int:
    """Completion tokens of one rollout."""
    return int(lengths(shape).sum()) if is_geometric(case) else shape.completions * shape.new


def word(number: int) -> str:
    """The text of a token: the five digits of its id, each place in letters of its own."""
    return "".join(ascii_letters[10 * place + int(digit)] for place, digit in enumerate(f"{number:05d}"))


def words(ids) -> str:
    """The text that the tokenizer of the benchmark's model folders reads as these ids."""
    return "".join(map(word, ids))


def reward(ids) -> float:
    """The share of odd tokens: some number that differs between rows."""
    return sum(i % 2 for i in ids) / max(1, len(ids))
