"""Writes docs/models.md: what is measured of every model family against transformers.

    python -m benchmarks.models                 # 20 minutes
    python -m benchmarks.models gemma4 lfm2_vl  # these families alone; the rows of the others stay as they are

Needs the development packages (torch, transformers). Models are tiny and random, made by transformers, in fp32; the
8 devices are simulated on the CPU.
"""

import os
import sys
import tempfile
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification

from benchmarks.page import table
from jaxrl_llm.algorithms.batch import Inputs
from jaxrl_llm.distributed.sharding import make_mesh, path_name
from jaxrl_llm.models.adapters.lora import LoraConfig
from jaxrl_llm.models.families import family_of
from jaxrl_llm.models.files import hf
from jaxrl_llm.models.files.safetensors import named_as_modules, stored_tensors
from jaxrl_llm.models.logprobs import last_scores
from jaxrl_llm.models.model import Model, add_adapters, load_model, save_hf
from jaxrl_llm.models.rope import KINDS
from tests.models import images, oracles
from tests.models.decoding import padded

ROOT = Path(__file__).parent.parent
COLUMNS = ("load", "logits", "greedy", "gradients", "export", "LoRA", "score head", "8-device shard")
SIDES = ("left", "right")
STEPS = 24


def documents() -> list[np.ndarray]:
    """Three documents, two of them longer than the windows."""
    rng = np.random.default_rng(1)
    return [rng.integers(0, oracles.VOCAB, length) for length in (7, 12, 4)]


def error(found, expected) -> float:
    """The largest absolute difference."""
    return float(np.abs(np.asarray(found) - np.asarray(expected)).max())


def logits_error(model: Model, oracle) -> float:
    """Of rows padded on either side, against each document by itself."""
    alone = [oracles.oracle_logits(oracle, document[None])[0] for document in documents()]
    worst = 0.0
    for side in SIDES:
        tokens, segments = padded(documents(), side)
        logits = np.asarray(model(tokens, segments))
        worst = max(worst, *(error(logits[row][segments[row] > 0], expected) for row, expected in enumerate(alone)))
    return worst


def greedy_tokens(model: Model, oracle) -> str:
    """How many tokens the engine and `generate` have in common."""
    tokens, segments = padded(documents(), "left")
    found = oracles.greedy(model, tokens, segments, STEPS)[:, 0]
    equal = int((found == oracles.oracle_greedy(oracle, tokens, segments, STEPS)).sum())
    return f"{equal} of {found.size}"


def gradients_error(model: Model, oracle) -> float:
    """Over every parameter."""
    tokens, segments = padded(documents(), "left")
    expected, found = oracles.oracle_gradients(oracle, tokens, segments), oracles.gradients(model, tokens, segments)
    tensors = stored_tensors(model.net, family_of(model.hf_config or {}))
    return max(error(oracles.in_parameters(one, found), oracles.of_files(one, expected)) for one in tensors)


def export_error(model: Model, folder: Path) -> float:
    """Of what transformers computes from the exported folder, against what is computed here."""
    save_hf(model, folder)
    again = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    return logits_error(model, again)


def load_mismatches(model: Model, folder: Path) -> str:
    """How many tensors come back from an exported folder bit for bit."""
    _, params = hf.load(folder)
    equal = jax.tree.leaves(jax.tree.map(lambda a, b: np.array_equal(a, b), params, model.params))
    return f"{sum(equal)} of {len(equal)}"


def with_lora(model: Model) -> Model:
    """The model with random adapters on all its linear maps."""
    model = add_adapters(model, LoraConfig(rank=4), jax.random.key(0))

    def leaf(path, x):
        return x if not path_name(path).endswith("lora_b") else 0.1 * jax.random.normal(jax.random.key(1), x.shape)

    return dataclasses.replace(model, params=jax.tree_util.tree_map_with_path(leaf, model.params))


def score_error(variant: str, folder: Path) -> float | None:
    """Of scores, against a sequence classifier of transformers, where it has one."""
    if variant in oracles.NO_CLASSIFIER:
        return None
    config = oracles.VARIANTS[variant]()
    config.num_labels = 1
    torch.manual_seed(0)
    oracle = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager").eval()
    oracle.save_pretrained(folder)
    model = load_model(folder)
    tokens, segments = padded(documents(), "left")
    found = jax.jit(lambda params: last_scores(model.net, params, Inputs(tokens, segments)))(model.params)
    return error(found, [oracles.oracle_logits(oracle, document[None])[0, 0] for document in documents()])


def shard_error(model: Model, folder: Path) -> float:
    """Of logits on a mesh (data, fsdp, tensor) = (2, 2, 2), against those on one device."""
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, oracles.VOCAB, (8, 12)))
    cut = load_model(folder, mesh=make_mesh(2, 2, 2))
    return error(cut(tokens), model(tokens))


