"""Model folders of the benchmark: random weights of a shape, or given ones, with a tokenizer of one word per id."""

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from string import ascii_letters

import ml_dtypes
import numpy as np

from benchmarks.cases import SHAPES, WORDS, head_size, word

LARGE = 1e9  # parameters from which a model's files are in bfloat16, in which accelerators compute anyway
DRAWN = 1_000_003  # random numbers, which repeat in every matrix; a prime, so that no two of its rows are alike
SPECIAL = {"<pad>": 0, "<bos>": 1, "</s>": 2}


def folder_of(model: str, cache: Path, weights: Path | None = None) -> Path:
    """The Hugging Face folder of `model`, made under `cache` unless it is there.

    `weights` is a folder to take config.json and model.safetensors from; random weights cost the same to compute with.
    """
    folder = cache / "models" / (model if weights is None else f"{model}-given")
    if not (folder / "done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        if weights is None:
            _random(folder, SHAPES[model].config)
        else:
            config = json.loads((weights / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(config))
            target = folder / "model.safetensors"
            target.unlink(missing_ok=True)
            target.symlink_to((weights / "model.safetensors").absolute())
        _tokenizer(folder)
        (folder / "done").touch()
    return folder


def _random(folder: Path, shape: dict) -> None:
    from safetensors.numpy import save_file

    sizes = tensor_shapes(shape)
    dtype = np.dtype(ml_dtypes.bfloat16 if sum(map(math.prod, sizes.values())) > LARGE else np.float32)
    rope = {"rope_type": "default", "rope_theta": shape["rope_theta"]}
    config = {
        "tie_word_embeddings": True, **shape, "hidden_act": "silu", "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 0, "torch_dtype": str(dtype), "initializer_range": 0.02,
        "rope_parameters": rope,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(ids))
    numbers = (0.02 * np.random.default_rng(0).standard_normal(DRAWN, np.float32)).astype(dtype)
    tensors = {
        name: np.ones(size, dtype) if name.endswith("norm.weight")
        else np.zeros(size, dtype) if name.endswith("bias")
        else np.resize(numbers, size)
        for name, size in sizes.items()
    }  # fmt: skip
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def tensor_shapes(shape: dict) -> dict[str, tuple[int, ...]]:
    """The tensors of a llama, qwen2 or qwen3, by their names in a Hugging Face folder, as [out, in]."""
    width, ffn, head = shape["hidden_size"], shape["intermediate_size"], head_size(shape)
    queries, keys = (head * shape[f"num_{name}_heads"] for name in ("attention", "key_value"))
    maps = {
        "self_attn.q_proj": (queries, width), "self_attn.k_proj": (keys, width), "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries), "mlp.gate_proj": (ffn, width), "mlp.up_proj": (ffn, width),
        "mlp.down_proj": (width, ffn),
    }  # fmt: skip
    sizes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape["vocab_size"], width),
        "model.norm.weight": (width,),
    }
    if not shape.get("tie_word_embeddings", True):
        sizes["lm_head.weight"] = sizes["model.embed_tokens.weight"]
    for layer in range(shape["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        sizes |= {f"{prefix}{name}.weight": size for name, size in maps.items()}
        sizes |= {f"{prefix}{name}.weight": (width,) for name in ("input_layernorm", "post_attention_layernorm")}
        if shape["model_type"] == "qwen2":
            sizes |= {f"{prefix}self_attn.{x}_proj.bias": maps[f"self_attn.{x}_proj"][:1] for x in "qkv"}
        if shape["model_type"] == "qwen3":
            sizes |= {f"{prefix}self_attn.{x}_norm.weight": (head,) for x in "qk"}
    return sizes


def _tokenizer(folder: Path) -> None:
    """Writes a byte-pair tokenizer that reads five letters (`cases.word`) as one token, whatever stands beside them."""
    merges, rest = [], dict.fromkeys(ascii_letters[:50])
    for left, right in _halves():
        merges.append([left, right])
        rest[left + right] = None
    words = {word(i): i for i in range(len(SPECIAL), WORDS)}
    merges += [[text[:2], text[2:]] for text in words]
    vocabulary = SPECIAL | words | {text: WORDS + i for i, text in enumerate(rest)}
    added = [
        {"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for token, i in SPECIAL.items()
    ]  # fmt: skip
    letters = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": letters, "post_processor": None, "decoder": letters,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "</s>", "pad_token": "<pad>",
        "unk_token": "<pad>", "padding_side": "left", "model_max_length": 8192, "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _halves() -> Iterator[tuple[str, str]]:
    """The merges that make the first two letters of a word, and its last three."""
    one, two, three, four, five = (ascii_letters[i : i + 10] for i in range(0, 50, 10))
    yield from itertools.product(one, two)
    yield from itertools.product(four, five)
    yield from ((c, d + e) for c in three for d in four for e in five)
