"""Tiny random models of every family, made by transformers, and what to compare with them.

The tests of families and `python -m benchmarks.models` measure with these.
"""

import functools
import re
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers import (
    AfmoeConfig,
    Apertus1p5TextConfig,
    ApertusConfig,
    ArceeConfig,
    AutoModelForCausalLM,
    BailingHybridConfig,
    BambaConfig,
    BloomConfig,
    Cohere2Config,
    Cohere2MoeConfig,
    CohereConfig,
    CwmConfig,
    DbrxConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV4Config,
    DeepseekV32Config,
    Dots1Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    ExaoneConfig,
    ExaoneMoeConfig,
    FalconConfig,
    FalconH1Config,
    FalconMambaConfig,
    FlexOlmoConfig,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Gemma4UnifiedTextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    Glm5NextForConditionalGeneration,
    Glm5NextTextConfig,
    Glm5NextTextModel,
    GlmConfig,
    GlmMoeDsaConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTJConfig,
    GPTNeoConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    GraniteMoeSharedConfig,
    GraniteMoeSWAConfig,
    GraniteSWAConfig,
    HunYuanDenseV1Config,
    HunYuanMoEV1Config,
    HyperCLOVAXConfig,
    HYV3Config,
    HYV4Config,
    InternLM3Config,
    IQuestCoderConfig,
    Jais2Config,
    JambaConfig,
    KimiLinearConfig,
    Kolibri1Config,
    LagunaConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    Lfm3Config,
    Llama4TextConfig,
    LlamaConfig,
    LongcatFlashConfig,
    Mamba2Config,
    MambaConfig,
    MellumConfig,
    MiMoV2FlashConfig,
    MiniCPM3Config,
    MiniMaxM2Config,
    MiniMaxM3VLTextConfig,
    Ministral3Config,
    MinistralConfig,
    Mistral4Config,
    Mistral4ForCausalLM,
    MistralConfig,
    MistralLarge4Config,
    MistralLarge4ForConditionalGeneration,
    MixtralConfig,
    MptConfig,
    NanoChatConfig,
    NemotronConfig,
    NemotronHConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoConfig,
    OlmoeConfig,
    OlmoHybridConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PhimoeConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Qwen4ExpTextConfig,
    SarvamMLAConfig,
    SarvamMoEConfig,
    SeedOssConfig,
    SmolLM3Config,
    SolarOpenConfig,
    StableLmConfig,
    Starcoder2Config,
    Step3p7TextConfig,
    VaultGemmaConfig,
    YoutuConfig,
)
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextPreTrainedModel
from transformers.models.longcat_flash import modeling_longcat_flash
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts
from transformers.models.step3p7.modeling_step3p7 import Step3p7PreTrainedModel, Step3p7TextModel

from jaxrl_llm.distributed.sharding import path_name
from jaxrl_llm.models.files.safetensors import Stored
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import SamplingParams
from jaxrl_llm.training.update import add_gradients


class Glm5NextForCausalLM(Glm5NextPreTrainedModel, GenerationMixin):
    """The text part of GLM-5.3-Flash with its head, of which transformers has a class beside the vision part alone."""

    config_class = Glm5NextTextConfig
    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}
    create_masks_for_generate = staticmethod(Glm5NextForConditionalGeneration.create_masks_for_generate)

    def __init__(self, config):
        super().__init__(config)
        self.model = Glm5NextTextModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids=None, **arguments):
        """The logits of tokens."""
        out = self.model(input_ids, **arguments)
        return MoeCausalLMOutputWithPast(logits=self.lm_head(out.last_hidden_state), cache=out.cache)


# Which transformers knows as a part of others alone.
AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)
AutoModelForCausalLM.register(MistralLarge4Config, MistralLarge4ForConditionalGeneration, exist_ok=True)
AutoModelForCausalLM.register(Glm5NextTextConfig, Glm5NextForCausalLM, exist_ok=True)


class RoutedExperts(LongcatFlashExperts):
    """The experts of LongCat-Flash without matrices of those that compute nothing, which transformers' have: it would
    ask files for these."""

    def __init__(self, config):
        super().__init__(config)
        self.gate_up_proj = torch.nn.Parameter(self.gate_up_proj[: config.n_routed_experts])


modeling_longcat_flash.LongcatFlashExperts = RoutedExperts


class Step3p5ForCausalLM(Step3p7PreTrainedModel, GenerationMixin):
    """The text part of Step 3.7 with a head, of which transformers has no class."""

    config: Step3p7TextConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = Step3p7TextModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
        self.model.embed_tokens.padding_idx = None  # whose embedding would have no gradient

    def forward(self, input_ids=None, logits_to_keep=0, **arguments):
        out = self.model(input_ids=input_ids, **arguments)
        return MoeCausalLMOutputWithPast(logits=self.lm_head(out.last_hidden_state), cache=out.cache)


AutoModelForCausalLM.register(Step3p7TextConfig, Step3p5ForCausalLM, exist_ok=True)
# Names in StepFun's files, as the whole model's are converted, but for those of its parts.
OF_STEP = [x for x in get_checkpoint_conversion_mapping("step3p7") if re.search("moe|share", str(x.source_patterns))]
register_checkpoint_conversion_mapping("step3p5", OF_STEP, overwrite=True)
VOCAB = 97
WINDOW = 5  # shorter than the documents of the tests
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,  # with these, of the 8 waves some are kept, some slowed, some between
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
GROWING_ROPE = YARN_ROPE | {
    "factor": 8.0, "original_max_position_embeddings": 4, "llama_4_scaling_beta": 0.8, "mscale": 1.0,
    "mscale_all_dim": 1.0,
}  # fmt: skip
LONG_ROPE = {  # as Phi-4-mini has it
    "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75, "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.0, 2.5, 6.0],
}  # fmt: skip
MINICPM3_ROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.1, 2.5], "long_factor": [1.1, 2.5],
    "original_max_position_embeddings": 8,
}  # fmt: skip
HALF_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
OLMO3_ROPE = {
    "full_attention": YARN_ROPE,
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
GEMMA4 = {  # with queries and keys that are nearly at right angles rounding errors would be amplified
    "head_dim": 8, "global_head_dim": 16, "sliding_window": WINDOW, "rms_norm_eps": 1e-3,
}  # fmt: skip
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 16}
EXPERTS = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.02}
# Of two delta nets around attention; their key and value heads and the numbers of these differ.
DELTA_NETS: dict[str, Any] = {
    **SHAPE, "num_hidden_layers": 3, "head_dim": 16, "linear_key_head_dim": 6, "linear_value_head_dim": 10,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rms_norm_eps": 1e-3,  # heads whose queries and keys are nearly at right angles would amplify rounding errors
}  # fmt: skip
# Of the 12 tokens of a document 2 blocks of 2 are chosen; heads enough that hardly a block has the score 0.
POOLED: dict[str, Any] = {
    **{name: x for name, x in DELTA_NETS.items() if name != "intermediate_size"}, "num_hidden_layers": 5,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention", "indexed_attention"],
    "hc_count": 3, "hc_lowrank": 12, "indexer_n_heads": 12, "indexer_kv_heads": 1, "indexer_head_dim": 16,
    "indexer_budget": 4, "indexer_compress_ratio": 2,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 6, "mamba_d_conv": 3}
# As many numbers of keys as of values: of others transformers writes convolutions that it cuts elsewhere.
OLMO_NETS: dict[str, Any] = {
    "linear_key_head_dim": 10, "linear_num_key_heads": 2, "linear_value_head_dim": 5,
    "linear_num_value_heads": 4,
}  # fmt: skip
NEMOTRON_H = {  # steps that transformers would cut off in whole rows, but not in decoding, are none
    **{name: x for name, x in SHAPE.items() if name != "num_hidden_layers"}, "head_dim": 16, "mamba_num_heads": 8,
    "mamba_head_dim": 6, "n_groups": 2, "ssm_state_size": 5, "conv_kernel": 3, "num_experts_per_tok": 2,
    "n_routed_experts": 4, "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 20,
    "time_step_min": 1e-9,
}  # fmt: skip
SMALL_GPT: dict[str, Any] = {  # the entries of SHAPE under the names of GPT-2
    "vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.15,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}  # fmt: skip
SMALL_NEO: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64,
    "attention_types": [[["global", "local"], 1]], "window_size": WINDOW, "initializer_range": 0.15,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}  # fmt: skip
SMALL_BLOOM: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.15,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}  # fmt: skip
SMALL_MPT: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64, "initializer_range": 0.15,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}  # fmt: skip
SMALL_OPT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48,
    "init_std": 0.15, "max_position_embeddings": 64,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}  # fmt: skip
SMALL_MAMBA: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 5, "conv_kernel": 3,
    "initializer_range": 0.15, **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}  # fmt: skip