VISION_COLUMNS = ("load", "logits", "greedy", "gradients", "export", "8-device shard")
# What is a family's own, in jaxrl_llm/models/, and what it shares with others.
VISION_FILES = {
    "idefics2": (
        "families/idefics2.py",
        "families/mistral.py families/llava.py families/siglip.py vision/siglip.py vision/perceiver.py",
    ),
    "idefics3": ("families/idefics3.py", "families/llava.py families/siglip.py vision/siglip.py vision/projector.py"),
    "smolvlm": ("families/smolvlm.py", "families/idefics3.py, and its"),
    "gemma3": ("families/gemma3.py", "families/llava.py families/siglip.py families/gemma3_text.py vision/siglip.py"),
    "qwen2_vl": ("families/qwen2_vl.py", "families/qwen2_5_vl.py, and its"),
    "qwen2_5_vl": ("families/qwen2_5_vl.py", "families/qwen_vl.py vision/patch_rows.py"),
    "qwen3_vl": ("families/qwen3_vl.py", "families/qwen_vl.py vision/patch_rows.py"),
    "qwen3_vl_moe": ("families/qwen3_vl_moe.py", "families/qwen3_vl.py families/qwen3_moe.py, and theirs"),
    "qwen3_5": ("families/qwen3_5.py", "families/qwen3_5_text.py families/qwen3_vl.py, and its"),
    "qwen3_5_moe": ("families/qwen3_5_moe.py", "families/qwen3_5_moe_text.py families/qwen3_5.py, and its"),
    "qwen4_exp": ("families/qwen4_exp.py", "families/qwen4_exp_text.py families/qwen3_5.py, and its"),
    "internvl": ("families/internvl.py", "families/llava.py families/siglip.py vision/siglip.py vision/projector.py"),
    "glm4v": ("families/glm4v.py", "families/glm4.py families/qwen_vl.py vision/patch_rows.py vision/mergers.py"),
    "glm4v_moe": ("families/glm4v_moe.py", "families/glm4_moe.py families/glm4v.py, and its"),
    "glm46v": ("families/glm46v.py", "families/glm4v.py, and its"),
    "glm_ocr": ("families/glm_ocr.py", "families/glm4v.py, and its"),
    "glm5_next": (
        "families/glm5_next.py", "families/glm5_next_text.py families/glm_ocr.py families/llava.py, and theirs",
    ),
    "exaone4_5": ("families/exaone4_5.py", "families/exaone4.py families/qwen2_5_vl.py families/llava.py, and theirs"),
    "video_llama_3": (
        "families/video_llama_3.py",
        "families/qwen2.py families/siglip.py families/llava.py families/lfm2_vl.py vision/patch_rows.py",
    ),
    "kimi_k25": (
        "families/kimi_k25.py", "families/deepseek_v3.py families/llava.py families/siglip.py vision/patch_rows.py",
    ),
    "lfm3_vl": (
        "families/lfm3_vl.py", "families/lfm3.py families/llava.py vision/patch_rows.py vision/mergers.py",
    ),
    "deepseek_vl": (
        "families/deepseek_vl.py",
        "families/llama.py families/llava.py families/siglip.py vision/siglip.py vision/projector.py",
    ),
    "ovis2": (
        "families/ovis2.py", "families/qwen2.py families/llava.py vision/patch_rows.py vision/mergers.py",
    ),
    "minimax_m3_vl": (
        "families/minimax_m3_vl.py",
        "families/minimax_m3_vl_text.py families/llava.py families/siglip.py vision/patch_rows.py vision/mergers.py",
    ),
    "lighton_ocr": ("families/lighton_ocr.py", "families/qwen3.py families/mistral3.py, and its"),
    "mistral_large4": (
        "families/mistral_large4.py", "families/mistral3.py families/mistral_large4_text.py, and theirs",
    ),
    "mistral3": ("families/mistral3.py", "families/llava.py vision/patch_rows.py vision/mergers.py"),
    "gemma4": (
        "families/gemma4.py",
        "families/gemma4_text.py families/llava.py vision/patch_rows.py vision/mergers.py vision/clipped.py",
    ),
    "gemma4_unified": (
        "families/gemma4_unified.py", "families/gemma4_unified_text.py families/gemma4.py vision/patch_embedder.py",
    ),
    "lfm2_vl": (
        "families/lfm2_vl.py", "families/lfm2.py families/siglip.py families/llava.py vision/patch_rows.py",
    ),
    "paligemma": (
        "families/paligemma.py",
        "families/gemma.py families/gemma2.py families/llava.py families/siglip.py vision/siglip.py",
    ),
    "aya_vision": (
        "families/aya_vision.py",
        "families/cohere2.py families/cohere.py families/llava.py families/siglip.py vision/projector.py",
    ),
    "cohere2_vision": ("families/cohere2_vision.py", "families/aya_vision.py families/cohere2.py, and theirs"),
    "mllama": (
        "families/mllama.py",
        "families/llava.py families/siglip.py vision/tiled.py mixers/cross_attention.py vision/projector.py",
    ),
    "llava": ("families/llava_1_5.py", "families/llava.py families/siglip.py vision/siglip.py vision/projector.py"),
    "pixtral": ("families/llava_1_5.py", "families/mistral3.py, and its; a `llava` with Pixtral's encoder"),
    "llava_next": ("families/llava_next.py", "families/llava_1_5.py vision/any_resolution.py, and theirs"),
    "llava_onevision": ("families/llava_onevision.py", "families/llava_1_5.py vision/any_resolution.py, and theirs"),
}  # fmt: skip


