"""Every setting of a run, once: its name, default, type, range and meaning.

`KEYS` is the single source of `config.default()` (the tree that a config file starts from), the checks of
`config.validate()`, the command line with its `--help` (flags.py), and docs/configuration.md.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import ml_collections

from jaxrl_llm.config.resolve import closest
from jaxrl_llm.config.setting import Setting

if TYPE_CHECKING:

    class ConfigDict(ml_collections.ConfigDict):
        """The tree as type checkers see it: any attribute, of any type (`check_keys` checks it)."""

        def __getattr__(self, attribute: str) -> Any: ...

        def __getitem__(self, key: str) -> Any: ...
else:
    ConfigDict = ml_collections.ConfigDict


ONLINE_PREFERENCE = "online_preference"
ALGORITHMS = ("grpo", "ppo", ONLINE_PREFERENCE, "sft", "preference", "reward_model", "process_reward_model")
OFFLINE = ("sft", "preference", "reward_model", "process_reward_model")
EPISODES = "episodes"  # the agent that plays environments
DTYPES = ("float32", "bfloat16", "float16")
QUANTIZED = ("none", "int8", "fp8", "int4", "nf4", "mxfp4")  # quantize.KINDS
SCHEDULE_FREE = "schedule_free_adamw"
OPTIMIZERS = (
    "adamw", "adafactor", "lion", "sgd", "muon", "ademamix", "adopt", SCHEDULE_FREE, "prodigy", "came", "galore_adamw",
)  # fmt: skip
LONGEST_SECONDS = 1e9  # over thirty years; timers of Python and of C overflow beyond about 9e9
SCHEDULES = ("constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt", "wsd", "rex")

SECTIONS = {
    "": "The run.",
    "model": "The network that is trained.",
    "lora": "Low-rank adapters, trained in place of the whole model; `model.param_dtype` is then of the frozen base.",
    "data": "Prompts and rows: sources, formats, lengths. See docs/data.md.",
    "rollout": "Sampling completions from the policy.",
    "environment": "Environments and tools, which answer the policy between its turns. See docs/environments.md.",
    "rewards": "Reward functions and how they run. See docs/rewards.md.",
    "algorithm": "The objective: advantages, losses, KL and entropy terms. `configs/` has a file for each algorithm.",
    "teacher": "A model that the policy learns from besides rewards, or in their place. See docs/distillation.md.",
    "optimizer": "Optimizer and learning rate schedule.",
    "critic": "Value network of PPO and its optimizer; other settings of it are those of `optimizer`.",
    "average": "A moving average of the policy over the steps. See docs/algorithms.md.",
    "batch": "Rows of a step, minibatches, micro-batches and packing.",
    "mesh": "Axes of the device mesh; their sizes multiply to the number of devices. See docs/mesh.md.",
    "processes": "Rendezvous of the processes of a run on several machines; see docs/scaling.md. Detected under Slurm, "
    "Open MPI, Kubernetes and on Cloud TPU. coordinator, count and index are not recorded with the run.",
    "checkpoint": "Saving, retention and resuming. See docs/reliability.md.",
    "eval": "Evaluation on held-out prompts. See docs/evaluation.md.",
    "export": "Publishing the trained model besides output_dir. See docs/sharing.md.",
    "logging": "Logging of metrics and samples. See docs/logging.md.",
    "watch": "Watchdog and warnings. See docs/reliability.md.",
}

COLDEST = 0.001  # temperature above 0: at lower ones float32 does not hold the log-probs
# The options of sampling: their types and bounds, in a run, its evaluations, the commands and the judges that it loads.
# Where requests over HTTP have bounds of their own, serving/bodies.py has the reason.
SAMPLING_OPTIONS: Mapping[str, tuple[type, Mapping[str, Any]]] = {
    "temperature": (float, {"minimum": 0}),  # below COLDEST it is greedy: `SamplingParams`
    "top_p": (float, {"above": 0, "maximum": 1}),
    "top_k": (int, {"minimum": 0}),
    "min_p": (float, {"minimum": 0, "maximum": 1}),
    "repetition_penalty": (float, {"minimum": 0.01, "maximum": 1e9}),  # none makes logits infinite
    "frequency_penalty": (float, {"minimum": -2, "maximum": 2}),
    "presence_penalty": (float, {"minimum": -2, "maximum": 2}),
    "min_tokens": (int, {"minimum": 0}),
}


def sampling_option(name: str, default: float | None, doc: str = "", **bounds: Any) -> Setting:
    """The setting of one of `SAMPLING_OPTIONS`, by the last part of its name, with its own bounds or the usual ones."""
    kind, usual = SAMPLING_OPTIONS[name.rpartition(".")[2]]
    return Setting(name, default, doc, kind, **(bounds or usual))


# fmt: off
KEYS = (
    Setting("output_dir", "runs/default",
        "Folder for checkpoints, metrics and the configuration of the run. `{new}` in its name, `runs/grpo-{new}`, is "
        "the first free number from 1, so that each start is a new run."),
    Setting("seed", 0, "Root of every random number of the run.", int, minimum=0),
    Setting("total_steps", 100, "Number of training steps.", int, minimum=0),
    Setting("num_epochs", None,
        "Passes over the training rows, which set total_steps; none keeps total_steps.",
        float, above=0),
    Setting("overlap_collectives", True,
        "On TPUs, let the compiler overlap sends between devices with computation, by flags in LIBTPU_INIT_ARGS; "
        "flags that you set there stay. GPUs always do so.", bool),
    Setting("compilation_cache", "auto",
        "Folder for compiled programs, which later runs and commands reuse; auto is $JAX_COMPILATION_CACHE_DIR or "
        "~/.cache/jaxrl_llm/compiled, none is off."),

    Setting("callbacks", (),
        "Callbacks, which observe the run and may end it: `early_stopping(metric='eval/accuracy', patience=3)`, "
        "`module:Class` or `path/to/file.py:Class`, each with options in brackets. See docs/callbacks.md."),

    Setting("model.path", "embedded:sort",
        "Hugging Face hub id, local folder, `embedded:<name>` for a model in the package, or the URL of a folder "
        "(gs://, s3://, hdfs:// and others of fsspec), which is copied to this machine. See docs/models.md."),
    Setting("model.tokenizer", None,
        "Folder, hub id or URL of another tokenizer than that of model.path, for the same token ids; none is its own."),
    Setting("model.eos_token", None,
        "Token that ends texts in place of the tokenizer's own, `<|im_end|>`: it ends samples too, and the trained "
        "model keeps it."),
    Setting("model.revision", None, "Branch, tag or commit of a hub id; none is its main branch."),
    Setting("model.overrides", "",
        "Entries that replace those of the model's config.json, `rope_theta=1e6, sliding_window=None`."),
    Setting("model.register", (),
        "Modules or files to import before the model is loaded, `path/to/family.py`; one with MODEL_TYPE is a family "
        "of models, as those of models/families."),
    Setting("model.dtype", "auto",
        "Compute type of the network; auto is float32 on CPUs and on GPUs before Ampere, and bfloat16 on other "
        "accelerators. There is no float16, whose gradients need loss scaling.",
        choices=("auto", "float32", "bfloat16")),
    Setting("model.param_dtype", "float32",
        "Storage type of the trained parameters; 16 bits are rounded to stochastically in each update.",
        choices=DTYPES),
    Setting("model.allow_pickle", False,
        "Read pytorch_model.bin where a model has no safetensors. Only tensors are read; no code in the file runs.",
        bool),
    Setting("model.trust_remote_code", False, "Run the Python code that a tokenizer's folder may contain.", bool),
    Setting("model.random_init", False, "Start from random parameters (drawn from seed) instead of the model's.", bool),
    Setting("model.remat", "auto",
        "Rematerialisation: none saves all activations; block saves the inputs of layers, and the backward pass "
        "recomputes the rest; offload keeps these inputs in host memory; dots saves the outputs of matmuls and of "
        "attention kernels; auto is dots on CPUs, else none.",
        choices=("auto", "none", "block", "dots", "offload")),
    Setting("model.mlp_tile_tokens", 0,
        "Compute the feed-forward of a layer for so many tokens of a device at a time, so that its activations exist "
        "for these alone (TiledMLP, arXiv 2506.13996): for long rows, with model.remat block or offload. 0 is all at "
        "once, as always with mesh.tensor above 1 or lora.dropout, and in experts.", int, minimum=0),
    Setting("model.scan_layers", True,
        "Compile one layer and scan it; false compiles each layer, which takes longer.", bool),
    Setting("model.attention", "auto",
        "Attention over whole rows: xla; or kernels that keep no scores in memory: cudnn on NVIDIA GPUs (in 16 bits), "
        "flash there too (without a mask), splash on TPUs. auto is splash on TPUs; cudnn on GPUs, and flash for rows "
        "of more than 4096 tokens; xla where these are unavailable, and on CPUs. Unless this is xla, decoding on GPUs "
        "in 16 bits has its own kernel.",
        choices=("auto", "xla", "cudnn", "flash", "splash")),
    Setting("model.matmul_dtype", "auto",
        "Type of the operands of the layers' matmuls in training; auto is model.dtype. fp8 is float8_e4m3fn, and "
        "float8_e5m2 for gradients, on GPUs from Ada and Hopper on; int8 leaves the gradients of matrices to "
        "model.dtype. Sampling is in model.dtype, so RL needs algorithm.importance_correction. See "
        "docs/performance.md.", choices=("auto", "fp8", "int8")),
    Setting("model.fp32_head", False, "Compute the logits in float32, whatever model.dtype is.", bool),
    Setting("model.router_aux_loss_coef", None,
        "Weight of the load-balancing loss of a mixture of experts; none is router_aux_loss_coef of its config.json, 0 "
        "is off.", float, minimum=0),
    Setting("model.offload", False,
        "Keep the parameters, and the critic's, in the host's memory between uses: each pass loads them to the "
        "device, and sampling loads only its copy in model.dtype.", bool),
    Setting("model.freeze_router", False, "Do not train the routers of a mixture of experts.", bool),
    Setting("model.trainable", (),
        "Train only these parameters: regular expressions for the beginnings of their names in transformers' class, "
        "`model.layers.2[0-9]+.`, in which a dot is a dot. Empty is all."),
    Setting("model.frozen", (),
        "Parameters that are not trained, named in the same way, even if model.trainable names them."),
    Setting("model.vision", "frozen",
        "The vision part of a model that reads images, encoder and projector: frozen; trained, with the rest of the "
        "model; or lora, by adapters on the encoder's linear layers beside the decoder's.",
        choices=("frozen", "trained", "lora")),
    Setting("model.quantize", "none",
        "Store the matrices of the layers in 8 or 4 bits and train adapters only (QLoRA).", choices=QUANTIZED),
    Setting("model.quantize_experts", "same",
        "How the matrices of a mixture's experts are stored: same is as model.quantize says, none leaves them as they "
        "are, beside model.qat too. mxfp4 keeps the numbers of gpt-oss' files, whatever the other matrices are stored "
        "in.",
        choices=("same", *QUANTIZED)),
    Setting("model.qat", "none",
        "Train for matrices in 8 or 4 bits (quantisation-aware training): compute with the matrices of the layers as "
        "model.quantize would store them, and train the unrounded ones.", choices=("none", "int8", "fp8", "int4",
        "nf4")),

    Setting("lora.rank", 0, "Rank of the adapters; 0 trains the whole model.", int, minimum=0),
    Setting("lora.alpha", 16.0, "Adapters are scaled by alpha / rank.", float, above=0),
    Setting("lora.rslora", False, "Scale by alpha / sqrt(rank) instead.", bool),
    Setting("lora.dora", False,
        "Also learn the lengths of the matrices' columns (DoRA): more like training all of them, and slower.", bool),
    Setting("lora.init", "kaiming",
        "How adapters start, as PEFT's init_lora_weights: kaiming, gaussian and orthogonal do not change the model at "
        "the start; random (PEFT's False) does; pissa, pissa_niter_N (faster, N power iterations) and olora start "
        "from principal parts of the matrices; loftq and loftq_niter_N from what they lose by model.quantize."),
    Setting("lora.dropout", 0.0, "Dropout rate on the inputs of adapters while training.",
        float, minimum=0, below=1),
    Setting("lora.targets", ("all-linear",),
        "Linear layers with an adapter: all-linear (without heads and experts), or some of q_proj, k_proj, v_proj, "
        "o_proj, gate_proj, up_proj, down_proj; and the matrices of experts: experts (both), or experts.gate_up_proj, "
        "experts.down_proj."),
    Setting("lora.layers_to_transform", (), "Layers with adapters, numbered from 0, as in PEFT; none named is all.",
        int, minimum=0),
    Setting("lora.exclude_modules", (),
        "Modules without an adapter, by the ends of their names as in PEFT: down_proj, `layers.0.self_attn.q_proj`."),
    Setting("lora.rank_pattern", (),
        "Ranks of some modules, each PATTERN=RANK as in PEFT: a regular expression for the end of their names, "
        "`down_proj=32`, `layers.[01].self_attn.q_proj=8`. The first that fits counts."),
    Setting("lora.alpha_pattern", (),
        "alpha of some modules, each PATTERN=ALPHA, in the same way."),
    Setting("lora.modules_to_save", (),
        "Modules trained whole beside the adapters, by the ends of their names as in PEFT: embed_tokens, lm_head, "
        "norm (all norms), ... If head and embedding are tied, either name means both."),
    Setting("lora.bias", "none",
        "Biases trained beside the adapters, as PEFT's bias: all of the model, or those of linear layers that have an "
        "adapter (lora_only).", choices=("none", "all", "lora_only")),
    Setting("lora.path", None,
        "PEFT folder of an adapter to continue from, or its URL; it sets rank, alpha, rslora, dora, targets, bias and "
        "modules_to_save."),
    Setting("lora.reference", "auto",
        "Reference policy: the model without adapters (base), with its initial adapters (start), or a merged copy of "
        "the whole model (copy), which ref_mixup_alpha below 1 needs. auto is the model as the run starts: start where "
        "adapters are trained on, of lora.path for example, else base.", choices=("auto", "base", "start", "copy")),

    Setting("data.path", "task:sort",
        "Hub id; file, pattern of files or folder, here or at a URL; `path/to/file.py:function`, which gives rows; or "
        "`task:<name>`, a built-in task."),
    Setting("data.name", None, "Configuration name of the hub data set data.path."),
    Setting("data.sources", (),
        "Several sources in place of data.path, one after the other or mixed by weight: each a path, "
        "`path(split='train', format='chatml.intel', weight=2)`, or in a config file a dictionary with path, name, "
        "split, eval_split, format (or type), weight, ds_type, data_files, prompt_key, completion_key, label_key, and "
        "options of the format.", dict),
    Setting("data.format", "auto",
        "Format of the rows: a name of docs/data.md such as `chatml.intel`, `module:function` or "
        "`path/to/file.py:function`; options in brackets, `harmony(field='turns')`. auto recognises the types "
        "of TRL, rows of verl, threads of Harmony, conversations of ShareGPT and preferences of OpenAI."),
    Setting("data.streaming", False, "Read rows on demand, for data that does not fit in memory.", bool),
    Setting("data.shuffle_buffer", 4096, "Size of the shuffle buffer when streaming, in rows.", int, minimum=1),
    Setting("data.workers", 0, "Tokeniser threads before the first step; 0 is one for each core, up to 16.",
        int, minimum=0),
    Setting("data.cache", "auto",
        "Folder for tokenised rows, which later runs reuse; auto is $JAXRL_LLM_CACHE or ~/.cache/jaxrl_llm, for files "
        "and hub data of 10000 rows or more whose format is not your own; `none` is off."),
    Setting("data.split", "train",
        "Split to train on, or parts of splits, `train[:10%]`; rows given in Python are one split, whatever its name."),
    Setting("data.eval_path", None, "Data set to evaluate on; none is data.path."),
    Setting("data.eval_split", None,
        "Split to evaluate on. none is test or, of a data.eval_path without that, its only split; where the training "
        "data has no test split, nothing is evaluated."),
    Setting("data.prompt_key", "prompt", "Column that holds the prompt, whatever the format."),
    Setting("data.completion_key", "completion", "Column that holds the completion, whatever the format."),
    Setting("data.label_key", "label", "Column that holds the label of a completion, whatever the format."),
    Setting("data.image_key", "auto",
        "Column with the images of a row; auto is images or image. none: rows have no images, whatever their columns."),
    Setting("data.image_pixels", 2**25, "Most pixels of an image, height times width.", int, minimum=1),
    Setting("data.image_bytes", 2**25, "Most bytes of the file of an image.", int, minimum=1),
    Setting("data.images_per_row", 16, "Most images of a row.", int, minimum=1),
    Setting("data.image_urls", False, "Fetch images that rows name by http(s) URLs.", bool),
    Setting("data.image_processor", "",
        "Options of the image processor, `max_pixels=401408`, over those of the model's preprocessor_config.json; the "
        "trained model keeps them. Qwen-VL, GLM-V, EXAONE 4.5, VideoLLaMA 3, LFM3-VL and MiniMax-M3: min_pixels, "
        "max_pixels; Idefics3 and SmolVLM: longest_edge, do_image_splitting; Mistral 3, Pixtral and LightOnOCR: "
        "longest_edge; InternVL and Aya Vision: min_patches, max_patches; Command A Vision and Kimi K2.5: max_patches; "
        "Ovis2: crop_to_patches, max_patches; Gemma 4: max_soft_tokens; GLM-5.3: min_image_tokens, max_image_tokens; "
        "LFM2-VL: these, max_tiles, do_image_splitting; Idefics2: do_image_splitting."),
    Setting("data.system_prompt", None,
        "System message put before conversations that have none."),
    Setting("data.chat_template", None,
        "Chat template in place of the tokenizer's: chatml, gemma, llama2, llama3, mistral, phi3 or zephyr, a file, "
        "the text of a template, or the folder, hub id or URL of another tokenizer. The trained model keeps it."),
    Setting("data.chat_template_kwargs", "",
        "Options of the chat template, `enable_thinking=False`; a column chat_template_kwargs of a row overrides them.",
        ),
    Setting("data.overlong", "error",
        "Handling of prompts over rollout.max_prompt_length, and of rows of offline algorithms over data.max_length: "
        "stop with an error, drop them, or truncate their start, end or middle; or, of sft, split a row into several.",
        choices=("error", "filter", "truncate_left", "truncate_right", "truncate_middle", "split")),
    Setting("data.deduplicate", False,
        "Leave out rows that equal an earlier one in all columns, and evaluation rows that are trained on.", bool),
    Setting("data.shuffle", True, "Reshuffle the rows every epoch.", bool),
    Setting("data.group_by_length", False,
        "Batches of rows of similar length, as wide as their own longest row: for data rows that are not packed "
        "(lora.dropout, NEFTune). 50 batches of an epoch at a time are sorted, the longest first.", bool),
    Setting("data.curriculum_easy", None,
        "Running success rate at or above which a prompt is skipped; none skips none. A completion succeeds by "
        "eval.correct_at.", float, above=0, maximum=1),
    Setting("data.curriculum_hard", None,
        "Running success rate at or below which a prompt is skipped; none skips none.", float, minimum=0, below=1),
    Setting("data.curriculum_revisit", 0.1,
        "Share of the turns of a skipped prompt in which it is used all the same, so that its rate may change.",
        float, minimum=0, maximum=1),
    Setting("data.curriculum_visits", 1,
        "Times a prompt is used before it can be skipped.", int, minimum=1),
    Setting("data.curriculum_decay", 0.5,
        "Weight of the previous rate in the running success rate; 0 keeps only the newest.",
        float, minimum=0, below=1),
    Setting("data.max_length", 1024,
        "Tokens in a row of an offline algorithm, prompt and completion together.", int, minimum=1),
    Setting("data.loss_on", "completion",
        "Tokens in the loss of supervised fine-tuning: the completion (in conversations every turn of the assistant); "
        "the last_turn of the assistant alone; every turn as_shown by the chat template in the whole conversation, "
        "even if the prompt of a later turn would show it otherwise; or all, the prompt included. A turn of weight 0 "
        "is never learned. Of a process reward model every step of the completion or, in training, the last_step "
        "alone.",
        choices=("completion", "last_turn", "as_shown", "all", "last_step")),
    Setting("data.step_separator", None,
        "Text that process_reward_model puts after each step, at whose last token the step is rated; none is a line "
        "break. On a command line `\\n` is one.", escapes=True),
    Setting("data.packing", False,
        "Pack several short rows of supervised fine-tuning into one; they do not attend to each other.", bool),
    Setting("data.packing_strategy", "first_fit",
        "How data.packing packs: whole rows, each where it first fits (first_fit); or all rows one after the other, "
        "cut every data.max_length tokens, as one text whose tokens see the rows before (wrapped).",
        choices=("first_fit", "wrapped")),
    Setting("data.precompute_reference", False,
        "Compute the reference log-probs of a preference data set once, before training, and free the reference.",
        bool),

    Setting("rollout.group_size", 8, "Completions per prompt.", int, minimum=1),
    Setting("rollout.max_prompt_length", 512, "Longest prompt, in tokens.", int, minimum=1),
    Setting("rollout.max_completion_length", 256,
        "Longest completion, in tokens, end of text included.", int, minimum=1),
    sampling_option("rollout.temperature", 1.0,
        "Sampling temperature, which the trainer's log-probs use too. 0 is greedy: all completions of a prompt are "
        "then the same, and log-probs are at temperature 1.", minimum=COLDEST, besides=0),
    sampling_option("rollout.top_p", 1.0,
        "Sample from the smallest set of tokens with this probability; 1 is off."),
    sampling_option("rollout.top_k", 0, "Sample from this many most likely tokens; 0 is off."),
    sampling_option("rollout.min_p", 0.0,
        "Drop tokens less likely than this fraction of the most likely one; 0 is off."),
    sampling_option("rollout.repetition_penalty", 1.0,
        "Divide the positive logits of tokens in prompt and completion by this, and multiply the negative ones, as "
        "transformers and vLLM do; 1 is off."),
    sampling_option("rollout.frequency_penalty", 0.0,
        "Subtract this from a token's logit for each time that it was sampled in the completion; 0 is off."),
    sampling_option("rollout.presence_penalty", 0.0,
        "Subtract this from the logits of tokens that were sampled in the completion; 0 is off."),
    Setting("rollout.logit_bias", (), "Numbers added to the logits of tokens, each `ID=BIAS`, `50256=-5`."),
    Setting("rollout.bad_words", (),
        "Texts that are not sampled."),
    Setting("rollout.min_completion_length", 0,
        "Shortest completion, in tokens: no end before. 0 is off.", int, minimum=0),
    Setting("rollout.stop", (),
        "Texts that end a completion, with the token in which the first of them is complete; it stays in the "
        "completion. On a command line `\\n`, `\\r`, `\\t` and `\\\\` are a line break, a return, a tab and a "
        "backslash, and texts with commas are a list in JSON, `[\",\", \"x\"]`.", escapes=True),
    Setting("rollout.stop_token_ids", (), "Tokens that end a completion beside the end of text.", int, minimum=0),
    Setting("rollout.ignore_eos", False,
        "Sample past the end of text: rollout.max_completion_length tokens for every completion, or up to one of "
        "rollout.stop and stop_token_ids. For measurements.", bool),
    Setting("rollout.structured_regex", "",
        "Regular expression that whole completions match (guided decoding), in the syntax of Rust's regex: without "
        'look-around and back-references. Each structured_ key needs `pip install "jaxrl_llm[structured]"`.'),
    Setting("rollout.structured_choice", (),
        "Texts of which each completion is one."),
    Setting("rollout.structured_json", "",
        "JSON schema, a file or its text, that completions match."),
    Setting("rollout.structured_grammar", "",
        "Context-free grammar, a file or its text, in Lark's syntax or GBNF. The host computes before each step which "
        "tokens may follow, which is slower than the other structured_ keys."),
    Setting("rollout.chunk", 32,
        "Most decoding steps between two checks by the host; decoding pauses earlier when slots can be reassigned.",
        int, minimum=1),
    Setting("rollout.slots", 0,
        "Decode slots over all devices, at least one in each shard of rows; further completions wait for a free one. "
        "0 is a slot for every completion.", int, minimum=0),
    Setting("rollout.memory_fraction", None,
        "Largest share of the devices' memory that sampling holds, parameters, keys and values together: as many "
        "slots as fit. None is no bound.", float, above=0, maximum=1),
    Setting("rollout.shrink", 0.5,
        "Reduce the slots by this factor once the running completions fit and none waits. 0.85 leaves fewer slots "
        "idle than 0.5, and compiles more programs. Small models and short completions keep their slots.",
        float, above=0, below=1),
    Setting("rollout.speculative_tokens", 0,
        "Speculative tokens per row and decoding step, proposed by prompt lookup and verified in that step. Samples "
        "stay the same; it pays where text repeats itself. 0 is off.", int, minimum=0),
    Setting("rollout.router_replay", False,
        "Send each token of the update to the experts that the sampler chose for it (R3). A sampler that rounds "
        "differently (rollout.weights_dtype, cache_dtype) chooses others for some tokens.",
        bool),
    Setting("rollout.weights_dtype", "auto",
        "Storage type of the matrices while sampling; auto is the compute type. int8 and fp8 store those of the layers "
        "(on TPUs not of experts) in 8 bits, which halves their memory traffic against 16. Training with fewer bits "
        "than model.dtype needs algorithm.importance_correction.", choices=("auto", *DTYPES, "int8", "fp8")),
    Setting("rollout.cache_dtype", "auto",
        "Storage type of the keys and values while sampling; auto is the compute type. fp8 needs "
        "algorithm.importance_correction.", choices=("auto", *DTYPES, "fp8")),
    Setting("rollout.mesh", "auto",
        "Mesh for sampling, `tensor=8` or `fsdp=2,tensor=4`: sizes of data, fsdp, expert and tensor; those not named "
        "are 1, and data takes the remaining devices. Parameters are resharded for each rollout. none is the train "
        "mesh, its context axis joined to fsdp. auto is the same but, on accelerators with fsdp or context, has "
        "tensor in their place, so that no token gathers the parameters.", none=True),
    Setting("rollout.devices", 0,
        "Devices that only sample, the last ones; mesh is of the others, and rollout.mesh of these (data=-1 unless it "
        "is set). 0: all devices do both. With rollout.staleness above 0 both work at once. See docs/asynchronous.md.",
        int, minimum=0),
    Setting("rollout.processes", 0,
        "Processes that only sample and grade, the last of processes.count; the others train. They exchange files in "
        "output_dir/rollouts, which all must reach; rollout.mesh is of the devices of each. See docs/asynchronous.md.",
        int, minimum=0),
    Setting("rollout.staleness", 0,
        "Updates between the policy that samples a batch and the one that is updated with it. 0 samples, grades and "
        "updates in turn; with 1 or more a thread samples and grades the batches of the next steps meanwhile. Needs "
        "algorithm.importance_correction, or old_logps=sampler. See docs/asynchronous.md.", int, minimum=0),
    Setting("rollout.partial_prompts", 0,
        "Prompts in flight besides the batch.prompts of a step: the step trains on the first whose completions have "
        "all ended, and the others continue in the next step, by its policy. 0 samples every completion to its end in "
        "one step. Needs algorithm.importance_correction, or old_logps=sampler. See docs/asynchronous.md.",
        int, minimum=0),
    Setting("rollout.partial_tokens", 0,
        "With rollout.partial_prompts, most tokens of a completion that a round samples, before the step checks which "
        "prompts are complete; rounds follow until batch.prompts are. 0 is a quarter of "
        "rollout.max_completion_length.", int, minimum=0),
    Setting("rollout.update_in_flight", False,
        "Give each new policy to the batch that is being sampled, between two chunks of decode steps (rollout.chunk); "
        "its rows continue with the keys and values that they have. Needs rollout.staleness. arrivals.jsonl records "
        "when each policy came. See docs/asynchronous.md.", bool),
    Setting("rollout.max_wait", None,
        "With rollout.partial_prompts, seconds of sampling after which a step takes the first batch.prompts complete "
        "prompts, between two chunks of decode steps; 0 is as soon as there are so many. none samples whole rounds of "
        "rollout.partial_tokens. See docs/asynchronous.md.", float, minimum=0, maximum=LONGEST_SECONDS),
    Setting("rollout.arrivals", None,
        "Record of another run, its arrivals.jsonl, that this run follows: with the same settings it gives the same "
        "bits. With rollout.update_in_flight or rollout.max_wait."),

    Setting("rewards.functions", ("exact_match",),
        "Reward functions: built-in name, `module:function` or `path/to/file.py:function`, each with options in "
        "brackets: `judge(url='http://localhost:8000/v1', model='m')`, or `judge(path='Qwen/Qwen3-4B')` of a model "
        "that the run loads; `model:<path>` is a reward model, `prm:<path>` a process reward model. See "
        "docs/rewards.md."),
    Setting("rewards.weights", (), "Weight of each reward function; empty is 1 for all.", float),
    Setting("rewards.timeout", None,
        "Seconds each reward function may take for one batch; none is no limit. With a limit a function that is named "
        "by module or file runs in a process of its own, which is killed when it is late.",
        float, above=0, maximum=LONGEST_SECONDS),
    Setting("rewards.on_timeout", "stop",
        "Reward of rows that a function has not finished within rewards.timeout: stop (an error), none (no reward), or "
        "a number."),
    Setting("rewards.on_error", "stop",
        "Reward of rows on which a function raises: stop (an error) or none (no reward).", choices=("stop", "none")),
    Setting("rewards.workers", 0,
        "Processes for reward functions that are not async; 0 runs them in this process. A late function is killed "
        "with its process.", int, minimum=0),

    Setting("environment.name", None,
        "Class or function that returns an environment (or an object whose methods are tools): built-in name, "
        "`module:Class` or `path/to/file.py:Class`, with options in brackets, `sort_then_smallest(first=0.2)`; or a "
        "dictionary of these by the values of the column environment."),
    Setting("environment.reward_scale", (),
        "Factors on the rewards of some of several environments, each `NAME=NUMBER`, `maze=0.1`."),
    Setting("environment.options", (),
        "Options of the algorithm for some of several environments, each with one or more of `maze(advantage='gigpo', "
        "beta=0.02, weight=0.5)`: the advantage estimate and the weight of the KL term of its rows, in place of "
        "algorithm.advantage and algorithm.beta, and a factor on their loss. See docs/environments.md."),
    Setting("environment.tools", (), "Functions that the policy may call, `path/to/file.py:calculator`."),
    Setting("environment.max_turns", 10, "Most turns of the policy in an episode.", int, minimum=1),
    Setting("environment.max_tool_calls", None,
        "Most tool calls in an episode; a turn that exceeds it ends the episode. none is no limit.", int, minimum=0),
    Setting("environment.timeout", 60.0,
        "Most seconds for each call of an environment; none is no limit.", float, above=0, none=True,
        maximum=LONGEST_SECONDS),
    Setting("environment.workers", 16, "Concurrent calls of environments.", int, minimum=1),
    Setting("environment.on_error", "end",
        "Handling of an environment that raises, returns nonsense or is late: end its episode without a reward, or "
        "stop the run.", choices=("end", "stop")),
    Setting("environment.rollout_func", None,
        "Function that samples in place of the engine, `path/to/file.py:function`, or an OpenAI-compatible server, "
        "`server(url='http://localhost:8000/v1', model='m')`."),
    Setting("environment.agent", None,
        "Agent: a program that calls an endpoint of the run with any client of OpenAI's API, `path/to/file.py:run` or "
        "a command line. Its calls are sampled and learned from. See docs/agents.md. `episodes` plays "
        "environment.name and environment.tools, whose observations may then have images; "
        "`verifiers(taskset='my-taskset')` plays the tasks of that package."),
    Setting("environment.agents", (),
        "Further agents, each `VALUE=AGENT`: each runs for the rows whose column agent has that value, and "
        "environment.agent for rows without one."),
    Setting("environment.agent_timeout", 600.0,
        "Most seconds that an agent takes for a row; a later one has failed, and its row is left out.", float, above=0,
        maximum=LONGEST_SECONDS),
    Setting("environment.agent_tokens", None,
        "Most tokens that an agent samples for a row, over all its calls; none is no limit.", int,
        minimum=1),
    Setting("environment.agent_branches", 8,
        "Most branches of an agent's session that are learned from: always that of its last call, then those of forks "
        "and sub-agents that fit into rollout.max_completion_length.", int, minimum=1),

    Setting("algorithm.name", "grpo",
        "Kind of training: grpo and ppo (with a critic) sample and score completions, online_preference samples and "
        "scores pairs (online DPO), sft learns completions of the data, "
        "preference learns from pairs or labelled completions, reward_model learns a score from pairs, "
        "process_reward_model from labelled steps whether each step of a solution is right.",
        choices=ALGORITHMS,
        hint="losses of pairs and labels, as dpo, are preference with algorithm.loss, and what follows GRPO, as gspo, "
        "is grpo with its settings: `--config=NAME` of a shipped file, dpo or gspo for example, has them"),
    Setting("algorithm.advantage", "group",
        "Advantage estimate: built-in name, `module:function` or `path/to/file.py:function`; options in brackets, "
        "`rloo(normalize=True)`."),
    Setting("algorithm.loss", "auto",
        "Policy, sft, preference or reward-model loss: built-in name, `module:function` or `path/to/file.py:function`, "
        "with options in brackets, `sapo(temperature_negative=1.1)`; preference losses may be a mixture, "
        "`dpo+bco_pair`. auto is ppo_clip, nll, dpo, bradley_terry or step_cross_entropy."),
    Setting("algorithm.importance_sampling_level", None,
        "Level of the probability ratio, by TRL's name: token, each token's own; sequence, the geometric mean over "
        "the row. For ppo_clip (sequence makes it gspo), cispo and sapo; none is the loss's own.",
        choices=("token", "sequence")),
    Setting("algorithm.aggregation", "sequence",
        "Average of the token losses: over each row's tokens, then over rows (sequence); over all tokens (token); "
        "over the tokens of a prompt's rows, then over prompts (prompt); over rows x rollout.max_completion_length "
        "(constant); row sums over rows (sequence_sum); no average but the sum over all tokens, as Tinker's losses "
        "(token_sum); over the tokens of each micro-batch (microbatch_token); over an equal share of the rollout's "
        "tokens, as TRL's dapo (rollout_token).",
        choices=("sequence", "token", "prompt", "constant", "sequence_sum", "token_sum", "microbatch_token",
                 "rollout_token")),
    Setting("algorithm.reference_samples", 0,
        "Completions of the reference for each prompt, sampled before the first step, whose scores the advantage "
        "reads (a2po); 0 reads them from a column reference_scores.", int, minimum=0),
    Setting("algorithm.drop_unsolved", True,
        "Leave out prompts for which every score of the reference is 0 (a2po).", bool),
    Setting("algorithm.scale_rewards", "group",
        "Standard deviation that advantages are divided by: the group's, the batch's, or none.",
        choices=("group", "batch", "none")),
    Setting("algorithm.beta", 0.0,
        "Weight of the KL term against the reference policy; 0 is off and keeps no reference. Preference losses: their "
        "beta (ORPO's lambda).", float, minimum=0),
    Setting("algorithm.kl", "auto",
        "Estimator of the KL term; auto is k1 in the reward and k3 in the loss. full, in the loss, is the exact sum "
        "over the vocabulary; it keeps the reference's hidden states, a vector per token.",
        choices=("auto", "k3", "k1", "abs", "k2", "full")),
    Setting("algorithm.kl_in_reward", False,
        "Subtract beta x KL from the rewards instead of adding it to the loss: token by token in ppo and "
        "reinforce_plus_plus, elsewhere its sum over a row from the row's score.", bool),
    Setting("algorithm.reward_beta", 0.0,
        "Weight of a KL penalty in the rewards, in addition to the term in the loss, whose weight is beta; 0 is off. "
        "An adaptive controller moves it and not beta.", float, minimum=0),
    Setting("algorithm.reward_kl", "k1", "Estimator of the penalty of reward_beta.", choices=("k1", "k3", "abs", "k2")),
    Setting("algorithm.kl_bias_correction", False,
        "Multiply the KL term of the loss by the probability ratio: unbiased for samples of an older policy.", bool),
    Setting("algorithm.kl_controller", "fixed",
        "Keep beta (fixed), or move it so that the KL approaches kl_target (adaptive).",
        choices=("fixed", "adaptive")),
    Setting("algorithm.kl_target", 0.1, "KL per token that the adaptive controller steers to.", float, above=0),
    Setting("algorithm.kl_horizon", 10_000.0, "Rows over which the adaptive controller moves beta.", float, above=0),
    Setting("algorithm.offload_reference", False,
        "Keep a copied reference in the host's memory between passes.", bool),
    Setting("algorithm.ref_sync_steps", 0,
        "Steps between moves of the reference towards the policy, also that of preference losses; 0 is never.",
        int, minimum=0),
    Setting("algorithm.ref_mixup_alpha", 0.6,
        "Share of the policy in the moved reference; 1 replaces it.", float, above=0, maximum=1),
    Setting("algorithm.ref_sync_to", "policy",
        "What the reference moves towards: the policy, or its moving average (average.every).",
        choices=("policy", "average")),
    Setting("algorithm.ref_sync_after", 0,
        "Step of the first move of the reference, from which ref_sync_steps are counted; 0 is ref_sync_steps.",
        int, minimum=0),
    Setting("algorithm.epsilon_low", 0.2, "The probability ratio is clipped below 1 - epsilon_low.", float, minimum=0),
    Setting("algorithm.epsilon_high", 0.2,
        "The probability ratio is clipped above 1 + epsilon_high; cispo: the cap of the ratio itself.",
        float, minimum=0),
    Setting("algorithm.num_iterations", 1, "Passes over each batch of completions.", int, minimum=1),
    Setting("algorithm.old_logps", "auto",
        "Log-probs that the probability ratio compares with: those of the policy before the step, computed by the "
        "trainer (trainer), those that were recorded as the tokens were sampled (sampler), or numbers between the "
        "sampler's and the policy's own, by the age of a token, in place of the trainer's pass (interpolated). auto is "
        "sampler or the reference for a loss that is defined so (dppo, a2po), otherwise trainer, computed only where "
        "they differ from the policy's own.",
        choices=("auto", "trainer", "sampler", "interpolated")),
    Setting("algorithm.rollout_correction", None,
        "A preset of verl for samples of another policy, `decoupled_seq_is(threshold=4.0)`: it sets old_logps, "
        "importance_correction and its bounds, rejection and its bounds, and for bypass_* the loss. "
        "docs/algorithms.md has the list.", str),
    Setting("algorithm.importance_correction", "none",
        "Weights that correct for a sampler that differs from the trainer: the ratio of each token, of the whole row, "
        "or its geometric mean, clipped to importance_min and importance_max (truncate), or set to 0 outside them "
        "(mask).",
        choices=("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_truncate",
                 "geometric_mask")),
    Setting("algorithm.importance_max", 3.0, "Largest ratio of the importance correction.", float, above=0),
    Setting("algorithm.importance_min", None, "Smallest ratio of the importance correction; none is 0.",
        float, minimum=0),
    Setting("algorithm.importance_normalize", False,
        "Divide the weights of the importance correction by their mean over the optimizer batch.", bool),
    Setting("algorithm.rejection", None,
        "Leave out tokens or rows that sampler and trainer rate too differently, by criteria joined by commas, all of "
        "which must hold: verl's token_k1 to token_k3, seq_sum_k1 to seq_sum_k3, seq_mean_k1 (the geometric mean) to "
        "seq_mean_k3, seq_max_k2, seq_max_k3, and OpenRLHF's token_kl, token_tv, seq_mean_kl, seq_mean_tv; none is "
        "off.", str),
    Setting("algorithm.rejection_bounds", None,
        "Bounds of algorithm.rejection, one for all criteria or one of each, joined by commas: low_high of the ratio "
        "for k1 (`0.999_1.001`), the largest divergence for the others (`0.01`).", str),
    Setting("algorithm.off_policy_mask_threshold", None,
        "Leave out rows of negative advantage whose mean log-prob fell by more than this since they were sampled; "
        "none is off.",
        float, minimum=0),
    Setting("algorithm.top_entropy_quantile", 1.0,
        "Share of the tokens, those of highest entropy, that the policy loss learns from.", float, above=0, maximum=1),
    Setting("algorithm.entropy_coef", 0.0, "Weight of the entropy bonus; 0 is off.", float, minimum=0),
    Setting("algorithm.observation_coef", 0.0,
        "Weight of the cross-entropy on observation tokens, which environments, tools and agents write (ECHO); 0 is "
        "off.", float, minimum=0),
    Setting("algorithm.positive_nll_coef", 0.0,
        "Weight of the cross-entropy on correct completions (VAPO), those whose first reward is at least "
        "eval.correct_at; 0 is off.", float, minimum=0),
    Setting("algorithm.entropy_controller", "fixed",
        "Keep entropy_coef (fixed), or raise it while the entropy is at or below entropy_target and lower it otherwise "
        "(adaptive). An adaptive one is in the loss only while the entropy is at or below the target.",
        choices=("fixed", "adaptive")),
    Setting("algorithm.entropy_target", 0.2, "Entropy per token that the adaptive controller keeps.", float, minimum=0),
    Setting("algorithm.entropy_delta", 0.005, "Change of an adaptive entropy_coef in a step.", float, minimum=0),
    Setting("algorithm.entropy_coef_min", 0.0, "Smallest adaptive entropy_coef.", float, minimum=0),
    Setting("algorithm.entropy_coef_max", 1.0, "Largest adaptive entropy_coef.", float, minimum=0),
    Setting("algorithm.mask_truncated", False, "Leave completions that did not end out of the loss.", bool),
    Setting("algorithm.filter_zero_advantages", False,
        "Leave tokens with the advantage 0 out of the loss and of its means: those of prompts whose completions all "
        "score alike.", bool),
    Setting("algorithm.reward_clip", (),
        "Smallest and largest score: combined rewards are clipped to them before anything is added; empty is off.",
        float),
    Setting("algorithm.overlong_buffer", 0,
        "Tokens before rollout.max_completion_length over which the score falls by up to algorithm.overlong_penalty "
        "(DAPO's soft punishment).", int, minimum=0),
    Setting("algorithm.overlong_penalty", 1.0,
        "What overlong_buffer subtracts from the score of a completion of rollout.max_completion_length.",
        float, above=0),
    Setting("algorithm.missing_eos_penalty", 0.0,
        "Subtracted from the score of a completion that did not end.", float, minimum=0),
    Setting("algorithm.dynamic_sampling", False,
        "Replace prompts whose completions all score alike by further ones, until none is left.", bool),
    Setting("algorithm.dynamic_sampling_metric", None,
        "What dynamic sampling compares in place of the rewards: a column that a reward function logs, or a value "
        "that it returns beside the score, such as `acc`; none is the rewards."),
    Setting("algorithm.max_sampling_rounds", 10,
        "Rounds of sampling in a step with dynamic_sampling; after them the run stops, or replay fills up.",
        int, minimum=1),
    Setting("algorithm.replay_groups", 0,
        "Groups kept from earlier steps, which replace those that teach nothing because their completions all score "
        "alike; 0 is off.",
        int, minimum=0),

    Setting("algorithm.pairs", 1,
        "online_preference: pairs of each prompt, the best completion with the worst, the second best with the second "
        "worst, and so on.", int, minimum=1),
    Setting("algorithm.loss_weights", (), "Weight of each loss of a preference mixture; empty is 1 for all.", float),
    Setting("algorithm.reference_free", False,
        "Preference losses use 0 for the reference's log-probs.", bool),
    Setting("algorithm.label_smoothing", 0.0,
        "sft: share of the target that is spread over the vocabulary; preference losses take it in brackets.",
        float, minimum=0, below=0.5),
    Setting("algorithm.neftune_alpha", 0.0,
        "Size of NEFTune's noise on the embeddings in updates; 0 is off.", float, minimum=0),
    Setting("algorithm.ld_alpha", None,
        "Weight of a pair's tokens beyond its shorter completion (LD-DPO); none is 1.", float, minimum=0, maximum=1),
    Setting("algorithm.use_weighting", False, "Weigh pairs by how likely the policy is to write them (WPO).", bool),

    Setting("teacher.path", None,
        "Teacher: hub id, folder (the hf/ of a run), URL or `embedded:<name>`, of any size and family, with the "
        "policy's tokenizer; or `server(url='http://localhost:8000/v1', model='m')`; or, for teacher.context, "
        "`self(rate=0.05, every=1)`, a copy of the starting policy that moves towards the policy by `rate` every "
        "`every` steps (rate=0 never moves; `self` alone is the current policy). none is no teacher."),
    Setting("teacher.revision", None,
        "Branch, tag or commit of teacher.path, a hub id; none is its main branch, as for teacher.others."),
    Setting("teacher.others", (),
        "Further teachers, each `VALUE=PATH`: each rates the rows whose column teacher.column has that value, and "
        "teacher.path the others."),
    Setting("teacher.column", "teacher", "Column of the data that names a teacher of teacher.others."),
    Setting("teacher.form", "advantage",
        "Signal of the teacher: the log-prob of each sampled token under it minus that under the policy, added to the "
        "advantage (advantage); the divergence of whole distributions at every token, added to the loss (divergence), "
        "which is the loss of sft; or that of a teacher with another tokenizer, where both tokenizers end a span of "
        "text (uld).", choices=("advantage", "divergence", "uld")),
    Setting("teacher.coef", 1.0, "Weight of the signal.", float, above=0),
    Setting("teacher.limit", None,
        "Largest signal at a token, in nats: the advantage's difference of log-probs is cut to -limit to limit, and a "
        "larger divergence counts as limit, without gradient; none is no limit.", float, above=0),
    Setting("teacher.position_gamma", 0.0,
        "Multiply the advantage's signal by 1 + position_gamma at a row's first token, falling to 1 with the share of "
        "the row's disagreement that precedes a token (IW-OPD); 0 is off.", float, minimum=0),
    Setting("teacher.gamma", 0.0,
        "Discount of the advantage's signal (MiniLLM): that of a token is the mean of those from it to the row's end, "
        "each weighing gamma times the one before; 0 is its own alone.", float, minimum=0, maximum=1),
    Setting("teacher.beta", 1.0,
        "Divergence: 0 is KL(teacher || policy), 1 is KL(policy || teacher), and between them the generalised "
        "Jensen-Shannon divergence.", float, minimum=0, maximum=1),
    Setting("teacher.top_k", 0,
        "Number of the teacher's likeliest tokens that the divergence is over, besides one entry for all others; it "
        "keeps two numbers for each in place of a vector per token. 0 is the whole vocabulary.", int, minimum=0),
    Setting("teacher.top_of", "teacher",
        "Model whose likeliest tokens teacher.top_k takes: teacher, or the policy as it is in the update, for which a "
        "vector per token is kept.", choices=("teacher", "policy")),
    Setting("teacher.tail", True,
        "Give the divergence of teacher.top_k tokens an entry for all others; false compares the two distributions "
        "given that it is one of these tokens.", bool),
    Setting("teacher.least_logp", None,
        "Smallest log-prob that each of the teacher.top_k tokens counts as, in both distributions, -10 for example; "
        "none is no bound.", float, below=0),
    Setting("teacher.temperature", None,
        "Temperature of both distributions in the divergence; none is that of the samples, rollout.temperature.",
        float, minimum=COLDEST),
    Setting("teacher.importance_max", None,
        "Divergence: weigh each token by its probability under the policy over that under the old policy, up to this, "
        "if the samples serve several updates; none is 1.", float, above=0),
    Setting("teacher.policy_temperature", None,
        "uld: temperature of the policy's distributions; none is the teacher's.",
        float, minimum=COLDEST),
    Setting("teacher.uld_align", "spans",
        "uld: compare distributions where tokens of both end at the same place of the text, each times the "
        "probability of the tokens before it since the last such place (spans), or at the first, second, ... token of "
        "both (positions), for tokenizers that cannot map tokens to bytes.", choices=("spans", "positions")),
    Setting("teacher.uld_skip_eos", False,
        "uld: leave out the tokens that end a completion, which are otherwise a span of their own.", bool),
    Setting("teacher.uld_hybrid", False,
        "uld: compare tokens that are in both vocabularies with each other, by the divergence of teacher.beta, and "
        "only the others by their sorted probabilities (GOLD).", bool),
    Setting("teacher.uld_matched_weight", None,
        "uld_hybrid: weight of the tokens in both vocabularies; none is their share of the teacher's vocabulary.",
        float, minimum=0),
    Setting("teacher.uld_unmatched_weight", None,
        "uld_hybrid: weight of the other tokens; none is 1 minus that share. Set both or neither.", float, minimum=0),
    Setting("teacher.nll_coef", 0.0,
        "uld: weight of the cross-entropy of the tokens themselves, where nothing else is in the loss.",
        float, minimum=0),
    Setting("teacher.context", "none",
        "Text that the teacher reads besides the prompt: the first completion of the group that is a success "
        "(success, SDPO), the text of teacher.privileged_column (privileged, SDFT), that text if there is no success "
        "(success_or_privileged), or both (success_and_privileged). Rows without any learn nothing from it.",
        choices=("none", "success", "privileged", "success_or_privileged", "success_and_privileged")),
    Setting("teacher.success_threshold", 1.0, "Smallest reward of a completion that is a success.", float),
    Setting("teacher.exclude_own", True,
        "Do not show a completion itself as a success.", bool),
    Setting("teacher.remove_thinking", False, "Leave `<think>...</think>` out of the completion that is shown.", bool),
    Setting("teacher.privileged_column", "privileged_context",
        "Column of the data, or logged by a reward function (log_extra), with the text of a row that the teacher is "
        "shown."),
    Setting("teacher.template", None,
        "What the teacher is asked in place of {prompt}, with {solution} and {privileged}; none is the text of TRL's "
        "SDPO (docs/distillation.md)."),
    Setting("teacher.solution_template", None, "Text around the completion that is shown, {solution}; none is TRL's."),
    Setting("teacher.privileged_template", None, "Text around the privileged text, {privileged}; none is TRL's."),
    Setting("teacher.max_prompt_length", None,
        "Longest prompt of the teacher in tokens: a row with a longer one learns nothing from it. none is the longest "
        "prompt of the policy, a completion and 64 tokens, or in uld twice the longest prompt; privileged texts need "
        "a number.", int, minimum=1),
    Setting("teacher.max_completion_length", None,
        "uld: longest completion in the teacher's tokens, after which nothing is learned from it; none is twice that "
        "of the policy.", int, minimum=1),
    Setting("teacher.on_policy", 1.0,
        "Share of the steps that learn from the policy's samples (GKD's lambda), drawn from seed; the others take the "
        "completions of the data, rows of prompt and completion.", float, above=0, maximum=1),
    Setting("teacher.dtype", "auto", "Type that the teacher is stored and computed in; auto is model.dtype.",
        choices=("auto", *DTYPES)),
    Setting("teacher.quantize", "none", "Store the matrices of the teacher's layers in 8 or 4 bits.",
        choices=QUANTIZED),
    Setting("teacher.offload", False,
        "Keep the teacher in the host's memory between passes.", bool),

    Setting("optimizer.name", "adamw",
        "Optimizer: adamw, adafactor, lion, sgd, ademamix (a second, slow momentum), adopt (any b2), muon for the "
        "matrices of the layers with adamw for the rest, schedule_free_adamw (an average in place of a decay), prodigy "
        "(finds its rate), came (adafactor with momentum) or galore_adamw (moments of matrices in few dimensions); or "
        "a function of the learning rate schedule that returns one of optax, `module:function` or "
        "`path/to/file.py:function`, with options in brackets, `optax:nadam(b1=0.95)`."),
    Setting("optimizer.learning_rate", 1e-6,
        "Peak learning rate. auto is 5e-5, ten times that for adapters, times a power of 2000 / width; for llama and "
        "qwen models, in sft and algorithms that sample.", float, minimum=0, maximum=100, words=("auto",)),
    Setting("optimizer.rate_factors", (),
        "Factors of the learning rates of some parameters, each PATTERN=FACTOR: a regular expression for a part of "
        "their names in transformers' class, `embed_tokens=0.1`, or of adapters in PEFT's, `lora_B=16` (LoRA+). The "
        "first that fits counts. A critic of its own has none."),
    Setting("optimizer.schedule", "constant",
        "Learning rate schedule after warm-up; cosine_with_restarts jumps back to the peak `cycles - 1` times, wsd is "
        "constant and then decays.", choices=SCHEDULES),
    Setting("optimizer.schedule_steps", 0,
        "Training steps, warm-up included, after which the schedule ends and the learning rate stays; 0 is "
        "total_steps.", int, minimum=0),
    Setting("optimizer.warmup_steps", 0,
        "Training steps over which the learning rate rises from warmup_init, at most all of them.", int, minimum=0),
    Setting("optimizer.warmup_init", 0.0, "Learning rate that warm-up starts at.", float, minimum=0, maximum=100),
    Setting("optimizer.warmup_ratio", 0.0, "Warm-up as a share of total_steps.", float, minimum=0, maximum=1),
    Setting("optimizer.min_lr_ratio", 0.0,
        "Lowest learning rate after warm-up as a fraction of the peak.", float, minimum=0, maximum=1),
    Setting("optimizer.cycles", 0.5,
        "Periods of the cosine, 0.5 decays once; decays of cosine_with_restarts, 1 or more.", float, above=0),
    Setting("optimizer.power", 1.0, "Power of polynomial; 1 is linear.", float, above=0),
    Setting("optimizer.stable_steps", 0,
        "Training steps of wsd between warm-up and decay; 0 is all up to the last decay_steps of the schedule.",
        int, minimum=0),
    Setting("optimizer.decay_steps", 0,
        "Training steps over which wsd decays: the last of the schedule, or those behind stable_steps.",
        int, minimum=0),
    Setting("optimizer.decay_shape", "linear",
        "Shape of the decay of wsd; constant stays at the peak up to the end of the schedule.",
        choices=("linear", "cosine", "exponential", "1-sqrt", "constant")),
    Setting("optimizer.b1", 0.9, "Decay of the first moment; the momentum of sgd.", float, minimum=0, below=1),
    Setting("optimizer.b2", 0.999, "Decay of the second moment.", float, minimum=0, below=1),
    Setting("optimizer.b3", 0.9999,
        "Decay of the slow first moment of ademamix; of the instability of came.", float, minimum=0, below=1),
    Setting("optimizer.mixing", 5.0, "Weight of the slow first moment of ademamix beside the other.", float, minimum=0),
    Setting("optimizer.mixing_steps", 0,
        "Training steps over which ademamix raises mixing from 0, and b3 from b1; 0 starts with both.", int, minimum=0),
    Setting("optimizer.d_coef", 1.0,
        "Factor of the distance that prodigy estimates, and so of its learning rate.", float, above=0),
    Setting("optimizer.galore_rank", 128,
        "Dimensions in which galore_adamw keeps moments, for matrices of layers that have more.", int, minimum=1),
    Setting("optimizer.galore_every", 200,
        "Training steps after which galore_adamw finds these dimensions again, by singular value decompositions.",
        int, minimum=1),
    Setting("optimizer.galore_scale", 0.25,
        "Factor of the updates of galore_adamw in these dimensions.", float, above=0),
    Setting("optimizer.lisa_layers", 0,
        "Layers that are updated at a time, besides what is in no layer (LISA); 0 is all.", int, minimum=0),
    Setting("optimizer.lisa_every", 20,
        "Training steps after which other layers are drawn, whose moments begin anew.", int, minimum=1),
    Setting("optimizer.eps", 1e-8,
        "Added to the root of the second moment; adopt divides by at least this.", float, above=0),
    Setting("optimizer.weight_decay", 0.0, "Decoupled weight decay.", float, minimum=0),
    Setting("optimizer.weight_decay_end", None,
        "Weight decay at the end of the run, to which it moves from weight_decay; none is constant.", float, minimum=0),
    Setting("optimizer.weight_decay_shape", "linear", "Shape of that change.", choices=("linear", "cosine")),
    Setting("optimizer.no_decay", ("bias", "scale", "shift"),
        "Last names in the paths of parameters without weight decay."),
    Setting("optimizer.moment_dtype", "float32",
        "Storage type of the optimizer's moments; float8 is 8 bits and a scale for each block of at most 256, and "
        "float32 for arrays of fewer than 4096. bfloat16 and float8 are rounded stochastically, as the second moment "
        "could not fall with b2 = 0.999 otherwise.", choices=("float32", "bfloat16", "float8")),
    Setting("optimizer.offload", False,
        "Keep the moments in host memory; they move to the device for each update.", bool),
    Setting("optimizer.max_grad_norm", 1.0,
        "Gradients are scaled down to this global norm; 0 is off.", float, minimum=0),
    Setting("optimizer.max_skipped_steps", 3,
        "Consecutive steps that non-finite gradients may skip; one more stops the run.", int, minimum=0),

    Setting("critic.path", None,
        "Model the critic starts from, as for model.path, with a new score head if it has none; none is model.path."),
    Setting("critic.shared", False,
        "Make the critic a second head of the policy, trained by the policy's optimizer: of the other keys of critic "
        "only coef and epsilon apply.", bool),
    Setting("critic.coef", 0.1, "Weight of the value loss of a shared critic.", float, above=0),
    Setting("critic.learning_rate", 1e-5, "Peak learning rate of the critic.", float, minimum=0, maximum=100),
    Setting("critic.schedule", "constant",
        "Learning rate schedule of the critic; its steps, cycles, power and decay are those of optimizer.",
        choices=SCHEDULES),
    Setting("critic.min_lr_ratio", None,
        "Lowest learning rate of the critic after warm-up as a fraction of its peak; none is optimizer.min_lr_ratio.",
        float, minimum=0, maximum=1),
    Setting("critic.lr_warmup_steps", 0,
        "Training steps over which the critic's learning rate rises from 0, at most all of them.", int, minimum=0),
    Setting("critic.b1", None, "Decay of the critic's first moment; none is optimizer.b1.", float, minimum=0, below=1),
    Setting("critic.b2", None, "Decay of the critic's second moment; none is optimizer.b2.", float, minimum=0, below=1),
    Setting("critic.weight_decay", None,
        "Decoupled weight decay of the critic; none is optimizer.weight_decay.", float, minimum=0),
    Setting("critic.num_iterations", 0,
        "Passes of the critic over each batch; 0 is algorithm.num_iterations.", int, minimum=0),
    Setting("critic.minibatches", 0,
        "Minibatches of a pass of the critic; 0 is batch.minibatches. With others, or with fewer passes than the "
        "policy's, the critic makes all its updates of a step before the policy's first.", int, minimum=0),
    Setting("critic.microbatch_rows", 0,
        "Rows of a micro-batch of the critic, if rows are not packed; 0 is batch.microbatch_rows.", int, minimum=0),
    Setting("critic.lora_rank", None,
        "Rank of the critic's own adapters; 0 trains the whole critic, none follows lora as the policy does.", int,
        minimum=0),
    Setting("critic.lora_alpha", None, "Adapters of the critic are scaled by it / rank; none is lora.alpha.", float,
        above=0),
    Setting("critic.lora_targets", (),
        "Linear layers of the critic with an adapter; empty is lora.targets."),
    Setting("critic.offload", None,
        "Keep the critic's parameters in the host's memory between uses; none is model.offload.", bool),
    Setting("critic.offload_optimizer", None,
        "Keep the critic's optimizer state in the host's memory; none is optimizer.offload.", bool),
    Setting("critic.max_grad_norm", 1.0,
        "The critic's gradients are scaled down to this norm; 0 is off.", float, minimum=0),
    Setting("critic.epsilon", 0.2,
        "Values are clipped to this distance from the old values; none is off.", float, above=0, none=True),
    Setting("critic.warmup_steps", 0,
        "First training steps, in which only the critic is trained: no update of the policy is computed or logged.",
        int, minimum=0),

    Setting("average.every", 0,
        "Steps between updates of a bias-corrected moving average of the policy (BEMA), 400 for example; 0 keeps none. "
        "The averaged model is written to output_dir/average.", int, minimum=0),
    Setting("average.start", 0,
        "Step whose policy the average begins with; its first update is average.every steps later.", int, minimum=0),
    Setting("average.ema_power", 0.5,
        "The policy enters the moving average with the weight (lag + multiplier x step) ^ -ema_power.",
        float, minimum=0),
    Setting("average.bias_power", 0.2,
        "The distance from the start is added with the weight (lag + multiplier x step) ^ -bias_power; a large power "
        "leaves the moving average uncorrected, 0 adds the whole distance.", float, minimum=0),
    Setting("average.lag", 10.0, "Age of the average before the first step, which keeps early weights small.",
        float, minimum=0),
    Setting("average.multiplier", 1.0, "Growth of the age with each step.", float, minimum=0),
    Setting("average.min_ema_multiplier", 0.0, "Smallest weight of the policy in the moving average.",
        float, minimum=0, maximum=1),
    Setting("average.evaluate", False, "Evaluate the averaged model in place of the trained one.", bool),
    Setting("average.offload", False,
        "Keep the average, which is three times the trained parameters, in the host's memory between updates.", bool),

    Setting("batch.prompts", 32, "Prompts per step; data rows (a pair is one) for offline algorithms.", int, minimum=1),
    Setting("batch.minibatches", 1, "Optimizer updates per pass over the batch.", int, minimum=1),
    Setting("batch.microbatch_rows", 0,
        "Rows of a micro-batch, one forward and backward pass; gradients add up exactly. 0 is a whole minibatch, on "
        "accelerators as many rows as fit in memory.", int, minimum=0),
    Setting("batch.packing", "auto",
        "Pack rows one after another: a group's prompt is computed once, padding never, and logits only for tokens in "
        "the loss. The update is the same. auto packs where that takes less arithmetic.",
        choices=("auto", "true", "false")),
    Setting("batch.pack_length", 0,
        "Length of packed rows, in tokens; 0 chooses the fastest. Attention costs more in longer rows.",
        int, minimum=0),
    Setting("batch.microbatch_tokens", 0,
        "Tokens of a micro-batch of packed rows, over all devices. 0 is the tokens of microbatch_rows rows of full "
        "length or, if that is 0 too, at least an eighth of the minibatch; on accelerators as many as fit in memory.",
        int, minimum=0),
    Setting("batch.logps_microbatch_rows", 0,
        "Rows of a pass without gradients (log-probs of the old policy, the reference and teachers, values), if rows "
        "are not packed; 0 is as many as a micro-batch of the update has.", int, minimum=0),
    Setting("batch.logps_microbatch_tokens", 0,
        "Tokens of such a pass of packed rows, over all devices, in whole micro-batches of the update; 0 is one of "
        "these, on accelerators as many as fit in memory.", int, minimum=0),
    Setting("batch.shuffle", False, "Shuffle rows before they are split into minibatches.", bool),

    Setting("mesh.data", -1,
        "Data-parallel size: replicas of the model; -1 is all remaining devices.", int, minimum=-1),
    Setting("mesh.fsdp", 1,
        "FSDP size: devices over which parameters, optimizer state and the batch are sharded.", int, minimum=-1),
    Setting("mesh.tensor", 1, "Tensor-parallel size: devices over which each matmul is sharded.", int, minimum=-1),
    Setting("mesh.context", 1,
        "Context-parallel size, whatever the model's heads: positions of training rows are sharded, and parameters as "
        "over fsdp.", int, minimum=-1),
    Setting("mesh.expert", 1,
        "Expert-parallel size: experts of a mixture of experts are sharded, and the batch; the other parameters as "
        "over fsdp.", int, minimum=-1),

    Setting("processes.coordinator", None,
        "Address of process 0, HOST:PORT, where PORT is free; or the variable JAXRL_COORDINATOR."),
    Setting("processes.count", None, "Number of processes; or the variable JAXRL_PROCESS_COUNT.", int, minimum=1),
    Setting("processes.index", None,
        "Number of this process, from 0; or the variable JAXRL_PROCESS_INDEX.", int, minimum=0),
    Setting("processes.rendezvous_seconds", 300,
        "Seconds within which all processes must have started.", int, minimum=1, maximum=LONGEST_SECONDS),
    Setting("processes.heartbeat_seconds", 100,
        "Seconds without a heartbeat after which a process counts as lost and the run ends.", int, minimum=1,
        maximum=LONGEST_SECONDS),

    Setting("checkpoint.every", 50, "Steps between checkpoints; 0 saves only after the last step.", int, minimum=0),
    Setting("checkpoint.keep", 2, "Number of newest checkpoints to keep.", int, minimum=1),
    Setting("checkpoint.keep_every", 0, "Keep older checkpoints whose step is a multiple of this; 0 keeps none.",
        int, minimum=0),
    Setting("checkpoint.keep_hours", 0.0, "Keep an older checkpoint for each period of this many hours; 0 keeps none.",
        float, minimum=0, maximum=1e6),
    Setting("checkpoint.contents", ("state",),
        "Contents of a checkpoint: state, all that a run needs to resume, in checkpoints/; hf, the trained model as a "
        "Hugging Face folder, in hf_steps/, with the critic of ppo in its folder critic. No run resumes from hf "
        "alone; a preemption saves the state in any case.",
        choices=("state", "hf")),
    Setting("checkpoint.best", None,
        "Keep the best checkpoint by this metric, eval/reward for example, among the saved steps that have the metric.",
        ),
    Setting("checkpoint.best_mode", "auto",
        "Best is the largest (max) or the smallest (min); auto is min for metrics whose names end in loss, nll, "
        "perplexity or divergence.", choices=("auto", "max", "min")),
    Setting("checkpoint.folder", None,
        "Folder for checkpoints, which may be in an object store (gs://, s3://); none is output_dir/checkpoints."),
    Setting("checkpoint.resume", "auto",
        "`auto` resumes from the newest intact checkpoint of the run if there is one, `never` starts anew and deletes "
        "them, and the models in hf_steps/; anything else is the path of a checkpoint to resume from."),
    Setting("checkpoint.load", ("model", "optimizer", "extra"),
        "Parts of a checkpoint that a start takes. `model,extra` begins a new optimizer, which may be another one, "
        "and resumes the rest: step, data position, adaptive coefficients, rollouts. `model` takes only the weights, "
        "at step 0, of the checkpoint that checkpoint.resume names. It is done once: the same command again resumes "
        "the run's own later checkpoints in full.", choices=("model", "optimizer", "extra")),
    Setting("checkpoint.accept_changes", (),
        "Settings that a resumed run may change although they define the run, `algorithm.loss,rewards.functions`. "
        "Those that change the arrays of its checkpoints (`lora.rank`) or its position in the data (`seed`) stay "
        "refused. See docs/reliability.md."),

    Setting("eval.every", 25,
        "Steps between evaluations; 0 evaluates only before and after training, -1 never.", int, minimum=-1),
    Setting("eval.measure", "auto",
        "Measure the loss on held-out rows, samples for held-out prompts, or both. auto is samples for online "
        "algorithms, and for offline ones the loss if the rows have completions.",
        choices=("auto", "loss", "samples", "both")),
    Setting("eval.at_start", True, "Evaluate before the first step.", bool),
    Setting("eval.start", 0,
        "First training step after which there may be an evaluation; above 0 there is none before training.",
        int, minimum=0),
    Setting("eval.at_end", True,
        "Evaluate after the last step, even if eval.every does not divide it.", bool),
    Setting("eval.sets", (),
        "Several named sets in place of data.eval_path: each `name=path` or `name=path(split='test', samples=16)`, "
        "with the options of data.sources and its own prompts and samples; in a config file also a dictionary, with "
        "the name as `set`. Metrics are `eval/<name>/...`; entries of one name form one set.", dict),
    Setting("eval.fraction", 0.0,
        "Share of the training rows that is held out and evaluated on, drawn from seed; 0 holds none out.",
        float, minimum=0, below=1),
    Setting("eval.prompts", 128, "Prompts, or rows, of each set in an evaluation.", int, minimum=1),
    Setting("eval.samples", 4, "Completions per prompt.", int, minimum=1),
    sampling_option("eval.temperature", None,
        "Temperature of samples in evaluations, 0 is greedy; none is rollout.temperature."),
    sampling_option("eval.top_p", None, "top_p of samples in evaluations; none is rollout.top_p."),
    sampling_option("eval.top_k", None, "top_k of samples in evaluations, 0 is off; none is rollout.top_k."),
    sampling_option("eval.min_p", None,
        "min_p of samples in evaluations, 0 is off; none is rollout.min_p."),
    sampling_option("eval.repetition_penalty", None,
        "repetition_penalty in evaluations, 1 is off; none is rollout.repetition_penalty."),
    sampling_option("eval.frequency_penalty", None,
        "frequency_penalty in evaluations, 0 is off; none is rollout.frequency_penalty."),
    sampling_option("eval.presence_penalty", None,
        "presence_penalty in evaluations, 0 is off; none is rollout.presence_penalty."),
    Setting("eval.greedy", True, "Also measure the greedy completion of each prompt.", bool),
    Setting("eval.correct_at", 1.0, "A completion is correct when its first reward is at least this.", float),
    Setting("eval.answer", None,
        "Answer of a completion for eval/maj@k: boxed, number (the last), hashes (after ####), text (all of it), "
        "`module:function` or `path/to/file.py:function`. none takes the entry `pred` of the first reward function's "
        "results, and omits maj@k without one."),
    Setting("eval.extremes", False,
        "Also measure eval/best@k and eval/worst@k, the largest and smallest reward of k completions.", bool),
    Setting("eval.interval", None,
        "Level of bootstrap intervals over prompts, 0.95 for example, logged as eval/accuracy_low, eval/accuracy_high "
        "and so on; none is off.", float, above=0, below=1),
    Setting("eval.estimate", "unbiased",
        "Estimator of pass@k, maj@k, best@k and worst@k: over distinct samples of a prompt (unbiased), or verl's 1000 "
        "draws with replacement, and its standard deviations of samples beside the means.",
        choices=("unbiased", "verl")),

    Setting("export.best", False,
        "Write the model of the best checkpoint (checkpoint.best) to hf/, in place of the last step's.", bool),
    Setting("export.push_to_hub", None,
        "Repository of the Hugging Face hub, OWNER/NAME or NAME of the token's account, to which the trained model "
        "(hf/, adapters merged) is pushed at the end, with the token in the variable HF_TOKEN."),
    Setting("export.copy_to", None,
        "URL of a folder (gs://, s3://, hdfs:// and others of fsspec) to which hf/ is copied at the end."),
    Setting("export.strategy", "end",
        "When to push: at the end, or also at each checkpoint (every_save), which needs hf in checkpoint.contents and "
        "export.overwrite, as each push replaces the one before. A push that fails before the end is a warning.",
        choices=("end", "every_save")),
    Setting("export.title", None, "Title of the model card; none is the repository's name, or the run's."),
    Setting("export.tags", (), "Tags of the model card besides those of the library and the algorithm."),
    Setting("export.private", False, "Create that repository as a private one.", bool),
    Setting("export.overwrite", False, "Replace a model that the repository, or the folder of copy_to, already holds.",
        bool),

    Setting("logging.backends", ("console", "jsonl"), "Loggers of metrics. See docs/logging.md.",
        choices=("console", "jsonl", "tensorboard", "wandb", "mlflow", "swanlab", "trackio")),
    Setting("logging.project", "jaxrl_llm", "Project (experiment) of the run in wandb, mlflow, swanlab and trackio."),
    Setting("logging.run_name", None, "Name of the run there; none is the name of the folder output_dir."),
    Setting("logging.table_rows", 64,
        "Completions in a table of such a tracker, evenly spaced over the prompts of the step or the evaluation.",
        int, minimum=1),
    Setting("logging.names", "trl", "Naming scheme of the metrics in metrics.jsonl.", choices=("trl", "verl")),
    Setting("logging.completions_every", 50,
        "Steps between samples of completions, on the console and in trackers, with one at the last step; trackers "
        "also get those of each evaluation. 0 shows none; output_dir/completions has them all.",
        int, minimum=0),
    Setting("logging.completions_shown", 3, "Completions in each sample on the console.", int, minimum=1),
    Setting("logging.peak_tflops", None,
        "Peak of a device in TFLOP/s, of which the metric mfu is a share; none is its data sheet's number for dense "
        "bfloat16, if it is known.", float, above=0),
    Setting("logging.profile_steps", None,
        "Training steps to profile, `4` or `3-5`: a JAX trace and a table of seconds by phase in output_dir/profile."),
    Setting("logging.profile_process", 0,
        "Number of the process whose steps are profiled, that of machine/slowest_process for instance.",
        int, minimum=0),

    Setting("watch.hang_seconds", 1800.0,
        "Longest phase of a step; a longer one writes all Python stacks to stacks.txt and ends the run. 0 is no limit.",
        float, minimum=0, maximum=LONGEST_SECONDS),
    Setting("watch.kl", 1.0,
        "Log warning/kl_explosion above this KL per token, to the reference or, without one, to the sampling policy; "
        "none is off.", float, above=0, none=True),
    Setting("watch.entropy", 0.01,
        "Log warning/entropy_collapse below this entropy per token; none is off.", float, above=0, none=True),
    Setting("watch.mismatch", 0.1,
        "Log warning/sampler_mismatch when the log-probs of sampled tokens differ between sampler and trainer by more "
        "than this on average; none is off.", float, above=0, none=True),
)
# fmt: on

BY_NAME = {key.name: key for key in KEYS}

# What a run is: the model, the data and their order, the objective. A resumed run keeps these settings unless
# checkpoint.accept_changes names them; what else has changed is told, and kept in config_history/.
IDENTITY = (
    "seed", "model.path", "model.random_init", "model.freeze_router", "model.trainable", "model.frozen",
    "model.vision", "model.quantize", "model.quantize_experts", "model.qat",
    "lora.rank", "lora.alpha", "lora.rslora", "lora.dora", "lora.init", "lora.targets", "lora.layers_to_transform",
    "lora.exclude_modules", "lora.rank_pattern", "lora.alpha_pattern", "lora.modules_to_save", "lora.bias", "lora.path",
    "lora.reference", "data.path", "data.name", "data.sources",
    "data.format", "data.streaming", "data.shuffle", "data.shuffle_buffer", "data.split", "data.prompt_key",
    "data.completion_key", "data.label_key", "data.image_key", "data.image_processor", "data.system_prompt",
    "data.chat_template",
    "eval.fraction", "model.tokenizer", "model.eos_token", "model.revision", "model.overrides",
    "data.chat_template_kwargs",
    "data.deduplicate", "data.overlong", "data.max_length", "data.loss_on", "data.step_separator", "data.packing",
    "data.packing_strategy",
    "rollout.group_size", "rollout.max_prompt_length",
    "rewards.functions", "rewards.weights", "environment.name", "environment.tools", "environment.rollout_func",
    "environment.agent", "environment.agents", "environment.options", "algorithm.name", "algorithm.advantage",
    "algorithm.reference_samples", "algorithm.drop_unsolved",
    "algorithm.loss", "algorithm.importance_sampling_level", "algorithm.aggregation", "algorithm.loss_weights",
    "algorithm.reference_free", "critic.path", "critic.shared", "critic.lora_rank", "critic.lora_alpha",
    "critic.lora_targets", "optimizer.name", "optimizer.moment_dtype", "optimizer.galore_rank",
    "optimizer.lisa_layers", "teacher.path", "teacher.revision", "teacher.others", "teacher.column", "teacher.context",
)  # fmt: skip
NEW = "{new}"  # in the name of output_dir
# Settings of a single start, of no meaning for the run.
OF_A_START = ("output_dir", "compilation_cache", "checkpoint.resume", "checkpoint.load", "checkpoint.accept_changes")

# Keys of earlier versions, and the key that replaces each one with the same meaning.
RENAMED = {
    "rollout.draft_tokens": "rollout.speculative_tokens",
    "processes.meet_seconds": "processes.rendezvous_seconds",
}
_DIVERGING = ("dpo", "sigmoid", "ipo", "hinge", "robust", "exo_pair", "sigmoid_norm", "discopop")
# Keys of earlier versions that are options of a loss now, written in its brackets: the former default, which is that of
# the option too, the option, and the losses that take it.
LOSS_OPTIONS: dict[str, tuple[Any, str, tuple[str, ...]]] = {
    "algorithm.delta": (None, "delta", ("ppo_clip", "gspo", "luspo")),
    "algorithm.dual_clip": (None, "dual_clip", ("ppo_clip",)),
    "algorithm.f_divergence": ("reverse_kl", "divergence", _DIVERGING),
    "algorithm.f_alpha": (0.5, "alpha", _DIVERGING),
    "algorithm.ipo_normalize": (True, "normalize", ("ipo",)),
    "algorithm.discopop_tau": (0.05, "temperature", ("discopop",)),
    "algorithm.bco_running_mean": (False, "running_mean", ("bco_pair",)),
    "algorithm.simpo_gamma": (0.5, "gamma", ("simpo", "alphapo")),
    "algorithm.alphapo_alpha": (0.25, "alpha", ("alphapo",)),
    "algorithm.cpo_alpha": (1.0, "nll_weight", ("cpo", "simpo")),
    "algorithm.orpo_nll_on_prompt": (True, "nll_on_prompt", ("orpo",)),
    "algorithm.desirable_weight": (1.0, "desirable_weight", ("kto", "apo_zero_unpaired")),
    "algorithm.undesirable_weight": (1.0, "undesirable_weight", ("kto", "apo_zero_unpaired")),
    "algorithm.center_rewards_coefficient": (0.0, "center", ("bradley_terry",)),
}
FORMER = (*RENAMED, *LOSS_OPTIONS)

# What other libraries call a key, where no similarity of letters finds it.
SYNONYMS = {
    "max_steps": "total_steps", "total_training_steps": "total_steps", "num_train_epochs": "num_epochs",
    "epochs": "num_epochs", "total_epochs": "num_epochs", "per_device_train_batch_size": "batch.prompts",
    "train_batch_size": "batch.prompts", "batch_size": "batch.prompts", "micro_batch_size": "batch.microbatch_rows",
    "log_prob_micro_batch_size_per_gpu": "batch.logps_microbatch_rows",
    "log_prob_micro_batch_size": "batch.logps_microbatch_rows",
    "log_prob_max_token_len_per_gpu": "batch.logps_microbatch_tokens",
    "gpu_memory_utilization": "rollout.memory_fraction", "vllm_gpu_memory_utilization": "rollout.memory_fraction",
    "gradient_accumulation_steps": "batch.microbatch_rows", "num_generations": "rollout.group_size",
    "model_name_or_path": "model.path", "model_name": "model.path", "base_model": "model.path", "model": "model.path",
    "run": "model.path", "checkpoint_path": "model.path", "ckpt": "model.path",
    "dataset_name": "data.path", "dataset": "data.path", "train_files": "data.path", "val_files": "data.eval_path",
    "max_seq_length": "data.max_length", "sequence_len": "data.max_length", "reward_funcs": "rewards.functions",
    "reward_weights": "rewards.weights", "lr": "optimizer.learning_rate", "lr_scheduler_type": "optimizer.schedule",
    "optim": "optimizer.name", "gradient_checkpointing": "model.remat", "bf16": "model.dtype", "fp16": "model.dtype",
    "load_in_4bit": "model.quantize", "load_in_8bit": "model.quantize", "attn_implementation": "model.attention",
    "param_offload": "model.offload", "cpu_offload": "model.offload", "offload_params": "model.offload",
    "use_peft": "lora.rank", "lora_r": "lora.rank", "lora_target_modules": "lora.targets",
    "lora_modules_to_save": "lora.modules_to_save", "unfrozen_parameters": "model.trainable",
    "freeze_layers": "model.frozen", "dataset_exact_deduplication": "data.deduplicate", "report_to":
    "logging.backends", "save_steps": "checkpoint.every", "eval_steps": "eval.every", "save_total_limit":
    "checkpoint.keep", "resume_from_checkpoint": "checkpoint.resume", "processing_class": "model.tokenizer",
    "val_set_size": "eval.fraction", "test_size": "eval.fraction", "hub_model_id": "export.push_to_hub",
    "push_to_hub": "export.push_to_hub", "chat_template_path": "data.chat_template",
    "train_on_last_step_only": "data.loss_on", "train_on_inputs": "data.loss_on", "assistant_only_loss": "data.loss_on",
    "completion_only_loss": "data.loss_on", "truncation": "data.overlong", "truncation_mode": "data.overlong",
    "loss_type": "algorithm.loss", "policy_loss": "algorithm.loss", "loss_agg_mode": "algorithm.aggregation",
    "adv_estimator": "algorithm.advantage", "norm_adv_by_std_in_grpo": "algorithm.scale_rewards",
    "epsilon": "algorithm.epsilon_low", "clip_ratio": "algorithm.epsilon_low", "cliprange": "algorithm.epsilon_low",
    "clip_range": "algorithm.epsilon_low", "eps_clip": "algorithm.epsilon_low", "cliprange_value": "critic.epsilon",
    "kl_coef": "algorithm.beta", "kl_loss_coef": "algorithm.beta", "init_kl_coef": "algorithm.beta",
    "use_kl_loss": "algorithm.beta", "kl_beta": "algorithm.beta", "vf_coef": "critic.coef",
    "ppo_epochs": "algorithm.num_iterations", "num_ppo_epochs": "algorithm.num_iterations",
    "mini_batch_size": "batch.minibatches", "ppo_mini_batch_size": "batch.minibatches",
    "num_mini_batches": "batch.minibatches", "sync_ref_model": "algorithm.ref_sync_steps",
    "n": "rollout.group_size", "n_samples_per_prompt": "rollout.group_size", "max_new_tokens":
    "rollout.max_completion_length", "max_tokens": "rollout.max_completion_length", "max_response_length":
    "rollout.max_completion_length", "stop_sequences": "rollout.stop", "torch_dtype":
    "model.param_dtype", "tensor_parallel_size": "mesh.tensor", "fsdp_size": "mesh.fsdp", "adam_beta1": "optimizer.b1",
    "adam_beta2": "optimizer.b2", "adam_epsilon": "optimizer.eps", "grad_clip": "optimizer.max_grad_norm",
    "gradient_clipping": "optimizer.max_grad_norm", "save_freq": "checkpoint.every", "save_strategy":
    "checkpoint.every", "save_dir": "output_dir", "eval_strategy": "eval.every", "test_freq": "eval.every",
    "val_before_train": "eval.at_start", "load_best_model_at_end": "export.best", "early_stopping_patience":
    "callbacks", "experiment_name": "logging.run_name", "eval_dataset": "data.eval_path",
}  # fmt: skip


def nearest(name: str, known: Iterable[str] = ()) -> str:
    """The key that a name most likely means: what another library calls so, else the most similar of `known`.

    `known` are all keys unless given. `critic.lr` is the learning rate of the critic, not that of the optimizer.
    """
    known = tuple(known) or tuple(BY_NAME)
    section, _, leaf = name.rpartition(".")
    meant = SYNONYMS.get(leaf, "")
    beside = f"{section}.{meant.rpartition('.')[2]}"
    return next((key for key in (beside, meant) if key in known), None) or closest(name, known)


def unknown_key(name: str) -> str:
    """The message for a name that is no key: what replaces it if it was one, else the closest key."""
    if name in RENAMED:
        return f"{name} is now {RENAMED[name]}"
    if name in LOSS_OPTIONS:
        _, option, losses = LOSS_OPTIONS[name]
        return f"there is no key {name} any more: write algorithm.loss='{losses[0]}({option}=...)'"
    return f"there is no key {name}; the closest is {nearest(name)}"