SMALL_DBRX: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64, "initializer_range": 0.15,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}  # fmt: skip
ALONE = {name: x for name, x in SHAPE.items() if name != "num_key_value_heads"}  # of heads with keys of their own
FALCON = {name: x for name, x in ALONE.items() if name != "intermediate_size"} | {"ffn_hidden_size": 48}
SHARED_EXPERT = {**EXPERTS, "moe_intermediate_size": 16, "num_experts": 4, "shared_expert_intermediate_size": 20}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
# Of the 12 tokens of a document 5 are seen; heads enough that hardly a token has the score 0, as others have.
SPARSE = {
    **LATENT, "index_topk": WINDOW, "index_head_dim": 6, "index_n_heads": 12,
}  # fmt: skip
# All four kinds of layers, with rotary positions and without.
MISTRAL_LARGE4: dict[str, Any] = {
    **SHAPE, **SPARSE, "q_lora_rank": None, "num_key_value_heads": 4, "num_hidden_layers": 6, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "no_rope_layers": [1, 1, 0, 1, 0, 1],
    "kv_source_layers": [0, 0, 2, 0, 2, 5], "indexer_types": ["full", "shared", "full", "full", "shared", "full"],
    "final_logit_softcapping": 3.0, "rms_norm_eps": 1e-3,
}  # fmt: skip
SMALL_PIXTRAL: dict[str, Any] = {
    "model_type": "pixtral", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 3, "patch_size": 4, "initializer_range": 0.15, "hidden_act": "silu",
}  # fmt: skip
SMALL_LONGCAT: dict[str, Any] = {
    **LATENT, "vocab_size": VOCAB, "hidden_size": 32, "num_layers": 2, "num_attention_heads": 4, "ffn_hidden_size": 48,
    "expert_ffn_hidden_size": 16, "head_dim": 4, "initializer_range": 0.15,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}  # fmt: skip