def vision_row(family: str, folder: Path) -> list[str]:
    """What is measured of a family with vision, on rows with two images, one and none."""
    oracle, documents = images.make_vision_oracle(family), images.image_documents(family=family)
    oracle.save_pretrained(folder / "model")
    model = load_model(folder / "model")

    def against(other) -> float:
        alone, worst = [images.logits_alone(other, document) for document in documents], 0.0
        for side in SIDES:
            tokens, segments, seen = images.padded_images(documents, side)
            logits = np.asarray(model(tokens, segments, images=seen))
            worst = max(worst, *(error(logits[row][segments[row] > 0], expected) for row, expected in enumerate(alone)))
        return worst

    save_hf(model, folder / "export")
    found, expected = images.image_gradients(model, documents), images.oracle_image_gradients(oracle, documents)
    tensors = named_as_modules(model.net, family_of(model.hf_config or {}))
    greedy = images.image_greedy(model, documents, STEPS)[:, 0]
    equal = int((greedy == images.oracle_image_greedy(oracle, documents, STEPS)).sum())
    tokens, segments, seen = images.padded_images(images.image_documents((2, 1, 0, 1), family))
    whole = np.asarray(model(tokens, segments, images=seen))
    mesh = make_mesh(1, 2, 2, context=2)
    with jax.set_mesh(mesh):
        cut = np.asarray(load_model(folder / "model", mesh=mesh)(tokens, segments, images=seen))
    again = AutoModelForImageTextToText.from_pretrained(folder / "export", attn_implementation="eager").eval()
    again = images.as_published(again)
    numbers = (
        load_mismatches(model, folder / "export"),
        against(oracle),
        f"{equal} of {greedy.size}",
        max(error(oracles.in_parameters(one, found), oracles.of_files(one, expected)) for one in tensors),
        against(again),
        error(cut[segments > 0], whole[segments > 0]),
    )
    return [f"`{family}`", *(x if isinstance(x, str) else f"{x:.1e}" for x in numbers)]


def vision_lines(family: str) -> list[str]:
    """The lines that a family with vision took."""
    own, shared = VISION_FILES[family]
    lines = len((ROOT / "jaxrl_llm" / "models" / own).read_text(encoding="utf-8").splitlines())
    return [f"`{family}`", f"`{own}`, {lines} lines", shared]


def row(variant: str, folder: Path) -> list[str]:
    """All that is measured of one family."""
    oracle = oracles.make_oracle(variant)
    oracle.save_pretrained(folder / "model")
    model = load_model(folder / "model")
    export = export_error(model, folder / "export")
    numbers = {
        "load": load_mismatches(model, folder / "export"),
        "logits": logits_error(model, oracle),
        "greedy": greedy_tokens(model, oracle),
        "gradients": gradients_error(model, oracle),
        "export": export,
        "LoRA": export_error(with_lora(model), folder / "lora"),
        "score head": score_error(variant, folder / "score"),
        "8-device shard": shard_error(model, folder / "model"),
    }
    shown = [numbers[name] for name in COLUMNS]
    return [f"`{variant}`", *("none" if x is None else x if isinstance(x, str) else f"{x:.1e}" for x in shown)]


TEXT = """# Models

Written by `python -m benchmarks.models` (jax {jax}, transformers {transformers}, fp32 on CPU).

Which models are supported, what is computed for each, models behind a URL, and new tokens. A model is a Hugging Face
folder or hub id whose config.json has one of these `model_type`s; others are refused by name before weights are read.
Each row is measured on a tiny random model of transformers: two to six layers, biases and norms random, windows and
chunks of {window} tokens where the family has them (documents have 4, 7
and 12), soft caps low enough to bind, dense layers among those with experts. Numbers are the largest absolute
difference.

{table}
- load: parameters that are equal bit for bit after an export.
- logits: rows padded on the left and on the right, against each document by itself in transformers.
- greedy: tokens equal to those of `generate`, {steps} after each of three prompts, through the sampling engine.
- gradients: of the mean cross-entropy, against torch autograd, over every parameter.
- export: logits of the exported folder in transformers, against those here.
- LoRA: the same with random adapters on every linear map, merged by the export. Experts and routers have none.
- score head: `{{Family}}ForSequenceClassification` with one label, against ours (`head="score"`); transformers has none
  of Granite, OLMoE, Gemma 3n and 4, Llama 4, ERNIE 4.5, LFM2 and 3, MiniMax-M2, Nemotron, Trinity, Kimi Linear, OLMo
  Hybrid, Falcon-H1, dots.llm1, Command R and A, Apertus, EXAONE 3, Jais 2, CWM, FlexOlmo, Solar Open, nanochat,
  VaultGemma, DBRX, Mamba, Bamba, K-EXAONE, Youtu-LLM, InternLM 3, HyperCLOVA X, IQuest-Coder, Sarvam, DeepSeek-V3.2 and
  V4, Hunyuan 3 and 4, Mellum, Command A+, MiMo-V2, Laguna, Apertus 1.5, Mistral Large 4, Ling 3, LongCat-Flash, Step
  3.5, Kolibri, MiniMax-M3 and the mixtures of experts of Qwen3.5, GLM and Granite. Step heads of GPT-2, GPT-J, GPT-Neo,
  StarCoder 1, Pythia, Falcon, BLOOM and MPT are refused: their classes have other names, or there are none.
- 8-device shard: logits on a mesh (data, fsdp, tensor) = (2, 2, 2), against one device.

## What is computed

- Rotary positions: {kinds}; the entries of transformers 4
  (`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`), also one set for each type of layer (Gemma 3 and 4, OLMo 3,
  Mellum, Laguna), a part of each head (Phi-1 to 3, Pythia, StableLM, Nemotron-4, MiMo-V2), neighbouring dimensions
  together (GLM, ERNIE 4.5, Command R, GPT-J), a base that is stretched by an `alpha` (Hunyuan), and layers without
  (SmolLM3, Llama 4, EXAONE 4.0, Trinity, Command A, Nemotron, Kolibri, Kimi Linear, GLM-5.3, and OLMo Hybrid where its
  base is null or left out: its authors mean none by both, and transformers takes 10000 where it is left out). With
  `dynamic`, rows longer than `max_position_embeddings` are scored and trained on, but not sampled; so are those longer
  than `original_max_position_embeddings` with `longrope` (Phi-3-mini-128k, Phi-3.5-mini and Phi-4-mini: 4096), whose
  documents are each rotated by their own length. With the numbers of `long_factor` as those of `short_factor` too, rows
  of any length are sampled, as in vLLM. Of both blocks in a config.json `rope_scaling` is read, as in transformers;
  `model.overrides` changes the one that the model has, and the export says so. A number that nothing is computed of is
  a warning of the run: yarn's `attn_factor` (DeepSeek-R1-0528-Qwen3-8B), which transformers does not read either, and
  vLLM multiplies cosines and sines by.
- Windows (`sliding_window`) in all layers, in some (`layer_types`, `max_window_layers`, `sliding_window_pattern`), in
  training, prefill and decoding. The cache keeps all tokens, but of DeepSeek-V4.
- Chunks (`attention_chunk_size`, Llama 4): a token sees those of its own chunk, counted from the start of its document,
  in training, prefill and decoding. Rows longer than a chunk need a mask, so `flash` is refused. Layers without rotary
  positions scale queries by their position in the document (`attn_temperature_tuning`); transformers counts padding on
  the left too.
- Latent attention (DeepSeek-V2 and V3, Moonlight, Kimi-K2, Kimi Linear, Youtu-LLM, Sarvam 105B, Ling 3, LongCat-Flash,
  GLM-5.3): the cache of a token is its latent, `kv_lora_rank + qk_rope_head_dim` numbers per layer, and decoding reads
  nothing else. The router's groups, scores and correction (`e_score_correction_bias`) are all computed; training keeps
  the correction as it is, in fp32 whatever `model.param_dtype`, and in exports of 16 bits too. Layers for multi-token
  prediction are left out. `glm4_moe` is GLM-4.5 to 4.7, which has these experts, as `dots1` has, and `glm4_moe_lite`
  GLM-4.7-Flash, which has the attention too. Folders of the type `kimi_k2` are DeepSeek-V3's in form: they are read and
  exported as a `deepseek_v3`.
- Sparse attention (DeepSeek-V3.2, GLM-5, Mistral Large 4, Hunyuan 4): a token attends to the `index_topk` tokens that
  its indexer rates best, exactly so many, in training, prefill and decoding. Rows of up to `index_topk` tokens are not
  rated; longer ones are computed in blocks of queries, whatever `model.attention`, and in rows many times as long
  queries read copies of the latents that are chosen for them and no others
  ([performance](performance.md#recurrent-layers-and-latent-attention)). The choice has no gradient: training keeps the
  indexer as it is, without moments, and it has no adapters. An indexer may serve the layers behind its own too
  (`indexer_types`). In Mistral Large 4, whose text part has the type `mistral_large4_text`, layers may also read the
  latents of an earlier one (`kv_source_layers`), which are cached once.
- Queries that grow with the log of their position: by a number of the model (Llama 4, Ministral 3, Mistral 4), or by
  two of each head, which are trained, in Mistral Large 4 (`softmax_scaling`), whose rotary frequencies have a trained
  factor each too (`rotary_emb.alpha`). Both are computed in fp32, as its routers are, and `alpha` and the routers'
  matrices stored so whatever `model.param_dtype`.
- Sparse attention to pools (GLM-5.3-Flash, `glm5_next`): the indexer rates pools of `index_kpool` tokens, each by a
  weighted sum of its tokens' keys, and a token attends to the `index_topk` tokens of the best pools that are complete
  with it, and to the tokens behind the last complete one; one that completes a pool may so not see itself. Pools are
  counted from the start of a document, and decoding rates those of the prompt without reading its tokens again. Rows of
  a group share no prefix. transformers has no class for the text part alone: it is `glm5_next_text` here, as which a
  net without a vision part is exported.
- Hyper-connections (DeepSeek-V4, GLM-5.3, Hunyuan 4): layers read and write several streams of hidden states
  (`hc_mult`) by weights that each token gives them, computed in fp32, and mix the streams, but for Hunyuan 4's, after
  `hc_sinkhorn_iters` steps of Sinkhorn and Knopp. Between layers a token has that many hidden states, which count where
  activations are kept (`model.remat`). Hunyuan 4's head is one of 32 bits in transformers: `model.fp32_head`.
  Transformers rotates two halves of its queries and keys together, vLLM and SGLang neighbouring dimensions:
  `rope_interleave`, true, in `model.overrides` is the latter.
- Attention to blocks (MiniMax-M3): each key/value head sees the `index_topk_blocks` blocks of `index_block_size` tokens
  that its indexer rates best, the latest `index_local_blocks` among them, in training, prefill and decoding. Blocks are
  counted from the start of a document, where transformers counts them from the start of a row: padding on the left
  changes what it computes, and nothing here. Longer rows are computed in blocks of queries, as above; rows of a group
  share no prefix (`batch.packing`). Training keeps the indexer as it is.
- Attention to blocks by their mean keys (QSA, Qwen4-Exp): each complete block of `indexer_compress_ratio` tokens,
  counted from the start of a document, is rated by the mean of its tokens' keys, normed and rotated as its first token.
  A token sees the best blocks, `indexer_budget` tokens together, and those behind the last complete one. Longer rows
  are computed in blocks of queries, and no prefix is shared, as above; training keeps the indexer.
- Gated streams of hidden states (`hc_count`, Qwen4-Exp): mixer and feed-forward read a mean of them, of which each
  number has a gate by a low-rank map, and each stream takes a share of its own of what they give.
- Embeddings of n-grams (`ple_layer_ids`, Qwen4-Exp): tables of a layer that hashes of the last tokens look up, with
  gates by the streams and a convolution of tokens `ngram_size` apart. n-grams begin anew with each document, and behind
  the first of the `eos_token_id`. Tables are trained like other parameters. The numbers of the hashes follow from
  config.json; others in the files are refused. They depend on the size of the vocabulary, which therefore cannot grow.
  The maps of streams and n-grams have no adapters and are not quantised.
- Attention to compressed tokens (DeepSeek-V4): a token sees those in a window of `sliding_window`, by one key for all
  heads, which is their value too, and entries that each stand for `compress_rates` tokens before: all entries, of many
  tokens each (`heavily_compressed_attention`), or the `index_topk` that an indexer rates best, of few each
  (`compressed_sparse_attention`). Entries are counted from the start of a document, where transformers counts them from
  the start of a row: padding on the left changes what it computes, and nothing here. Rows are computed in blocks as
  long as the window, by `xla` alone; a row's cache is its latest tokens and its entries. Rows of a group share no
  prefix (`batch.packing`), and the server keeps none. Training keeps the indexer as it is. The map before the last one
  (`o_a_proj`) has no adapter, as in PEFT.
- Weights in fp8 with a scale for each block of numbers (`weight_block_size`, DeepSeek-V3 and Qwen3's FP8 folders, and
  MXFP8, MiniMax-M3's) or for each matrix (Ministral 3), and experts in MXFP4 (gpt-oss, DeepSeek-V4), are read as
  numbers and exported as such.
- So are matrices that bitsandbytes has quantised (`unsloth/...-bnb-4bit`): nf4 and fp4, with double quantisation or
  without, and int8. With `model.quantize=nf4` those of nf4 keep every number, but where no number of a block is its
  largest.
- And those in the formats of GPTQ (2, 4 and 8 bits, with `desc_act` or without, gptq_v2 too), of AWQ (gemm), of AutoFP8
  and fbgemm, and of compressed-tensors, which llm-compressor writes: `pack-quantized`, `int-quantized`,
  `float-quantized`, `naive-quantized`, `nvfp4-`, `mxfp4-` and `mxfp8-` ones, of which a model may have several (Kimi
  K2.5's experts). What activations and caches have in few bits there are numbers here. 3 bits, the layouts of marlin
  and of other kernels of AWQ, sparse ones and rotations are refused. `model.quantize` of as many bits keeps every
  number, where each scale is of 64 inputs or more and zero points say nothing (`int4`: GPTQ with `sym`, w4a16) or of an
  output or the whole (`int8`, `fp8`); the others, AWQ's among them, are rounded once more.
- Gated delta nets with short convolutions, beside gated attention (Qwen3-Next, Qwen3.5, Qwen4) or plain (OLMo Hybrid),
  and Kimi delta attention, whose states decay by each number of a key (Kimi Linear, and Ling 3 with a floor under the
  decays). Rows are computed in chunks of 64
  or 128 tokens, with memory linear in their length: four rows of 32k tokens train on one h100
  ([compiled](performance.md#what-a-step-moves-by-the-compilers)). A state starts anew with each document of a packed
  row. A row's cache is its state and the inputs of its latest tokens, whatever its length. An update's rows are not
  packed (`batch.packing`). Layers for multi-token prediction are left out.
- Mamba-2, in the same way, with a state for each head: in layers of its own (Granite 4, Nemotron-H and 3), alone
  (Mamba-2, Mamba-Codestral) or beside attention in each layer (Falcon-H1, with its multipliers). Its steps have the
  limits of `time_step_limit`.
  Transformers cuts Nemotron's off below `time_step_min` in whole rows but not in decoding; here they are not cut.
- Mamba-1, with a state for each channel, of which each number decays at a rate of its own: alone in a layer (Mamba,
  Falcon Mamba), or with feed-forwards and experts, and layers of attention without positions among them (Jamba). The
  tokens of a row go through the states one after another, and the backward pass has the states of 64 tokens at a time.
  Hidden states are in `model.dtype`, whatever `residual_in_fp32` says.
- Layers that are a mixer, a feed-forward or experts alone, feed-forwards and experts without gates (Nemotron,
  nanochat and Arcee's AFM), and experts that are narrower than the model (Nemotron 3 Super). Experts without gates have
  no adapters.
- xIELU (arXiv 2411.13010), the activation of Apertus: `a x^2 + b x` above 0 and `c (exp(x) - 1 - x) + b x` below it,
  in fp32. Its two numbers of each layer, of which a and c are the softplus, are trained with the rest; `b` stays.
- Learned positions (GPT-2, GPT-Neo, StarCoder 1, OPT) in place of rotary ones: a row of a table is added to each
  token's embedding, counted from the start of its document. Documents longer than the table are refused before anything
  is sampled or trained (of a critic and a teacher too); rows of `data.packing` may be longer. A reward model refuses a
  longer row when it comes (`max_length` keeps its end).
- Scores that fall with distance in place of positions (ALiBi, arXiv 2108.12409), in fp32: BLOOM and MPT, of which
  `alibi_bias_max` is read too (storywriter), as by vLLM; transformers takes 8 for all. Attention is by `xla`.
- Layer norms, with a bias (GPT-2, GPT-J, GPT-Neo, Pythia, OPT, Phi-2, StableLM, StarCoder, Falcon, Nemotron-4, Jais 2,
  BLOOM), without one (Command R and A, MPT, DBRX), behind the embeddings too (BLOOM), or without parameters (OLMo 1,
  Galactica). OPT-350M norms after each residual sum, has no last norm, and projects its narrower embedding to the
  model's width and back before its heads.
- Norms without parameters for embeddings, layers, and already rotated queries and keys; rotation by negative angles
  (nanochat).
- Attention and feed-forward side by side, behind one layer norm (Command R, R7B and A, Phi-2, GPT-J, Falcon 7B and 11B,
  some StableLM) or one each (Pythia, Falcon 40B and 180B).
- Norms of queries and keys with a scale for each head, one array (Command R+) or a tensor for each (StableLM 2 12B).
- Queries, keys and values by one map, as the files have it: all of one after another (GPT-2, StarCoder 1, MPT,
  DBRX), or those of each key/value head together (Pythia, Falcon, BLOOM). GPT-2's files hold their matrices as
  `[in, out]`.
- A head with a bias (Phi-2, GPT-J), in every log-prob, entropy, divergence and sample. Dropout of a config.json is not
  computed, as with TRL's `disable_dropout`, nor is the noise before DBRX's routers (`moe_jitter_eps`); `lora.dropout`
  is.
- A tokenizer needs no padding token (GPT-2's and Pythia's have none), as padding is known by its place. One without a
  chat template takes rows of text, and refuses messages unless `data.chat_template` names a template.
- Gated short convolutions beside attention (LFM2, LFM2-MoE, LFM3), within a document. A row's cache is its latest
  tokens, whatever its length; an update's rows are not packed (`batch.packing`).
- Experts beside a layer of two halves, each latent attention and a dense feed-forward (LongCat-Flash): they read what
  the first half's feed-forward reads, and are added behind the second one. Some of them compute nothing, and give a
  token as it is (`zero_expert_num`): they take part in the balance of experts, and have no matrices. The class of
  transformers 5 has unused ones of theirs, and refuses files without them, as exports are.
- Gates on the output of attention, for each number (Qwen3-Next, Trinity) or each head (LFM3, Laguna, Step 3.5, Ling 3),
  by a sigmoid or a softplus (Laguna).
- Layers without a window that have another number of heads (Laguna, Step 3.5) or of key/value heads (MiMo-V2, Gemma 4)
  than those with one, and values smaller than keys (MiMo-V2), whose decode steps take no kernel on GPUs.
- Gates that are clipped behind their activation, and ups, in some layers, of experts (`swiglu_limits`) and of other
  feed-forwards (`swiglu_limits_shared`): Step 3.5 Flash. Layers that are clipped otherwise are stacks of their own.
- Attention sinks (gpt-oss, Granite with windows, MiMo-V2, Hunyuan 4): on NVIDIA GPUs, in 16 bits, by cuDNN and the
  kernel of decode steps, elsewhere by `xla`; `flash` and `splash` have none and are refused.
- Soft caps on attention scores and logits, wherever logits are formed. `model.fp32_head` forms them in float32.
- Multipliers of embeddings, attention scores, residuals and logits (Granite, HyperCLOVA X). `layer_rope_theta` of
  Granite with windows has one base for the layers with a window and one for the others, or 0: no rotary positions.
- Gemma 4: full attention with heads of another size than in layers with a window, keys that are values too, layers that
  read the keys and values of an earlier layer, embeddings for each layer, and experts beside a dense feed-forward. The
  factor of a layer's output (`layer_scalar`) is not trained. The maps of per-layer embeddings have no adapters and are
  not quantised.
- Gemma 3n: streams of hidden states, of which a layer reads and writes the first, and predicts and corrects the others
  (AltUp, arXiv 2301.13310); a low-rank residual beside attention (Laurel, arXiv 2411.07501); and feed-forwards whose
  gates are 0 unless they exceed the mean by so many standard deviations (`activation_sparsity_pattern`), beside
  per-layer embeddings and shared keys and values. The maps of streams and of Laurel have no adapters and are not
  quantised. transformers clips coefficients of AltUp above 120 in training; here they are not clipped.
- Of `gemma3n` and `apertus1p5` the text part alone, as of `llama4`: their encoders of images and sound are not read.
  Codes of images and sound are tokens of Apertus 1.5 too, which its head does not predict (`output_vocab_size`): they
  are read, and never sampled.
- Of `llama4` and `step3p7`, which read images too, the text part alone: a folder of theirs is read as a `llama4_text`
  or a `step3p5`, rows with images are refused, and the export is a model of that type, without the other parts.
  Adapters are named as in that type's class. So is a `gemma4`, a `gemma4_unified` (Gemma 4 12B) or a `kimi_k25` without
  a `vision_config`; of one that has it images are read, and Gemma's part for sound is not: the export has none
  (`audio_config` is null).
- Mixtures of experts, with a shared expert where the family has one (Qwen2-MoE, ERNIE 4.5, Hunyuan), routers of softmax
  or sigmoid or the root of a softplus, corrected or not, or a table with the experts of each token of the vocabulary
  (the first layers of DeepSeek-V4, which therefore takes no new tokens), and weights of their outputs or, in Llama 4,
  their inputs: no token is dropped. Tokens are sorted by expert and multiplied in groups; every expert computes every
  token on CPUs where a token uses more than a fourth of them, and on GPUs without Triton ([what it
  saves](performance.md#mixtures-of-experts)). Checkpoints are read with each expert's matrices apart or stacked, and
  written as on the hub: apart, of Gemma 4, Llama 4, Qwen3-VL and gpt-oss stacked, and of DBRX as rows of one matrix.
  PEFT has no adapters of these, nor of LongCat-Flash's: take the merged model. gpt-oss's are read from MXFP4 too, as
  the numbers that they stand for, so that they can be trained, or [kept in it](adapters.md#quantised-experts) under
  adapters, and written as floats. `model.router_aux_loss_coef` and `model.freeze_router` are in docs/configuration.md:
  the load-balancing loss (arXiv 2101.03961) is over the layers whose router chooses, and of routers that are no softmax
  it takes each score over their sum, as DeepSeek-V3 (arXiv 2412.19437) and Megatron do, where transformers takes a
  softmax of the same logits. Phi-3.5-MoE's experts are weighted one after another (SparseMixer, arXiv 2409.12136) as it
  is evaluated; in training transformers draws them at random, with another gradient.

Weights are safetensors. With `model.allow_pickle` a folder without them is read from `pytorch_model.bin`, by a reader
that knows only tensors and runs no code. Code in a tokenizer's folder is run only with `model.trust_remote_code`, in
`generate`, `chat` and `serve` with `--trust_remote_code`. Exports contain no code, and their config.json names none.

## Models behind a URL

`model.path`, `model.tokenizer`, `lora.path`, `critic.path`, `teacher.path`, reward models (`model:URL`) and the models
of the commands may be the URL of a folder: `gs://BUCKET/MODEL` (`pip install "jaxrl_llm[gcs]"`), `s3://BUCKET/MODEL`
(`pip install "jaxrl_llm[s3]"`), `hdfs://HOST/MODEL` (a Hadoop client, by which pyarrow reads), and others that
[fsspec](https://filesystem-spec.readthedocs.io) knows. Credentials are found as the store's package finds them. The
files that a download from the hub would bring are copied to `$JAXRL_LLM_CACHE/models` (`~/.cache/jaxrl_llm/models`),
once for each machine; `plan` copies only config.json. The record of a run keeps the URL.

- An interrupted copy continues with the files that it lacks.
- If the listing of the store (names, sizes, times, checksums) differs, all is copied again, into another folder.
  Earlier copies stay until you delete them.
- A folder that changes while it is copied is refused.

This was tested with fsspec's own stores (memory, files), not with the clouds themselves. To copy a trained model to a
URL see [`export.copy_to`](sharing.md#copy-it-to-a-bucket).

## New tokens

Texts that a model shall read or write as one token, such as `<think>` or the marks of a chat template, are added to its
vocabulary before training:

```sh
python -m jaxrl_llm add_tokens --model=embedded:sort --tokens='<think>,</think>' --output=models/thinking
```

The folder holds the model, in its own storage type, and its tokenizer. Each text is one id, which rewards and stop
strings see; with `--special` it is left out of decoded completions, like marks of turns. Its rows of the embedding and
of the head are the mean of the other tokens' rows. Unused rows of the embedding (Qwen, Phi) are taken first, then
`vocab_size` grows. The rows must be learned: by training the whole model, or with adapters by
`lora.modules_to_save=embed_tokens,lm_head`. Add the tokens to a reference, teacher or reward model that is fed the
policy's ids too. Models with embeddings in their layers (Gemma 3n) are refused. In axolotl this is `tokens`, in TRL
what `chat_template_path` does with the tokens of another tokenizer.

## Families that read images

[Vision](vision.md) explains them. The measurements are the same, on rows with two images, one and none, padded on
either side; images of any size have 15, 6 and 4 tokens. The mesh is (fsdp, context, tensor) = (2, 2, 2).

{vision_table}
What a family took: a file with the names of its tensors and the entries of its config.json, beside an encoder that it
shares (the paths are in `jaxrl_llm/models/`), and a function in `data/image_processors/` (20 to 50 lines) that calls
transformers' processor of images, and writes their tokens.

{vision_lines}
## A family of your own

A family is a file: names of tensors, and the meaning of the entries of config.json for a `ModelConfig`
(models/model_config.py has all its fields). With `--config.model.register=helium.py` a run knows this one, which is
not in the package:

```python
{example}```

Everything follows from it: training, sampling, adapters, sharding, export. A file without one of these names, and an
entry that means nothing here, are refused by name. In Python it is `jaxrl_llm.models.families.register(module)`.

## A new kind of layer

A layer is a mixer and a feed-forward (dense, or a mixture of experts). `models/mixers/mixer.py` is the protocol of a
mixer: `prefill` for rows, `decode` for the next tokens of rows, `empty_cache` and `grow_cache` for its cache, which the
engine passes on and never looks into. Attention (`models/mixers/attention.py`), full or sliding, is one mixer.
Another one is a class with this protocol in a file beside it, and a family that names it for each layer in
`ModelConfig.mixers` and its tensors in `KEYS`, as `layers/<path>/...`. Layers of one mixer are stacked, and consecutive
ones run in one scan. `tests/models/mixers/test_mixer.py` has a recurrent one, and samples with it.

Not supported: the vision part of Llama 4, sound and videos, checkpoints quantized otherwise, texts that are read in
both directions (but PaliGemma's prompts), Falcon's ALiBi (Falcon-RW), and a scale of attention for each layer
(`scale_attn_by_inverse_layer_idx`).
"""