COMPRESSED: dict[str, Any] = {  # of DeepSeek-V4
    "moe_intermediate_size": 16, "n_routed_experts": 4, "head_dim": 12, "partial_rotary_factor": 1 / 3,
    "q_lora_rank": 24, "o_groups": 2, "o_lora_rank": 10, "sliding_window": WINDOW, "index_topk": 2,
    "index_head_dim": 6, "index_n_heads": 12, "swiglu_limit": 0.1,
    "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 3},
}  # fmt: skip
V4_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
# Of GLM-5.3-Flash: pools of two tokens, of which three are seen beside the latest token.
KEY_POOLS: dict[str, Any] = {
    **SPARSE, "qk_rope_head_dim": 0, "index_topk": 6, "index_kpool": 2, "linear_head_dim": 6, "linear_num_heads": 4,
    "linear_conv_kernel_dim": 3, "hc_mult": 3, "hc_sinkhorn_iters": 4, "num_experts_per_tok": 2, "n_routed_experts": 8,
    "moe_intermediate_size": 16, "swiglu_limit": 0.5, "rms_norm_eps": 1e-3,
}  # fmt: skip
VARIANTS = {
    "llama": lambda: LlamaConfig(**SHAPE),
    "llama3": lambda: LlamaConfig(
        **SHAPE, rope_parameters=LLAMA3_ROPE, head_dim=16, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "llama-linear": lambda: LlamaConfig(
        **SHAPE, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    ),
    "llama-dynamic": lambda: LlamaConfig(
        **SHAPE,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        max_position_embeddings=8,  # documents are shorter and longer
    ),
    "llama-yarn": lambda: LlamaConfig(**SHAPE, head_dim=16, rope_parameters=YARN_ROPE),
    "mistral": lambda: MistralConfig(**SHAPE, sliding_window=WINDOW),
    "qwen2": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen2-window": lambda: Qwen2Config(
        **SHAPE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3": lambda: Qwen3Config(**SHAPE | {"num_key_value_heads": 4}, head_dim=16, tie_word_embeddings=True),
    "qwen3-biases": lambda: Qwen3Config(
        **SHAPE | {"num_key_value_heads": 1}, head_dim=8, attention_bias=True, rms_norm_eps=1e-3
    ),
    "gemma": lambda: GemmaConfig(**SHAPE, head_dim=16),
    "gemma2": lambda: Gemma2Config(**SHAPE, **CAPS, head_dim=8, sliding_window=WINDOW),
    "gemma3_text": lambda: Gemma3TextConfig(
        **SHAPE | {"num_hidden_layers": 3}, head_dim=8, sliding_window=WINDOW, sliding_window_pattern=3,
        query_pre_attn_scalar=16, rope_parameters=GEMMA3_ROPE,
    ),
    "gemma3n_text": lambda: Gemma3nTextConfig(
        **SHAPE | {"num_hidden_layers": 5, "vocab_size_per_layer_input": VOCAB - 8}, head_dim=8, sliding_window=WINDOW,
        rope_parameters=GEMMA3_ROPE | {"full_attention": {"rope_type": "default", "rope_theta": 1e6}},
        layer_types=["sliding_attention", "full_attention"] * 2 + ["sliding_attention"], num_kv_shared_layers=2,
        hidden_size_per_layer_input=6, altup_num_inputs=3, laurel_rank=5, rms_norm_eps=1e-3,
        activation_sparsity_pattern=[0.6, 0.0, 0.6, 0.0, 0.0], final_logit_softcapping=3.0,
    ),
    "gemma4_text": lambda: Gemma4TextConfig(
        **SHAPE | {"num_hidden_layers": 6}, **GEMMA4, num_kv_shared_layers=3, use_double_wide_mlp=True,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2, final_logit_softcapping=3.0,
        hidden_size_per_layer_input=6, vocab_size_per_layer_input=VOCAB,
    ),
    "gemma4_text-dense": lambda: Gemma4TextConfig(
        **SHAPE | {"num_hidden_layers": 3}, **GEMMA4, hidden_size_per_layer_input=0,
        attention_k_eq_v=True, num_global_key_value_heads=1, attention_bias=True,
    ),
    "gemma4_text-experts": lambda: Gemma4TextConfig(
        **SHAPE, **GEMMA4, layer_types=["sliding_attention", "full_attention"], enable_moe_block=True, num_experts=4,
        top_k_experts=2, moe_intermediate_size=16, hidden_size_per_layer_input=0,
    ),
    "phi3": lambda: Phi3Config(**SHAPE, sliding_window=WINDOW, partial_rotary_factor=0.5),
    "phi3-long": lambda: Phi3Config(
        **SHAPE, original_max_position_embeddings=8, max_position_embeddings=32,  # documents are shorter and longer
        rope_parameters=LONG_ROPE,
    ),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **SHAPE | {"num_hidden_layers": 3}, **EXPERTS, head_dim=8, moe_intermediate_size=16, num_experts=4,
        norm_topk_prob=True, mlp_only_layers=[1],
    ),
    "qwen3_moe-uniform": lambda: Qwen3MoeConfig(
        **SHAPE, **EXPERTS, head_dim=8, moe_intermediate_size=16, num_experts=4
    ),
    "mixtral": lambda: MixtralConfig(**SHAPE, **EXPERTS, num_local_experts=4, sliding_window=WINDOW),
    "smollm3": lambda: SmolLM3Config(
        **SHAPE, no_rope_layers=[1, 0], use_sliding_window=True, sliding_window=WINDOW
    ),
    "olmo2": lambda: Olmo2Config(**SHAPE),
    "olmo3": lambda: Olmo3Config(
        **SHAPE, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"],
        rope_parameters=OLMO3_ROPE,
    ),
    "granite": lambda: GraniteConfig(
        **SHAPE, embedding_multiplier=6.0, attention_multiplier=0.5, residual_multiplier=0.25, logits_scaling=3.0,
        attention_bias=True,
    ),
    "glm": lambda: GlmConfig(**SHAPE, head_dim=16),
    "glm4": lambda: Glm4Config(**SHAPE, head_dim=8, attention_bias=False),
    "olmoe": lambda: OlmoeConfig(**SHAPE, **EXPERTS, num_experts=4),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **SHAPE | {"num_hidden_layers": 3}, **EXPERTS, moe_intermediate_size=16, num_experts=4,
        shared_expert_intermediate_size=20, mlp_only_layers=[1], use_sliding_window=True, sliding_window=WINDOW,
    ),
    "gpt_oss": lambda: GptOssConfig(
        **SHAPE, **EXPERTS, head_dim=8, sliding_window=WINDOW, num_local_experts=4, swiglu_limit=0.5,
        rope_parameters=YARN_ROPE | {"truncate": False},
    ),
    "qwen3_next": lambda: Qwen3NextConfig(**DELTA_NETS, **SHARED_EXPERT),
    "qwen3_5_text": lambda: Qwen3_5TextConfig(**DELTA_NETS),
    "qwen3_5_moe_text": lambda: Qwen3_5MoeTextConfig(
        **{name: x for name, x in DELTA_NETS.items() if name != "intermediate_size"}, **SHARED_EXPERT
    ),
    "deepseek_v3": lambda: DeepseekV3Config(
        **SHAPE | {"num_hidden_layers": 3, "num_key_value_heads": 4}, **EXPERTS, moe_intermediate_size=16,
        n_routed_experts=8, n_group=4, topk_group=2, first_k_dense_replace=1, q_lora_rank=24, kv_lora_rank=16,
        qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6,
        rope_parameters=YARN_ROPE | {"mscale_all_dim": 1.0, "mscale": 1.0},
    ),
    "glm4_moe": lambda: Glm4MoeConfig(
        **SHAPE, **EXPERTS, head_dim=16, moe_intermediate_size=16, n_routed_experts=8, attention_bias=True,
        routed_scaling_factor=1.5,
    ),
    "glm4_moe-norms": lambda: Glm4MoeConfig(
        **SHAPE | {"num_hidden_layers": 4}, **EXPERTS, head_dim=8, moe_intermediate_size=16, n_routed_experts=8,
        n_group=2, topk_group=1, use_qk_norm=True, first_k_dense_replace=3, n_shared_experts=2, norm_topk_prob=False,
    ),
    "glm4_moe_lite": lambda: Glm4MoeLiteConfig(
        **SHAPE | {"num_hidden_layers": 3, "num_key_value_heads": 4}, **EXPERTS, moe_intermediate_size=16,
        n_routed_experts=8, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=12,
    ),
    "minimax_m2": lambda: MiniMaxM2Config(
        **SHAPE, **EXPERTS, head_dim=16, num_local_experts=4, rope_parameters=HALF_ROPE
    ),
    "ministral3": lambda: Ministral3Config(**SHAPE, head_dim=8, rope_parameters=GROWING_ROPE),
    "ministral3-window": lambda: Ministral3Config(**SHAPE, head_dim=16, sliding_window=WINDOW),
    "exaone4": lambda: Exaone4Config(**SHAPE, sliding_window=WINDOW, sliding_window_pattern=2),
    "exaone4-full": lambda: Exaone4Config(**SHAPE, sliding_window=None, layer_types=["full_attention"] * 2),
    "ernie4_5": lambda: Ernie4_5Config(**SHAPE, head_dim=16, use_bias=True),
    "seed_oss": lambda: SeedOssConfig(**SHAPE, head_dim=16, mlp_bias=True),
    "seed_oss-output": lambda: SeedOssConfig(**SHAPE, head_dim=8, attention_bias=False, attention_out_bias=True),
    "granitemoehybrid": lambda: GraniteMoeHybridConfig(
        **SHAPE | {"num_hidden_layers": 3}, **EXPERTS, **MAMBA, num_local_experts=4, shared_intermediate_size=20,
        layer_types=["linear_attention", "full_attention", "linear_attention"], embedding_multiplier=6.0,
        attention_multiplier=0.5, residual_multiplier=0.25, logits_scaling=3.0,
    ),
    "granitemoehybrid-dense": lambda: GraniteMoeHybridConfig(
        **SHAPE, **MAMBA | {"mamba_n_groups": 1, "mamba_conv_bias": False}, num_local_experts=0,
        shared_intermediate_size=40, layer_types=["linear_attention", "full_attention"], position_embedding_type="rope",
        attention_bias=True,
    ),
    "granitemoehybrid-attention": lambda: GraniteMoeHybridConfig(
        **SHAPE, num_local_experts=0, shared_intermediate_size=40, layer_types=["full_attention"] * 2,
        mamba_n_heads=4, position_embedding_type="rope",
    ),
    "lfm2": lambda: Lfm2Config(
        **SHAPE | {"num_hidden_layers": 4}, layer_types=["conv", "conv", "full_attention", "conv"],
        block_multiple_of=12, tie_word_embeddings=False,
    ),
    "lfm2-biases": lambda: Lfm2Config(
        **SHAPE, full_attn_idxs=[0], conv_bias=True, conv_L_cache=4, block_auto_adjust_ff_dim=False, norm_eps=1e-3
    ),
    "lfm2_moe": lambda: Lfm2MoeConfig(
        **SHAPE | {"num_hidden_layers": 4}, layer_types=["conv", "full_attention", "conv", "full_attention"],
        num_experts_per_tok=2, num_experts=4, moe_intermediate_size=16, num_dense_layers=1, routed_scaling_factor=1.5,
    ),
    "lfm2_moe-uncorrected": lambda: Lfm2MoeConfig(
        **SHAPE, layer_types=["full_attention", "conv"], num_experts_per_tok=2, num_experts=4, moe_intermediate_size=16,
        num_dense_layers=0, use_expert_bias=False, norm_topk_prob=False,
    ),
    "llama4_text": lambda: Llama4TextConfig(
        **SHAPE | {"num_hidden_layers": 4}, head_dim=8, intermediate_size_mlp=40, num_local_experts=4,
        router_aux_loss_coef=0.02, no_rope_layers=[1, 1, 0, 1], moe_layers=[1, 2], attention_chunk_size=WINDOW,
        floor_scale=3, attn_scale=0.8,
    ),
    "llama4_text-biases": lambda: Llama4TextConfig(
        **SHAPE | {"num_hidden_layers": 4}, **EXPERTS, head_dim=16, intermediate_size_mlp=40, num_local_experts=4,
        interleave_moe_layer_step=2, attention_bias=True, use_qk_norm=False, attn_temperature_tuning=False,
        rope_parameters=LLAMA3_ROPE,
    ),
    "nemotron_h": lambda: NemotronHConfig(
        **NEMOTRON_H, layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"],
        moe_latent_size=12, routed_scaling_factor=1.5, n_group=2, topk_group=1, use_bias=True,
    ),
    "nemotron_h-dense": lambda: NemotronHConfig(
        **NEMOTRON_H, layers_block_type=["mlp", "linear_attention", "linear_attention", "full_attention"],
        mlp_bias=True, use_conv_bias=False,
    ),
    "afmoe": lambda: AfmoeConfig(
        **SHAPE | {"num_hidden_layers": 4}, head_dim=16, num_experts_per_tok=2, num_experts=4, moe_intermediate_size=16,
        num_shared_experts=2, route_scale=1.5, sliding_window=WINDOW, global_attn_every_n_layers=2, mup_enabled=True,
    ),
    "kimi_linear": lambda: KimiLinearConfig(
        **SHAPE | {"num_hidden_layers": 3, "num_key_value_heads": 4}, linear_head_dim=6, linear_num_heads=4,
        linear_conv_kernel_dim=3, layer_types=["linear_attention", "full_attention", "linear_attention"],
        kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6, num_experts=4, num_experts_per_token=2,
        moe_intermediate_size=16, rms_norm_eps=1e-3,
    ),
    "olmo_hybrid": lambda: OlmoHybridConfig(
        **{name: x for name, x in DELTA_NETS.items() if name != "head_dim"} | OLMO_NETS,
        rope_parameters={"rope_type": "default", "rope_theta": None},
    ),
    "olmo_hybrid-rotary": lambda: OlmoHybridConfig(
        **SHAPE | OLMO_NETS, layer_types=["full_attention", "linear_attention"], linear_allow_neg_eigval=False,
        rms_norm_eps=1e-3,
    ),
    "falcon_h1": lambda: FalconH1Config(
        **SHAPE, **MAMBA, mamba_d_ssm=40, key_multiplier=0.7, attention_in_multiplier=1.5,
        attention_out_multiplier=0.8, ssm_in_multiplier=1.2, ssm_out_multiplier=0.6, lm_head_multiplier=0.3,
        embedding_multiplier=3.0, mlp_multipliers=[0.9, 1.1], ssm_multipliers=[0.5, 1.5, 0.7, 1.3, 0.8],
    ),
    "falcon_h1-norm": lambda: FalconH1Config(
        **SHAPE, **MAMBA, mamba_d_ssm=None, mamba_rms_norm=True, mamba_norm_before_gate=False,
        mamba_conv_bias=False, attention_bias=True, mlp_bias=True,
    ),
    "bamba": lambda: BambaConfig(**SHAPE, **MAMBA, attn_layer_indices=[1]),
    "bamba-biases": lambda: BambaConfig(
        **SHAPE, **MAMBA | {"mamba_n_groups": 1}, mamba_conv_bias=False, mamba_proj_bias=True,
        attention_bias=True, mlp_bias=True, attn_layer_indices=[0], tie_word_embeddings=True, rms_norm_eps=1e-3,
        rope_parameters=HALF_ROPE | {"partial_rotary_factor": 1.0},
    ),
    "dots1": lambda: Dots1Config(
        **SHAPE | {"num_hidden_layers": 3}, head_dim=8, num_experts_per_tok=2, n_routed_experts=8, n_shared_experts=2,
        n_group=2, topk_group=1, moe_intermediate_size=16, first_k_dense_replace=1, norm_topk_prob=True,
        routed_scaling_factor=1.5, sliding_window=WINDOW, max_window_layers=2,
    ),
    "hunyuan_v1_dense": lambda: HunYuanDenseV1Config(**SHAPE, head_dim=16, tie_word_embeddings=True),
    "hunyuan_v1_dense-alpha": lambda: HunYuanDenseV1Config(
        **SHAPE, head_dim=16, attention_bias=True,
        rope_parameters={"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 10000.0},
    ),
    "hunyuan_v1_moe": lambda: HunYuanMoEV1Config(**SHAPE, head_dim=16, num_experts=4, moe_topk=2),
    "apertus": lambda: ApertusConfig(**SHAPE, rope_parameters=LLAMA3_ROPE),
    "apertus-biases": lambda: ApertusConfig(**SHAPE, attention_bias=True, rms_norm_eps=1e-3),
    "ernie4_5_moe": lambda: Ernie4_5_MoeConfig(
        **SHAPE | {"num_hidden_layers": 3}, moe_k=2, moe_num_experts=4, moe_intermediate_size=16,
        router_aux_loss_coef=0.02, tie_word_embeddings=False,
    ),
    "ernie4_5_moe-unshared": lambda: Ernie4_5_MoeConfig(
        **SHAPE | {"num_hidden_layers": 4}, moe_k=2, moe_num_experts=4, moe_intermediate_size=16,
        moe_num_shared_experts=0, moe_layer_start_index=1, moe_layer_interval=2,
    ),
    "granitemoe": lambda: GraniteMoeConfig(
        **SHAPE, **EXPERTS, num_local_experts=4, embedding_multiplier=6.0, attention_multiplier=0.5,
        residual_multiplier=0.25, logits_scaling=3.0, attention_bias=True,
    ),
    "arcee": lambda: ArceeConfig(**SHAPE, rope_parameters=YARN_ROPE, mlp_bias=True),
    "cohere2": lambda: Cohere2Config(
        **SHAPE, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"], logit_scale=0.3,
        attention_bias=True,
    ),
    "gpt2": lambda: GPT2Config(**SMALL_GPT),
    "gpt2-untied": lambda: GPT2Config(
        **SMALL_GPT, n_inner=48, activation_function="relu", scale_attn_weights=False, tie_word_embeddings=False
    ),
    "gptj": lambda: GPTJConfig(**SMALL_GPT, rotary_dim=6),
    "gpt_neo": lambda: GPTNeoConfig(**SMALL_NEO),
    "gpt_neo-global": lambda: GPTNeoConfig(
        **SMALL_NEO | {"attention_types": [[["global"], 2]]}, intermediate_size=48, tie_word_embeddings=False
    ),
    "gpt_bigcode": lambda: GPTBigCodeConfig(**SMALL_GPT),
    "gpt_bigcode-heads": lambda: GPTBigCodeConfig(
        **SMALL_GPT, multi_query=False, n_inner=48, activation_function="gelu", tie_word_embeddings=False
    ),
    "bloom": lambda: BloomConfig(**SMALL_BLOOM),
    "bloom-six-heads": lambda: BloomConfig(
        **SMALL_BLOOM | {"hidden_size": 24, "n_head": 6}, layer_norm_epsilon=1e-3, tie_word_embeddings=False
    ),
    "mpt": lambda: MptConfig(**SMALL_MPT),
    "mpt-clipped": lambda: MptConfig(
        **SMALL_MPT | {"d_model": 24, "n_heads": 3}, attn_config={"clip_qkv": 0.5, "softmax_scale": 0.3},
        tie_word_embeddings=False,
    ),
    "gpt_neox": lambda: GPTNeoXConfig(**ALONE),
    "gpt_neox-sequential": lambda: GPTNeoXConfig(
        **ALONE, use_parallel_residual=False, hidden_act="gelu_new", rotary_pct=1.0, attention_bias=False
    ),
    "opt": lambda: OPTConfig(**SMALL_OPT),
    "opt-narrow": lambda: OPTConfig(**SMALL_OPT, word_embed_proj_dim=24, do_layer_norm_before=False),
    "opt-plain": lambda: OPTConfig(
        **SMALL_OPT, enable_bias=False, layer_norm_elementwise_affine=False, activation_function="gelu"
    ),
    "phi": lambda: PhiConfig(**SHAPE),
    "phi-norms": lambda: PhiConfig(**SHAPE, qk_layernorm=True, rope_parameters=HALF_ROPE),
    "stablelm": lambda: StableLmConfig(**SHAPE, use_qkv_bias=True),
    "stablelm-parallel": lambda: StableLmConfig(**SHAPE, use_parallel_residual=True),
    "starcoder2": lambda: Starcoder2Config(**SHAPE, sliding_window=WINDOW),
    "starcoder2-plain": lambda: Starcoder2Config(**SHAPE, use_bias=False, tie_word_embeddings=False),
    "cohere": lambda: CohereConfig(**SHAPE, logit_scale=0.3, use_qk_norm=True),
    "cohere-biases": lambda: CohereConfig(**SHAPE, attention_bias=True),
    "olmo": lambda: OlmoConfig(**SHAPE, clip_qkv=0.5),
    "exaone": lambda: ExaoneConfig(**SHAPE, rope_parameters=LLAMA3_ROPE),
    "falcon": lambda: FalconConfig(**FALCON),
    "falcon-grouped": lambda: FalconConfig(**FALCON, new_decoder_architecture=True, num_kv_heads=2, bias=True),
    "falcon-one-norm": lambda: FalconConfig(
        **FALCON, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1, tie_word_embeddings=False
    ),
    "falcon-sequential": lambda: FalconConfig(**FALCON, multi_query=False, parallel_attn=False),
    "nemotron": lambda: NemotronConfig(**SHAPE, attention_bias=True),
    "jais2": lambda: Jais2Config(**SHAPE),
    "cwm": lambda: CwmConfig(**SHAPE | {"bos_token_id": 0}, head_dim=8, sliding_window=WINDOW),
    "ministral": lambda: MinistralConfig(
        **SHAPE, head_dim=8, sliding_window=WINDOW, layer_types=["full_attention", "sliding_attention"]
    ),
    "flex_olmo": lambda: FlexOlmoConfig(**SHAPE, **EXPERTS, num_experts=4),
    "granitemoeshared": lambda: GraniteMoeSharedConfig(
        **SHAPE, **EXPERTS, num_local_experts=4, shared_intermediate_size=20, embedding_multiplier=6.0,
        attention_multiplier=0.5, residual_multiplier=0.25, logits_scaling=3.0,
    ),
    "solar_open": lambda: SolarOpenConfig(
        **{name: x for name, x in SHAPE.items() if name != "intermediate_size"}, head_dim=8, num_experts_per_tok=2,
        n_routed_experts=8, moe_intermediate_size=16, n_group=2, topk_group=1, routed_scaling_factor=1.5,
    ),
    "deepseek_v2": lambda: DeepseekV2Config(
        **SHAPE | {"num_hidden_layers": 3, "num_key_value_heads": 4}, num_experts_per_tok=2, moe_intermediate_size=16,
        n_routed_experts=8, n_group=4, topk_group=2, topk_method="group_limited_greedy", first_k_dense_replace=1,
        q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6,
        routed_scaling_factor=1.5, rope_parameters=YARN_ROPE | {"mscale_all_dim": 0.7, "mscale": 0.7},
    ),
    "lfm3": lambda: Lfm3Config(
        **SHAPE | {"num_hidden_layers": 5}, head_dim=8, sliding_window=WINDOW, conv_L_cache=4, tie_word_embeddings=False
    ),
    "lfm3-plain": lambda: Lfm3Config(
        **SHAPE, head_dim=16, sliding_window=WINDOW, layer_types=["sliding_attention", "conv"], conv_bias=True,
        use_sandwich_norm=False, use_attention_gate=False,
    ),
    "nanochat": lambda: NanoChatConfig(**SHAPE, final_logit_softcapping=3.0),
    "nanochat-dynamic": lambda: NanoChatConfig(
        **SHAPE, attention_bias=True, final_logit_softcapping=None, max_position_embeddings=8,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    ),
    "vaultgemma": lambda: VaultGemmaConfig(**SHAPE, **CAPS, head_dim=8, sliding_window=WINDOW),
    "gemma4_unified_text": lambda: Gemma4UnifiedTextConfig(
        **SHAPE | {"num_hidden_layers": 3}, **GEMMA4, attention_k_eq_v=True, num_global_key_value_heads=1,
        layer_types=["sliding_attention", "full_attention", "full_attention"], final_logit_softcapping=3.0,
    ),
    "exaone_moe": lambda: ExaoneMoeConfig(
        **SHAPE | {"num_hidden_layers": 3}, head_dim=16, sliding_window=WINDOW, sliding_window_pattern=2,
        num_experts_per_tok=2, num_experts=8, n_group=2, topk_group=1, moe_intermediate_size=16, num_shared_experts=2,
    ),
    "granite_swa": lambda: GraniteSWAConfig(
        **SHAPE | {"num_hidden_layers": 3}, sliding_window=WINDOW, layer_rope_theta=[0, 10_000.0, 10_000.0],
        embedding_multiplier=6.0, attention_multiplier=0.5, residual_multiplier=0.25, logits_scaling=3.0,
        attention_bias=True, tie_word_embeddings=False,
    ),
    "granite_swa-bases": lambda: GraniteSWAConfig(
        **SHAPE, head_dim=16, sliding_window=WINDOW, layer_rope_theta=[500_000.0, 100.0], mlp_bias=True,
        rope_parameters=YARN_ROPE,
    ),
    "granitemoe_swa": lambda: GraniteMoeSWAConfig(
        **SHAPE, **EXPERTS, num_local_experts=4, shared_intermediate_size=20, sliding_window=WINDOW,
        layer_rope_theta=[0, 10_000.0], embedding_multiplier=6.0, attention_multiplier=0.5, residual_multiplier=0.25,
        logits_scaling=3.0,
    ),
    "youtu": lambda: YoutuConfig(
        **SHAPE | {"num_key_value_heads": 4}, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4,
        v_head_dim=6,
    ),
    "internlm3": lambda: InternLM3Config(**SHAPE, head_dim=8, attention_bias=True, mlp_bias=True),
    "hyperclovax": lambda: HyperCLOVAXConfig(
        **SHAPE, embedding_multiplier=6.0, attention_multiplier=0.5, residual_multiplier=0.25, logits_scaling=0.3,
        attention_bias=True,
    ),
    "hyperclovax-plain": lambda: HyperCLOVAXConfig(**SHAPE, head_dim=16, use_post_norm=False, mlp_bias=True),
    "iquestcoder": lambda: IQuestCoderConfig(**SHAPE, head_dim=16),
    "sarvam_moe": lambda: SarvamMoEConfig(
        **SHAPE | {"num_hidden_layers": 3}, head_dim=16, num_experts_per_tok=2, n_routed_experts=8,
        moe_intermediate_size=16, attention_bias=True,
    ),
    "sarvam_mla": lambda: SarvamMLAConfig(
        **SHAPE | {"num_hidden_layers": 3, "num_key_value_heads": 4}, num_experts_per_tok=2, moe_intermediate_size=16,
        n_routed_experts=8, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6,
        rope_parameters=YARN_ROPE | {"mscale_all_dim": 1.0, "mscale": 1.0},
    ),
    "deepseek_v32": lambda: DeepseekV32Config(
        **SHAPE | {"num_hidden_layers": 3, "num_key_value_heads": 4}, **EXPERTS, moe_intermediate_size=16,
        n_routed_experts=8, n_group=4, topk_group=2, first_k_dense_replace=1, **SPARSE,
        rope_parameters=YARN_ROPE | {"mscale_all_dim": 1.0, "mscale": 1.0},
    ),
    "glm_moe_dsa": lambda: GlmMoeDsaConfig(
        **SHAPE | {"num_hidden_layers": 3, "num_key_value_heads": 4}, **EXPERTS, moe_intermediate_size=16,
        n_routed_experts=8, first_k_dense_replace=1, **SPARSE,
    ),
    "mistral4": lambda: Mistral4Config(
        **SHAPE | {"num_hidden_layers": 3, "num_key_value_heads": 4}, **LATENT, num_experts_per_tok=2,
        moe_intermediate_size=16, n_routed_experts=8, n_group=4, topk_group=2, first_k_dense_replace=1,
        routed_scaling_factor=1.5, rope_parameters=dict(GROWING_ROPE),  # to which it adds an entry
    ),
    "mistral4-plain": lambda: Mistral4Config(
        **SHAPE | {"num_key_value_heads": 4}, **LATENT | {"q_lora_rank": None}, num_experts_per_tok=2,
        moe_intermediate_size=16, n_routed_experts=4, norm_topk_prob=False, attention_bias=True, rope_interleave=False,
        rope_parameters=YARN_ROPE | {"llama_4_scaling_beta": 0.0},
    ),
    "mistral_large4-text": lambda: MistralLarge4Config(
        text_config=MISTRAL_LARGE4, vision_config=SMALL_PIXTRAL, image_token_index=90
    ),
    "mistral_large4-plain": lambda: MistralLarge4Config(
        text_config=MISTRAL_LARGE4 | {
            "num_hidden_layers": 2, "attention_bias": True, "no_rope_layers": [1, 1], "kv_source_layers": None,
            "indexer_types": None, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5, "n_shared_experts": 2,
            "rope_parameters": YARN_ROPE | {"mscale_all_dim": 1.0, "mscale": 1.0}, "mlp_layer_types": ["sparse"] * 2,
        },
        vision_config=SMALL_PIXTRAL, image_token_index=90, multimodal_projector_bias=True,
    ),
    "step3p5": lambda: Step3p7TextConfig(
        **SHAPE | {"num_hidden_layers": 4, "pad_token_id": 1}, head_dim=8, num_experts_per_tok=2, n_routed_experts=4,
        moe_intermediate_size=16, share_expert_dim=20, sliding_window=WINDOW, num_sliding_attention_heads=8,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"], swiglu_limits=[None, None, 0.3, 0.5],
        swiglu_limits_shared=[0.3, None, 0.4, None], moe_router_scaling_factor=1.5,
        rope_parameters={
            "full_attention": YARN_ROPE | {"partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    ),
    "step3p5-full": lambda: Step3p7TextConfig(
        **SHAPE | {"pad_token_id": 1}, head_dim=16, num_experts_per_tok=2, n_routed_experts=4, moe_intermediate_size=16,
        share_expert_dim=20, attention_bias=True, mlp_bias=True, query_pre_attn_scalar=7,
        mlp_layer_types=["sparse", "dense"], sliding_window=WINDOW,
    ),
    "longcat_flash": lambda: LongcatFlashConfig(
        **SMALL_LONGCAT, n_routed_experts=6, zero_expert_num=3, moe_topk=3,
        rope_parameters=YARN_ROPE | {"mscale_all_dim": 1.0},
    ),
    "longcat_flash-plain": lambda: LongcatFlashConfig(
        **SMALL_LONGCAT, n_routed_experts=4, zero_expert_num=0, moe_topk=2, attention_bias=True,
        routed_scaling_factor=1.5,
    ),
    "hy_v3": lambda: HYV3Config(
        **SHAPE | {"num_hidden_layers": 3}, head_dim=16, num_experts_per_tok=2, num_experts=4, moe_intermediate_size=16,
        num_shared_experts=2, attention_bias=True,
    ),
    "mellum": lambda: MellumConfig(
        **SHAPE | {"num_hidden_layers": 3}, **EXPERTS, head_dim=8, num_experts=4, moe_intermediate_size=16,
        sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        mlp_layer_types=["sparse", "dense", "sparse"], rope_parameters=OLMO3_ROPE,
    ),
    "cohere2_moe": lambda: Cohere2MoeConfig(
        **SHAPE | {"num_hidden_layers": 3}, head_dim=16, num_experts_per_tok=2, num_experts=4, num_shared_experts=2,
        sliding_window=WINDOW, layer_types=["full_attention", "sliding_attention", "full_attention"],
        mlp_layer_types=["dense", "sparse", "sparse"], prefix_dense_intermediate_size=40, logit_scale=0.3,
    ),
    "cohere2_moe-sigmoid": lambda: Cohere2MoeConfig(
        **SHAPE | {"num_hidden_layers": 4}, head_dim=8, num_experts_per_tok=2, num_experts=4, sliding_window=WINDOW,
        first_k_dense_replace=2, prefix_dense_sliding_window_pattern=2, sliding_window_pattern=2, rms_norm_eps=1e-3,
        expert_selection_fn="sigmoid", attention_bias=True, tie_word_embeddings=False, logit_scale=0.3,
    ),
    "phimoe": lambda: PhimoeConfig(
        **SHAPE, **EXPERTS, num_local_experts=4, router_jitter_noise=0.3, attention_bias=True, lm_head_bias=True
    ),
    "phimoe-long": lambda: PhimoeConfig(
        **SHAPE, num_experts_per_tok=2, num_local_experts=4, sliding_window=WINDOW, max_position_embeddings=256,
        router_jitter_noise=0.3, rope_parameters={
            "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.3, 1.7], "short_mscale": 1.3,
            "long_factor": [1.0, 2.5, 6.0, 9.0], "long_mscale": 1.3, "original_max_position_embeddings": 64,
        },
    ),
    "mimo_v2_flash": lambda: MiMoV2FlashConfig(
        **SHAPE | {"num_hidden_layers": 4, "num_key_value_heads": 1}, head_dim=16, v_head_dim=12, num_experts_per_tok=2,
        n_routed_experts=8, n_group=2, topk_group=1, moe_intermediate_size=16, sliding_window=WINDOW,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        rope_parameters={"full_attention": HALF_ROPE | {"rope_theta": 1000.0}, "sliding_attention": HALF_ROPE},
    ),
    "mimo_v2_flash-full": lambda: MiMoV2FlashConfig(
        **SHAPE, head_dim=12, num_experts_per_tok=2, n_routed_experts=4, moe_intermediate_size=16, v_head_dim=20,
        layer_types=["full_attention"] * 2, attention_bias=True, attention_value_scale=None, norm_topk_prob=False,
    ),
    "laguna": lambda: LagunaConfig(
        **SHAPE | {"num_hidden_layers": 4}, **EXPERTS, head_dim=8, num_experts=4, moe_intermediate_size=16,
        shared_expert_intermediate_size=20, moe_routed_scaling_factor=1.5, moe_router_logit_softcapping=0.5,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        num_attention_heads_per_layer=[4, 8, 8, 4], sliding_window=WINDOW,
    ),
    "laguna-elements": lambda: LagunaConfig(
        **SHAPE, **EXPERTS, head_dim=16, num_experts=4, moe_intermediate_size=16, gating="per-element",
        attention_bias=True, rope_parameters=OLMO3_ROPE,
    ),
    "minicpm3": lambda: MiniCPM3Config(
        **SHAPE | {"num_key_value_heads": 4}, **LATENT | {"v_head_dim": None}, scale_depth=0.9, scale_emb=3,
        dim_model_base=20, tie_word_embeddings=False, rope_parameters=MINICPM3_ROPE,
    ),
    "glm_moe_dsa-shared": lambda: GlmMoeDsaConfig(
        **SHAPE | {"num_hidden_layers": 6, "num_key_value_heads": 4}, **EXPERTS, moe_intermediate_size=16,
        n_routed_experts=8, first_k_dense_replace=2, **SPARSE, index_topk_pattern="FSFSSF",
    ),
    "hy_v4": lambda: HYV4Config(
        **SHAPE | {"num_hidden_layers": 4, "num_key_value_heads": 4}, **SPARSE, num_experts_per_tok=2,
        moe_intermediate_size=16, n_routed_experts=4, indexer_types=["full", "shared", "full", "shared"],
        mlp_layer_types=["dense", "sparse", "sparse", "dense"], hc_mult=3, hc_magnitude=1.5, swiglu_limit=0.2,
        rope_parameters=YARN_ROPE | {"mscale_all_dim": 1.0, "mscale": 1.0},
    ),
    "hy_v4-biases": lambda: HYV4Config(
        **SHAPE | {"num_key_value_heads": 4}, **LATENT, index_head_dim=4, index_n_heads=3, num_experts_per_tok=2,
        moe_intermediate_size=16, n_routed_experts=8, n_shared_experts=2, n_group=4, topk_group=2, norm_topk_prob=False,
        attention_bias=True, hc_mult=2, rms_norm_eps=1e-3, tie_word_embeddings=True,
    ),
    "apertus1p5_text": lambda: Apertus1p5TextConfig(
        **SHAPE | {"vocab_size": 120}, output_vocab_size=VOCAB, tie_word_embeddings=False
    ),
    "apertus1p5_text-tied": lambda: Apertus1p5TextConfig(**SHAPE, tie_word_embeddings=True),
    "bailing_hybrid": lambda: BailingHybridConfig(
        **SHAPE | {"num_hidden_layers": 4, "num_key_value_heads": 4}, **LATENT | {"q_lora_rank": None}, head_dim=6,
        num_experts_per_tok=2, num_experts=8, n_group=4, topk_group=2, moe_intermediate_size=16, layer_group_size=3,
        first_k_dense_replace=1, short_conv_kernel_size=3, rms_norm_eps=1e-3, num_nextn_predict_layers=0,
    ),
    "bailing_hybrid-plain": lambda: BailingHybridConfig(
        **SHAPE | {"num_hidden_layers": 3, "num_key_value_heads": 4}, **LATENT, head_dim=8, num_experts_per_tok=2,
        num_experts=4, n_group=1, topk_group=1, moe_intermediate_size=16, kda_safe_gate=False, attention_bias=True,
        layer_types=["full_attention", "linear_attention", "full_attention"], norm_topk_prob=False,
        num_nextn_predict_layers=0,
    ),
    "kolibri1": lambda: Kolibri1Config(
        **SHAPE | {"num_hidden_layers": 4}, head_dim=8, num_experts_per_tok=2, num_experts=4, moe_intermediate_size=16,
        shared_expert_intermediate_size=20, sliding_window=WINDOW, norm_topk_prob=True,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    ),
    "kolibri1-full": lambda: Kolibri1Config(
        **SHAPE, head_dim=16, num_experts_per_tok=2, num_experts=4, moe_intermediate_size=16, sliding_window=WINDOW,
        shared_expert_intermediate_size=16, layer_types=["full_attention"] * 2,
    ),
    "minimax_m3_vl_text": lambda: MiniMaxM3VLTextConfig(
        **SHAPE | {"num_hidden_layers": 4, "intermediate_size": 16}, **EXPERTS, head_dim=16, num_local_experts=4,
        dense_intermediate_size=40, shared_intermediate_size=20, rope_parameters=HALF_ROPE, swiglu_limit=0.05,
        layer_types=["full_attention", "minimax_m3_sparse", "minimax_m3_sparse", "full_attention"],
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"], index_n_heads=2, index_head_dim=10,
        index_block_size=2, index_topk_blocks=3,
    ),
    "qwen4_exp_text": lambda: Qwen4ExpTextConfig(
        **POOLED | {"eos_token_id": [30, 2]}, **SHARED_EXPERT, ple_layer_ids=[1, 4], ple_embed_dim=24,
        ple_conv_kernel_size=3, heads_per_ngram=2, ngram_vocab_size_base=50, make_ngram_vocab_size_divisible_by=8,
        split_ngram_parts=3, output_gate_type="sigmoid", rope_parameters=HALF_ROPE,
    ),
    "qwen4_exp_text-plain": lambda: Qwen4ExpTextConfig(
        **POOLED | {"num_hidden_layers": 2, "layer_types": None}, **SHARED_EXPERT, full_attention_interval=2,
    ),
    "mamba": lambda: MambaConfig(**SMALL_MAMBA),
    "mamba-biases": lambda: MambaConfig(
        **SMALL_MAMBA, use_bias=True, use_conv_bias=False, time_step_rank=5, intermediate_size=24,
        tie_word_embeddings=False,
    ),
    "falcon_mamba": lambda: FalconMambaConfig(
        **SMALL_MAMBA, tie_word_embeddings=False, expand=16, intermediate_size=48, mixer_rms_eps=1e-3
    ),
    "mamba2": lambda: Mamba2Config(**SMALL_MAMBA, num_heads=8, head_dim=8, n_groups=2),
    "mamba2-biases": lambda: Mamba2Config(
        **SMALL_MAMBA, num_heads=4, head_dim=8, n_groups=1, expand=1, use_bias=True, use_conv_bias=False,
        tie_word_embeddings=True,
    ),
    "dbrx": lambda: DbrxConfig(
        **SMALL_DBRX, attn_config={"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 10000.0},
        ffn_config={"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "moe_loss_weight": 0.02},
    ),
    "dbrx-plain": lambda: DbrxConfig(
        **SMALL_DBRX, attn_config={"kv_n_heads": 4, "clip_qkv": 8, "rope_theta": 20000.0},
        ffn_config={"ffn_hidden_size": 24, "moe_num_experts": 3, "moe_normalize_expert_weights": None},
        rope_parameters={"rope_type": "default", "rope_theta": 20000.0},
    ),
    "jamba": lambda: JambaConfig(
        **SHAPE | {"num_hidden_layers": 4}, **EXPERTS, num_experts=4, attn_layer_period=4, attn_layer_offset=2,
        mamba_d_state=5, mamba_d_conv=3,
    ),
    "jamba-dense": lambda: JambaConfig(
        **SHAPE, num_experts=1, attn_layer_period=3, attn_layer_offset=1, mamba_d_state=5, mamba_d_conv=3,
        mamba_expand=1, mamba_dt_rank=3, mamba_proj_bias=True, mamba_conv_bias=False, tie_word_embeddings=True,
    ),
    # Entries of 2 and 3 tokens, and at most 2 chosen of 6, of a document's 12.
    "deepseek_v4": lambda: DeepseekV4Config(
        **SHAPE | {"num_hidden_layers": 4, "num_key_value_heads": 1}, **EXPERTS, **COMPRESSED,
        layer_types=["heavily_compressed_attention", "sliding_attention", "compressed_sparse_attention",
                     "compressed_sparse_attention"],
        mlp_layer_types=["hash_moe", "moe", "hash_moe", "moe"], rope_parameters=V4_ROPE,
    ),
    "deepseek_v4-sigmoid": lambda: DeepseekV4Config(
        **SHAPE | {"num_key_value_heads": 1}, **EXPERTS,
        **COMPRESSED | {"index_topk": 64, "o_groups": 1, "swiglu_limit": 10.0},
        scoring_func="sigmoid", layer_types=["compressed_sparse_attention", "heavily_compressed_attention"],
        mlp_layer_types=["moe", "moe"], hc_mult=2, hc_sinkhorn_iters=3,
    ),
    "glm5_next_text": lambda: Glm5NextTextConfig(
        **SHAPE | {"num_hidden_layers": 5, "num_key_value_heads": 4}, **KEY_POOLS,
        layer_types=["linear_attention", "full_attention", "indexed_attention", "linear_attention", "full_attention"],
        indexer_types=["full", "full", "shared", "full", "full"], mlp_layer_types=["dense", "dense", *["sparse"] * 3],
    ),
    "glm5_next_text-plain": lambda: Glm5NextTextConfig(
        **SHAPE | {"num_hidden_layers": 4, "num_key_value_heads": 4}, **KEY_POOLS | {"index_kpool": 3, "hc_mult": 2},
        linear_lower_bound=None, attention_bias=True, norm_topk_prob=False, tie_word_embeddings=True, n_group=2,
    ),
    "deepseek_v2-greedy": lambda: DeepseekV2Config(
        **SHAPE | {"num_key_value_heads": 4}, num_experts_per_tok=2, moe_intermediate_size=16, n_routed_experts=8,
        q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6,
    ),
}  # fmt: skip
# Buffers of routers and layers, which no gradient trains.
UNTRAINED = (
    "moe.router_bias", "e_score_correction_bias", "expert_bias", "layer_scalar", "act_fn.beta", "act_fn.eps",
    "std_bias", "std_scale", "_min", "_max", "indexer.wq_b.weight", "indexer.wk.weight", "indexer.k_norm.weight",
    "indexer.k_norm.bias", "indexer.weights_proj.weight", "indexer.q_input_norm.weight", "indexer.q_input_norm.bias",
    "indexer.ssmax_scaling.s", "indexer.ssmax_scaling.b", "indexer.softmax_scaling.scale",
    "indexer.softmax_scaling.bias", "indexer.index_qk_proj.weight", "indexer.q_layernorm.weight",
    "indexer.k_layernorm.weight", *(f"indexer.compressor.{x}" for x in ("wkv.weight", "wgate.weight", "ape")),
    "indexer.compressor.norm.weight", "tid2eid", "ffn.gate.bias",
    "indexer.index_kpool_compress_gate", *(f"indexer.{x}.weight" for x in ("q_proj", "k_proj", "q_norm", "k_norm")),
    "indexer.index_kpool_compress_ape",
)  # fmt: skip
SHAKEN = (
    "bias", "sinks", "scale", "base", "router.gate.weight", "alpha_p", "alpha_n", "rotary_emb.alpha",
    "ple.conv1d.weight", "kpool_compress_ape", "kpool_compress_gate",
)  # fmt: skip
NO_CLASSIFIER = (  # of which transformers has none
    "granite", "olmoe", "gemma3n_text", "gemma4_text", "qwen3_5_moe_text", "llama4_text", "glm4_moe", "glm4_moe_lite",
    "minimax_m2", "ernie4_5", "lfm2", "lfm2_moe", "lfm3", "granitemoehybrid", "nemotron_h", "afmoe", "kimi_linear",
    "olmo_hybrid", "dots1", "falcon_h1", "cohere2", "apertus", "ernie4_5_moe", "granitemoe", "cohere",
    "exaone", "jais2", "cwm", "flex_olmo", "granitemoeshared", "solar_open", "nanochat", "vaultgemma",
    "gemma4_unified_text", "exaone_moe", "granite_swa", "granitemoe_swa", "youtu", "internlm3", "hyperclovax",
    "iquestcoder", "sarvam_moe", "sarvam_mla", "deepseek_v32", "glm_moe_dsa", "hy_v3", "mellum", "cohere2_moe",
    "mimo_v2_flash", "laguna", "apertus1p5_text", "bailing_hybrid", "kolibri1",
    "minimax_m3_vl_text", "mistral_large4", "longcat_flash", "step3p5", "bamba", "mamba", "falcon_mamba", "mamba2",
    "dbrx", "qwen4_exp_text", "deepseek_v4", "glm5_next_text", "hy_v4",
)  # fmt: skip
# Families whose nets another describes too.
ALIKE = {
    "glm4_moe_lite": "deepseek_v3", "cwm": "smollm3", "ministral": "smollm3", "gemma4_unified_text": "gemma4_text",
    "internlm3": "llama", "iquestcoder": "llama", "sarvam_mla": "deepseek_v3", "sarvam_moe": "glm4_moe",
    "hyperclovax": "granite", "hy_v3": "dots1", "apertus1p5_text": "apertus",
}  # fmt: skip
FAMILIES = [name for name in VARIANTS if "-" not in name and name != "llama3"]


def make_oracle(variant: str, seed: int = 0):
    """A random transformers model in which biases and norms are random too, so that none can be left out unnoticed."""
    torch.manual_seed(seed)
    oracle = AutoModelForCausalLM.from_config(VARIANTS[variant](), attn_implementation="eager").eval()
    oracle.generation_config.eos_token_id = None  # texts go on behind the token at which n-grams end
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if any(word in name for word in ("norm", "ln_")) or name.endswith(SHAKEN):
                parameter.add_(torch.randn_like(parameter) * 0.3)
        for name, buffer in oracle.named_buffers():
            if name.endswith("tid2eid"):
                buffer.copy_(torch.randint(oracle.config.n_routed_experts, buffer.shape))
            elif name.endswith(UNTRAINED):
                buffer.add_(torch.randn_like(buffer) * 0.1)
    return oracle


def oracle_logits(oracle, tokens, **arguments):
    """The oracle's logits of tokens, the same bits for the same weights.

    Those of a file that is mapped into memory lie where they lie in it, and kernels add up in another order there.
    """
    for parameter in oracle.parameters():
        parameter.data = parameter.data.clone()
    with torch.no_grad():
        return oracle(torch.tensor(np.asarray(tokens)), **arguments).logits.numpy()


def counts_padding(oracle) -> bool:
    """True of models for which padding on the left counts in transformers: as places that scale queries, as tokens of
    blocks, or as those that a convolution sees by their bias."""
    names = ("attn_temperature_tuning", "index_block_size", "compress_rates", "conv_bias", "use_bias")
    return any(getattr(oracle.config, name, False) for name in (*names, "mamba_proj_bias"))


def oracle_greedy(oracle, tokens, segments, steps: int):
    """The tokens the oracle continues left-padded prompts with."""
    if counts_padding(oracle) and len(tokens) > 1:
        rows = [(row[mask > 0][None], mask[mask > 0][None]) for row, mask in zip(tokens, segments, strict=True)]
        return np.concatenate([oracle_greedy(oracle, *row, steps) for row in rows])
    with torch.no_grad():
        out = oracle.generate(
            torch.tensor(tokens), attention_mask=torch.tensor(segments), max_new_tokens=steps, do_sample=False
        )
    return out.numpy()[:, tokens.shape[1] :]


def greedy(model, tokens, segments, steps: int, repeats: int = 1):
    """Tokens `[B, repeats, steps]` of the sampling engine at temperature 0."""
    engine = Engine(SamplingParams(temperature=0.0), repeats, steps, net=model.net, eos=(-1,), chunk=steps)
    rollout = engine.generate(model.params, jnp.asarray(tokens), jnp.asarray(segments), jax.random.key(0))
    return np.asarray(rollout.tokens)[:, tokens.shape[1] :].reshape(len(tokens), repeats, steps)


def oracle_gradients(oracle, tokens, segments) -> dict[str, np.ndarray]:
    """Gradients by autograd of the mean cross-entropy of left-padded rows, by the names of files."""
    if counts_padding(oracle):  # which then goes to the right
        order = np.argsort(segments == 0, axis=1, kind="stable")
        tokens, segments = (np.take_along_axis(np.asarray(a), order, axis=1) for a in (tokens, segments))
    mask = torch.tensor(segments)
    out = oracle(torch.tensor(tokens), attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    logps, targets = out.logits.log_softmax(-1), torch.tensor(tokens)[:, 1:, None]
    weights = (mask[:, 1:] * mask[:, :-1]).float()
    oracle.zero_grad()
    (-(logps[:, :-1].gather(-1, targets)[..., 0] * weights).sum() / weights.sum()).backward()
    untrained = {name: np.zeros(x.shape) for name, x in oracle.named_buffers() if name.endswith(UNTRAINED)}
    trained = {n: np.zeros(x.shape) if x.grad is None else x.grad.numpy() for n, x in oracle.named_parameters()}
    return in_files(oracle, trained | untrained)


OWN_NAMES = {  # of modules in transformers, and in files
    "deepseek_v4": [
        ("model.embed_tokens", "embed"), ("lm_head", "head"), ("model.hc_head.hc_", "hc_head_"),
        ("model.norm", "norm"), ("model.layers.", "layers."), (".mlp.", ".ffn."), (".self_attn.", ".attn."),
        ("compressor.indexer.scorer.weights_proj", "indexer.weights_proj"),
        ("compressor.indexer.q_b_proj", "indexer.wq_b"), ("compressor.indexer.", "indexer.compressor."),
        ("q_a_norm", "q_norm"), ("kv_norm", "norm"), ("q_a_proj", "wq_a"), ("q_b_proj", "wq_b"), ("kv_proj", "wkv"),
        ("compressor.gate_proj", "compressor.wgate"), ("o_a_proj", "wo_a"), ("o_b_proj", "wo_b"),
        ("sinks", "attn_sink"), ("position_bias", "ape"), ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"), (".attn_hc.", ".hc_attn_"), (".ffn_hc.", ".hc_ffn_"),
        ("gate.e_score_correction_bias", "gate.bias"), ("shared_experts.gate_proj", "shared_experts.w1"),
        ("shared_experts.up_proj", "shared_experts.w3"), ("shared_experts.down_proj", "shared_experts.w2"),
    ],
    "gpt_neox": [("lm_head", "embed_out")],
    "lfm3": [("g_proj", "gate_proj")],
    "sarvam_moe": [
        ("embed_tokens", "word_embeddings"), (".self_attn.", ".attention."), (".o_proj", ".dense"),
        ("q_norm", "query_layernorm"), ("k_norm", "key_layernorm"),
        ("gate.e_score_correction_bias", "gate.expert_bias"),
    ],
    "hy_v3": [
        ("mlp.gate.weight", "mlp.router.gate.weight"), ("e_score_correction_bias", "expert_bias"),
        ("shared_experts", "shared_mlp"),
    ],
    "hy_v4": [
        ("attn_hc.", "hc_attn_layer.hc_pre.hc_"), ("ffn_hc.", "hc_mlp_layer.hc_pre.hc_"),
        ("hc_head.hc_", "hc_head.hc_head_"), (".sinks", ".learnable_sink_param"),
        ("self_attn.gate_proj", "self_attn.linear_gate"),
    ],
    "laguna": [
        ("gate.e_score_correction_bias", "experts.e_score_correction_bias"), ("shared_experts", "shared_expert"),
    ],
    "mistral_large4": [
        ("model.language_model.rotary_emb.alpha", "lerope.alpha"),
        ("model.language_model.embed_tokens", "tok_embeddings"), ("model.language_model.", ""),
        ("model.multi_modal_projector.norm", "pre_mm_projector_norm"), ("model.multi_modal_projector.patch_", "patch_"),
        ("model.multi_modal_projector.linear_1", "vision_language_adapter.w_in"),
        ("model.multi_modal_projector.linear_2", "vision_language_adapter.w_out"),
        ("model.vision_tower", "vision_encoder"), ("lm_head", "output"), (".self_attn.", ".attention."),
        ("kv_a_proj_with_mqa", "wkv_a_with_mqa"), ("kv_b_proj", "wkv_b"), *((f"{x}_proj", f"w{x}") for x in "qkvo"),
        ("input_layernorm", "attention_norm"), ("post_attention_layernorm", "ffn_norm"),
        ("kv_a_layernorm", "kv_a_norm"), ("mlp.gate.", "gate."), ("mlp.experts", "experts"),
        ("mlp.shared_experts", "shared_experts"), (".mlp.", ".feed_forward."),
        ("softmax_scaling.scale", "ssmax_scaling.s"), ("softmax_scaling.bias", "ssmax_scaling.b"),
        *(
            (f"{part}.{theirs}_proj", f"{part}.{own}")
            for part in ("feed_forward", "shared_experts")
            for theirs, own in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
        ),
    ],
    "mimo_v2_flash": [("self_attn.sinks", "self_attn.attention_sink_bias")],
    "step3p5": [
        ("mlp.gate.weight", "moe.gate.weight"), ("mlp.gate.e_score_correction_bias", "moe.router_bias"),
        ("mlp.shared_experts", "share_expert"), ("mlp.experts.down_proj", "moe.down_proj.weight"),
    ],
    "phimoe": [("mlp.router.", "mlp.gate.")],
    "exaone_moe": [("mlp.gate.e_score_correction_bias", "mlp.e_score_correction_bias")],
    "kolibri1": [
        ("mlp.gate.e_score_correction_bias", "moe.router.expert_bias"), ("post_self_attn_layernorm", "post_attn_norm"),
        ("post_mlp_layernorm", "post_ffn_norm"),
    ],
    "bailing_hybrid": [
        ("embed_tokens", "word_embeddings"), (".self_attn.", ".attention."), (".forget_gate.", "."),
        ("o_proj", "dense"), ("e_score_correction_bias", "expert_bias"),
    ],
    "glm5_next_text": [(".forget_gate.", "."), (".attn_hc.", ".hc_attn_"), (".ffn_hc.", ".hc_ffn_")],
    "exaone": [
        ("model.embed_tokens", "transformer.wte"), ("model.layers.", "transformer.h."),
        ("model.norm", "transformer.ln_f"), (".self_attn.", ".attn.attention."), (".o_proj", ".out_proj"),
        (".input_layernorm", ".ln_1"), (".post_attention_layernorm", ".ln_2"), (".gate_proj", ".c_fc_0"),
        (".up_proj", ".c_fc_1"), (".down_proj", ".c_proj"),
    ],
}  # fmt: skip


STACKED = (  # in files too
    "gpt_oss", "gemma4_text", "qwen3_vl_moe", "llama4_text", "granitemoe_swa", "mistral4", "minimax_m3_vl_text",
    "minimax_m3_vl", "hy_v4", "glm5_next",  # of which `named_as_modules` asks
)  # fmt: skip


def in_files(oracle, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays by parameter of transformers as tensors of files, which hold each expert's matrices by themselves."""
    family = oracle.config.model_type
    mixtral = family in ("mixtral", "minimax_m2", "phimoe")
    numbered = mixtral or family in ("lfm2_moe", "kimi_linear", "mistral_large4", "deepseek_v4")
    gate, up, down = ("w1", "w3", "w2") if numbered else ("gate_proj", "up_proj", "down_proj")
    found = {}
    granite = {
        "experts.gate_up_proj": "input_linear.weight", "experts.down_proj": "output_linear.weight",
        "router.weight": "router.layer.weight",
    }  # fmt: skip
    for given, x in arrays.items():
        name = functools.reduce(lambda name, pair: name.replace(*pair), OWN_NAMES.get(family, ()), given)
        if family == "sarvam_moe" and (part := re.search(r"[qkv]_proj", name)) is not None:
            if part[0] == "q_proj":
                names = [name.replace("attention.", "self_attn.").replace("q_proj", f"{own}_proj") for own in "qkv"]
                found[name.replace("q_proj", "query_key_value")] = np.concatenate([arrays[own] for own in names])
            continue
        if family == "step3p5" and name.endswith("gate_up_proj"):
            names = (name.replace("mlp.experts.gate_up_proj", f"moe.{half}_proj.weight") for half in ("gate", "up"))
            found |= zip(names, np.split(x, 2, axis=1), strict=True)
            continue
        if family in ("kimi_linear", "olmo_hybrid", "bailing_hybrid", "glm5_next_text", "glm5_next"):
            name = _name_in_files(oracle, name)
            if name.endswith(".conv1d.weight"):
                keys = len(arrays[given.replace("conv1d", "q_proj")])
                parts = zip("qkv", np.split(x, [keys, 2 * keys]), strict=True)
                found |= {name.replace("conv1d", f"{part}_conv1d"): own for part, own in parts}
                continue
        if family in ("granitemoe", "granitemoehybrid", "granitemoeshared"):
            block, between, part = name.partition("block_sparse_moe.")
            found[block + between + granite.get(part, part)] = x
            continue
        name = name.replace(".mlp.", ".block_sparse_moe.") if mixtral else name
        name = name.replace("model.", "backbone.") if family == "nemotron_h" else name
        name = name.replace(".gate.moe_statics.", ".moe_statics.")
        if name.endswith(".ngram_embedding.weight") and family == "qwen4_exp_text":
            size = -(-len(x) // oracle.config.split_ngram_parts)
            starts = enumerate(range(0, len(x), size))
            found |= {name.replace("weight", f"shard_{i}.weight"): x[first : first + size] for i, first in starts}
            continue
        start, _, part = name.partition(".experts.")
        if not part.endswith("_proj") or family in STACKED:
            found[name] = x
            continue
        halves = np.split(x, 2, axis=1) if part == "gate_up_proj" else [x]
        names = {"gate_up_proj": (gate, up), "up_proj": (up,), "down_proj": (down,)}
        for half, own in zip(halves, names[part], strict=True):
            found |= {f"{start}.experts.{e}.{own}.weight": half[e] for e in range(len(half))}
    return found


def _name_in_files(oracle, name: str) -> str:
    """The name on the hub of a parameter of the classes whose layers' names depend on the layer."""
    config = oracle.config
    layer = int(name.split(".")[2]) if name.startswith("model.layers.") else 0
    if config.model_type == "kimi_linear":
        sparse = config.mlp_layer_types[layer] == "sparse"
        return name.replace(".forget_gate.", ".").replace(".mlp.", ".block_sparse_moe." if sparse else ".mlp.")
    if config.model_type != "olmo_hybrid" or config.layer_types[layer] == "full_attention":
        return name
    norms = {"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"}
    return functools.reduce(lambda name, pair: name.replace(*pair), norms.items(), name)


@functools.partial(jax.jit, static_argnums=0)
def added_gradients(loss, params, *arguments):
    """The second result of `loss(params, *arguments)`, and the gradients of the first as updates of CPUs add them."""
    sums = jax.tree.map(lambda x: jax.new_ref(jnp.zeros_like(x)), params)
    others = add_gradients(lambda params: loss(params, *arguments), params, sums)
    return others, jax.tree.map(jax.freeze, sums)


def gradients(model, tokens, segments) -> dict[str, np.ndarray]:
    """Gradients of the same loss, by the path of the parameter."""
    tokens, segments = jnp.asarray(tokens), jnp.asarray(segments)
    weights = (segments[:, 1:] * segments[:, :-1]).astype(jnp.float32)

    def loss(params):
        logps = jax.nn.log_softmax(model.net.bind(params)(tokens, segments))
        picked = jnp.take_along_axis(logps[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
        return -(picked * weights).sum() / weights.sum(), None

    found = jax.tree_util.tree_leaves_with_path(added_gradients(loss, model.params)[1])
    return {path_name(path): np.asarray(x) for path, x in found}


def in_parameters(tensor: Stored, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """The part of a stacked parameter, in the orientation of files, that a tensor of the files holds."""
    part = arrays[tensor.leaf][tensor.at]
    part = part[None] if tensor.as_row else part
    return part.T if tensor.transpose else part


def of_files(tensor: Stored, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """The tensor in arrays by the names of files, or its part where it is one with others."""
    whole = arrays[tensor.name][tensor.expert] if tensor.one_expert else arrays[tensor.name]
    if tensor.every:
        return whole[..., tensor.first_row :: tensor.every]
    if tensor.axis:
        return whole[..., tensor.first_row : tensor.first_row + tensor.shape[-1]]
    if not tensor.shape:
        return whole
    return whole[tensor.first_row : tensor.first_row + tensor.shape[0]]