EXAMPLE = '''"""Helium (Kyutai): Llama's shape, with neighbouring dimensions of a head rotated together."""

from jaxrl_llm.models.families import decoder
from jaxrl_llm.models.families.decoder import LAYER, TensorName, linear

MODEL_TYPE = "helium"  # of config.json
ARCHITECTURE = "Helium"  # its architectures begin with this
KEYS = (  # where each parameter is in the files; decoder.KEYS is the same table
    *decoder.ENDS,  # embedding, last norm, heads
    TensorName("layers/input_norm/scale", f"{LAYER}input_layernorm.weight"),
    TensorName("layers/post_attention_norm/scale", f"{LAYER}post_attention_layernorm.weight"),
    *linear("layers/attention/q", f"{LAYER}self_attn.q_proj"),  # a matrix, and a bias if the model has one
    *linear("layers/attention/k", f"{LAYER}self_attn.k_proj"),
    *linear("layers/attention/v", f"{LAYER}self_attn.v_proj"),
    *linear("layers/attention/o", f"{LAYER}self_attn.o_proj"),
    *decoder.FEED_FORWARD,
)
DEFAULTS = {"head_dim": 128, "rms_norm_eps": 1e-8}  # for entries that are left out


def to_config(hf, **overrides):
    """The ModelConfig of a config.json."""
    hf = DEFAULTS | hf
    own = {
        "rope_interleaved": True,
        "attention_bias": hf.get("attention_bias", False),
        "mlp_bias": hf.get("mlp_bias", False),
    }
    return decoder.to_config(hf, ARCHITECTURE, own, overrides, rope={"theta": 100_000.0})


def from_config(config, base):
    """The config.json of a net, over the entries of `base`, those it was loaded from."""
    own = {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias}
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own)
'''


def main(names: list[str]) -> None:
    """Measures the families with these names, or all."""
    transformers.logging.set_verbosity_error()
    page = ROOT / "docs" / "models.md"
    if unknown := sorted(set(names) - {*oracles.FAMILIES, *images.VISION}):
        raise SystemExit(f"no families: {', '.join(unknown)}")
    kept: dict[str, list[str]] = {}
    for line in page.read_text(encoding="utf-8").splitlines() if names else []:
        if line.startswith("| `"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            kept.setdefault(cells[0].strip("`"), cells)

    def of(family: str, measure: Callable[[str, Path], list[str]]) -> list[str]:
        if family in kept and family not in names:
            return kept[family]
        with tempfile.TemporaryDirectory() as temporary:
            found = measure(family, Path(temporary))
        jax.clear_caches()  # all programs together would need more memory maps than a process may have
        print(*found, flush=True)
        return found

    rows = [["family", *COLUMNS], *(of(variant, row) for variant in oracles.FAMILIES)]
    seen = [["family", *VISION_COLUMNS], *(of(family, vision_row) for family in images.VISION)]
    lines = [["family", "its own", "shared"], *map(vision_lines, images.VISION)]
    text = TEXT.format(
        vision_table=table(seen), vision_lines=table(lines),
        jax=jax.__version__, transformers=transformers.__version__, window=oracles.WINDOW, table=table(rows),
        steps=STEPS, example=EXAMPLE, kinds=", ".join(KINDS),
    )  # fmt: skip
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
