"""Every setting of a run, once: its name, default, type, range and meaning.

`KEYS` is the single source. From it come `config.default()` (the tree a config file starts from), the checks of
`config.validate()`, the command line with its `--help` (command_line.py), and docs/configuration.md.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl_llm.config.resolve import ConfigError


@dataclass(frozen=True)
class Key:
    """One setting. A tuple default makes it a list of `kind`; a None default makes it optional."""

    name: str
    default: Any
    doc: str
    kind: type = str
    choices: tuple[str, ...] | None = None
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None  # exclusive
    below: float | None = None  # exclusive

    @property
    def many(self) -> bool:
        """True when the value is a list."""
        return isinstance(self.default, tuple)

    @property
    def allowed(self) -> str:
        """The values the key takes, in words."""
        if self.choices:
            text = "one of " + ", ".join(self.choices)
        else:
            text = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}.get(
                self.kind, "a path or a dictionary"
            )
        bounds = ((">", self.above), (">=", self.minimum), ("<", self.below), ("<=", self.maximum))
        text += " and".join(f" {sign} {bound:g}" for sign, bound in bounds if bound is not None)
        if self.many:
            text = f"a list, each {text}"
        return f"{text}, or none" if self.default is None else text

    def show(self, value: Any) -> str:
        """The value as the command line takes it."""
        if isinstance(value, tuple | list):
            return ",".join(str(item) for item in value)
        return str(value).lower() if value is None or isinstance(value, bool) else str(value)

    def accepts(self, value: Any) -> bool:
        """True when the value has the key's type and lies in its range."""
        if self.many:
            return isinstance(value, tuple | list) and all(self._accepts_one(item) for item in value)
        return (value is None and self.default is None) or self._accepts_one(value)

    def _accepts_one(self, value: Any) -> bool:
        kinds = {float: (int, float), dict: (str, Mapping)}.get(self.kind, self.kind)
        if not isinstance(value, kinds) or (isinstance(value, bool) and self.kind is not bool):
            return False
        if self.choices and value not in self.choices:
            return False
        if self.kind not in (int, float):
            return True
        return (
            math.isfinite(value)
            and (self.minimum is None or value >= self.minimum)
            and (self.maximum is None or value <= self.maximum)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def parse(self, text: str) -> Any:
        """The value a command line text stands for; raises ConfigError when the key does not take it."""
        if self.many:
            value = tuple(self._parse_one(part) for part in _outer_parts(text)) if text else ()
        else:
            value = None if self.default is None and text.lower() == "none" else self._parse_one(text)
        self.check(value)
        return value

    def _parse_one(self, text: str) -> Any:
        if self.kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
        if self.kind is dict:
            return text
        try:
            return self.kind(text)
        except ValueError:
            return text

    def check(self, value: Any) -> None:
        """Raises ConfigError, naming the key, the value and what is allowed, unless the key accepts the value."""
        if not self.accepts(value):
            raise ConfigError(f"{self.name} is {value!r}, but it takes {self.allowed}")


def _outer_parts(text: str) -> list[str]:
    """The text cut at commas, save those inside brackets or quotes: `a,b(c=1,d=2)` has two parts."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'" and depth:
            quote = letter
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        elif letter == "," and depth <= 0:
            parts.append("")
            continue
        parts[-1] += letter
    return parts


ALGORITHMS = ("grpo", "ppo", "sft", "preference", "reward_model")
OFFLINE = ("sft", "preference", "reward_model")
LABELLED = ("kto", "apo_zero_unpaired")  # preference losses of labelled completions; the others are of pairs
# Settings that are no more, and what is written in their place.
RENAMED = {
    "algorithm.delta": "algorithm.loss='ppo_clip(delta=...)'",
    "algorithm.dual_clip": "algorithm.loss='ppo_clip(dual_clip=...)'",
    "algorithm.f_divergence": "algorithm.loss='dpo(divergence=...)'",
    "algorithm.f_alpha": "algorithm.loss='dpo(divergence='alpha_divergence', alpha=...)'",
    "algorithm.ipo_normalize": "algorithm.loss='ipo(normalize=...)'",
    "algorithm.discopop_tau": "algorithm.loss='discopop(temperature=...)'",
    "algorithm.bco_running_mean": "algorithm.loss='bco_pair(running_mean=...)'",
    "algorithm.simpo_gamma": "algorithm.loss='simpo(gamma=...)'",
    "algorithm.alphapo_alpha": "algorithm.loss='alphapo(alpha=...)'",
    "algorithm.cpo_alpha": "algorithm.loss='cpo(nll_weight=...)'",
    "algorithm.orpo_nll_on_prompt": "algorithm.loss='orpo(nll_on_prompt=...)'",
    "algorithm.desirable_weight": "algorithm.loss='kto(desirable_weight=...)'",
    "algorithm.undesirable_weight": "algorithm.loss='kto(undesirable_weight=...)'",
    "algorithm.center_rewards_coefficient": "algorithm.loss='bradley_terry(center=...)'",
}
GROUP_ADVANTAGES = ("group", "gdpo", "rloo", "passk", "opo", "reinforce_plus_plus_baseline")
DTYPES = ("float32", "bfloat16", "float16")

SECTIONS = {
    "": "The run.",
    "model": "The network that is trained.",
    "lora": "Adapters of low rank that are trained in place of the whole model; `model.param_dtype` is then of the "
    "frozen rest.",
    "data": "Where prompts and rows come from.",
    "rollout": "Sampling completions from the policy.",
    "environment": "What answers the policy between its turns. See docs/environments.md.",
    "rewards": "How completions are scored.",
    "algorithm": "What the objective computes. A config file per algorithm sets these.",
    "critic": "PPO's value network and its own optimizer; what is not here is as in `optimizer`.",
    "optimizer": "How gradients become parameter updates.",
    "batch": "How many rows a step uses, and how they are split.",
    "mesh": "How devices are arranged. The five sizes multiply to the number of devices. See docs/mesh.md.",
    "processes": "How the processes of a run on several machines find each other; see docs/scaling.md. Slurm, Open "
    "MPI, Kubernetes and Cloud TPU say it themselves. Where a process runs is no part of a run's record.",
    "checkpoint": "What is saved, what of it is kept, and how a run goes on. See docs/reliability.md.",
    "eval": "Measuring the policy on held-out prompts. See docs/evaluation.md.",
    "export": "Where the trained model goes besides output_dir. See docs/sharing.md.",
    "logging": "Where metrics and samples are written.",
    "watch": "What a run watches itself for. See docs/reliability.md.",
}

# fmt: off
KEYS = (
    Key("output_dir", "runs/default", "Folder for checkpoints, metrics and the configuration of the run."),
    Key("seed", 0, "Root of every random number of the run.", int, minimum=0),
    Key("total_steps", 100, "Number of training steps.", int, minimum=0),
    Key("compilation_cache", "auto",
        "Folder where compiled programs are kept for the next start of a command; auto is $JAX_COMPILATION_CACHE_DIR "
        "or ~/.cache/jaxrl_llm/compiled, none is off."),

    Key("callbacks", (),
        "What looks at the run as it goes, and may end it: `early_stopping(metric='eval/accuracy', patience=3)`, "
        "`module:Class` or `path/to/file.py:Class`, each with options in brackets. See docs/callbacks.md."),

    Key("model.path", "embedded:sort",
        "Hugging Face hub id, local folder, or `embedded:<name>` for a model in the package."),
    Key("model.dtype", "auto",
        "Type the network computes in; auto is float32 on CPU and bfloat16 on accelerators.",
        choices=("auto", *DTYPES)),
    Key("model.param_dtype", "float32", "Type the trained parameters are stored in.", choices=DTYPES),
    Key("model.allow_pickle", False,
        "Read pytorch_model.bin where a model has no safetensors. Only tensors are: nothing in the file is run.", bool),
    Key("model.trust_remote_code", False, "Run the Python code that a tokenizer's folder may bring.", bool),
    Key("model.random_init", False, "Start from random parameters (drawn from seed) instead of the model's.", bool),
    Key("model.remat", "none",
        "What the backward pass computes again to save memory: nothing; each layer, from its input (block), which may "
        "wait in the host's memory (offload); or each layer but its matrix products (dots).",
        choices=("none", "block", "dots", "offload")),
    Key("model.scan_layers", "auto",
        "Scan one compiled layer, or compile each (slower to start, faster on CPU); auto scans except on CPU.",
        choices=("auto", "true", "false")),
    Key("model.attention", "xla",
        "What computes attention over given rows: xla; or kernels that keep no scores in memory, cudnn on NVIDIA GPUs "
        "(in 16 bits) and splash on TPUs. Sampling decodes with xla.", choices=("xla", "cudnn", "splash")),
    Key("model.fp32_head", False, "Form the logits in float32, whatever the type of the network.", bool),
    Key("model.router_aux_loss_coef", None,
        "Weight of the loss that evens out the use of experts, in a mixture of experts; none is config.json's own "
        "(router_aux_loss_coef), 0 leaves it out.", float, minimum=0),
    Key("model.freeze_router", False, "Leave the routers of a mixture of experts as they are.", bool),
    Key("model.quantize", "none",
        "Store the matrices of the layers in 8 or 4 bits (QLoRA); what is trained are adapters beside them.",
        choices=("none", "int8", "fp8", "int4", "nf4")),

    Key("lora.rank", 0, "Rank of the adapters; 0 is none, and the whole model is trained.", int, minimum=0),
    Key("lora.alpha", 16.0, "Adapters are scaled by alpha / rank.", float, above=0),
    Key("lora.rslora", False, "Scale by alpha / sqrt(rank) instead.", bool),
    Key("lora.dropout", 0.0, "Share of an adapter's inputs that is dropped while training.",
        float, minimum=0, below=1),
    Key("lora.targets", ("all-linear",),
        "Linear maps that have an adapter: all-linear (not heads or experts), or some of q_proj, k_proj, v_proj, "
        "o_proj, gate_proj, up_proj, down_proj."),
    Key("lora.path", None, "PEFT folder of an adapter to train on; it sets rank, alpha, rslora and targets."),
    Key("lora.reference", "base",
        "Reference policy: the model without adapters (base), with the adapters of the start (start), or a merged copy "
        "of the whole, which ref_mixup_alpha below 1 needs (copy).", choices=("base", "start", "copy")),

    Key("data.path", "task:sort", "Hub id, local folder or file, or `task:<name>` for a built-in task."),
    Key("data.name", None, "Configuration name of a hub data set."),
    Key("data.sources", (),
        "Several sources in place of data.path, one after the other or mixed by weight: each a path, "
        "`path(split='train', format='chatml.intel', weight=2)`, or in a config file a dictionary with path, name, "
        "split, eval_split, format (or type), weight, ds_type, data_files, and options of the format.", dict),
    Key("data.format", "auto",
        "What the rows look like: a name of docs/data.md such as `chatml.intel`, `module:function` or "
        "`path/to/file.py:function`; options in brackets, `harmony(field='turns')`. auto knows TRL's types, verl's "
        "rows, Harmony's threads and ShareGPT's conversations."),
    Key("data.streaming", False, "Read rows as they are needed, for data that does not fit in memory.", bool),
    Key("data.shuffle_buffer", 4096, "Rows that are shuffled together when streaming.", int, minimum=1),
    Key("data.workers", 0, "Threads that tokenise before the first step; 0 is one for each core.", int, minimum=0),
    Key("data.cache", "auto",
        "Folder where token rows are kept for the next run; auto is $JAXRL_LLM_CACHE or ~/.cache/jaxrl_llm, for files "
        "and hub data of 10000 rows or more; `none` keeps nothing."),
    Key("data.split", "train", "Split that is trained on."),
    Key("data.eval_path", None, "Data set to evaluate on; none is the same as data.path."),
    Key("data.eval_split", "test", "Split that is evaluated on."),
    Key("data.prompt_key", "prompt", "Column that holds the prompt."),
    Key("data.chat_template_kwargs", "",
        "Options of the chat template, `enable_thinking=False`; a row's own column of that name comes first."),
    Key("data.overlong", "error",
        "What happens to a prompt longer than rollout.max_prompt_length, or to a row of an offline algorithm longer "
        "than data.max_length: stop, drop it, or cut its start, its end or its middle.",
        choices=("error", "filter", "truncate_left", "truncate_right", "truncate_middle")),
    Key("data.shuffle", True, "Reshuffle the rows every epoch.", bool),
    Key("data.max_length", 1024,
        "Tokens in a row of an offline algorithm, prompt and completion together.", int, minimum=1),
    Key("data.loss_on", "completion",
        "Tokens that supervised fine-tuning learns: the completion (in conversations every turn of the assistant), the "
        "last turn of the assistant only, or the prompt too.", choices=("completion", "last_turn", "all")),
    Key("data.packing", False,
        "Put several short rows of supervised fine-tuning in one; they do not see each other.", bool),
    Key("data.precompute_reference", False,
        "Compute the reference log-probs of a preference data set once, before training, and keep no reference.", bool),

    Key("rollout.group_size", 8, "Completions per prompt.", int, minimum=1),
    Key("rollout.max_prompt_length", 512, "Longest prompt, in tokens.", int, minimum=1),
    Key("rollout.max_completion_length", 256, "Longest completion, in tokens, end of text included.", int, minimum=1),
    Key("rollout.temperature", 1.0, "Sampling temperature; the trainer's log-probs use the same.", float, above=0),
    Key("rollout.top_p", 1.0,
        "Sample from the smallest set of tokens with this probability; 1 is off.", float, above=0, maximum=1),
    Key("rollout.top_k", 0, "Sample from this many most likely tokens; 0 is off.", int, minimum=0),
    Key("rollout.min_p", 0.0,
        "Drop tokens less likely than this fraction of the most likely one; 0 is off.", float, minimum=0, maximum=1),
    Key("rollout.chunk", 32,
        "Decoding steps on the device between two looks by the host, at most: it pauses when slots can be used better.",
        int, minimum=1),
    Key("rollout.slots", 0,
        "Completions that decode at once, over all devices; the others wait. 0 is all of a step's.", int, minimum=0),
    Key("rollout.shrink", 0.5,
        "Once completions that still decode fit into this share of the slots, and none waits, they go on in so few. "
        "0.85 leaves fewer slots idle than 0.5, and compiles more programs.", float, above=0, below=1),
    Key("rollout.draft_tokens", 0,
        "Tokens of each completion that are guessed, from what it and its prompt say already, and checked in the step "
        "that computes the next one. Samples stay the same; it pays where text repeats itself. 0 guesses none.",
        int, minimum=0),
    Key("rollout.weights_dtype", "auto",
        "Type of the matrices while sampling; auto is that of the computation. int8 and fp8 keep those of the layers "
        "(not of experts) in 8 bits, which halves what each token reads of them against 16. Training with fewer bits "
        "than model.dtype needs algorithm.importance_correction.", choices=("auto", *DTYPES, "int8", "fp8")),
    Key("rollout.cache_dtype", "auto",
        "Type of the keys and values while sampling; auto is that of the computation. fp8 needs "
        "algorithm.importance_correction.", choices=("auto", *DTYPES, "fp8")),
    Key("rollout.mesh", None,
        "How the devices are arranged for sampling, `tensor=8` or `fsdp=2,tensor=4`: sizes of data, fsdp, expert and "
        "tensor, 1 unless named, data what remains. Parameters move there for each rollout. none is as in `mesh`, its "
        "context part of fsdp."),

    Key("rewards.functions", ("exact_match",),
        "Reward functions: built-in name, `module:function` or `path/to/file.py:function`, each with options in "
        "brackets: `judge(url='http://localhost:8000/v1', model='m')`; `model:<path>` is a reward model. See "
        "docs/rewards.md."),
    Key("rewards.weights", (), "Weight of each reward function; empty is 1 for all.", float),
    Key("rewards.timeout", None,
        "Seconds each reward function may take for one batch; none is no limit.", float, above=0),
    Key("rewards.on_timeout", "stop",
        "What the rows get that a function has not done in rewards.timeout: stop (an error), none (no reward), or a "
        "number."),
    Key("rewards.on_error", "stop",
        "What the rows get on which a function raises: stop (an error) or none (no reward).", choices=("stop", "none")),
    Key("rewards.workers", 0,
        "Processes for reward functions that are not async; 0 runs them in this one. A late function is killed there.",
        int, minimum=0),

    Key("environment.name", None,
        "Class or function that makes an environment (or an object whose methods are tools): built-in name, "
        "`module:Class` or `path/to/file.py:Class`, with options in brackets, `sort_then_smallest(first=0.2)`; or a "
        "dictionary of such, by the column environment of the rows."),
    Key("environment.tools", (), "Functions that the policy may call, `path/to/file.py:calculator`."),
    Key("environment.max_turns", 10, "Turns the policy has in a row.", int, minimum=1),
    Key("environment.max_tool_calls", None,
        "Tool calls a row may make; a turn with more ends it. none is no limit.", int, minimum=0),
    Key("environment.timeout", 60.0, "Seconds for each call of an environment; none is no limit.", float, above=0),
    Key("environment.workers", 16, "Calls of environments that run at the same time.", int, minimum=1),
    Key("environment.on_error", "end",
        "What an environment that raises, says nonsense or is late does: end its row, unscored, or stop the run.",
        choices=("end", "stop")),
    Key("environment.rollout_func", None,
        "Function that samples in place of the engine, `path/to/file.py:function`, or a server of the OpenAI kind, "
        "`server(url='http://localhost:8000/v1', model='m')`."),

    Key("algorithm.name", "grpo",
        "What is trained: grpo samples and scores completions, sft learns given ones, preference learns from pairs or "
        "labelled completions, reward_model learns a score from pairs.", choices=ALGORITHMS),
    Key("algorithm.advantage", "group",
        "Advantage estimate: built-in name, `module:function` or `path/to/file.py:function`; options in brackets, "
        "`rloo(normalize=True)`."),
    Key("algorithm.loss", "auto",
        "Policy, preference or reward-model loss: built-in name, `module:function` or `path/to/file.py:function`, with "
        "options in brackets, `sapo(temperature_negative=1.1)`; preference losses may be a mixture, `dpo+bco_pair`. "
        "auto is ppo_clip, dpo or bradley_terry."),
    Key("algorithm.aggregation", "sequence",
        "How token losses are averaged: over each row's tokens, then over rows (sequence); over all tokens (token); "
        "over rows x rollout.max_completion_length (constant); row sums over rows (sequence_sum); "
        "over the tokens of each micro-batch (microbatch_token); over an equal share of the rollout's tokens, as "
        "TRL's dapo (rollout_token).",
        choices=("sequence", "token", "constant", "sequence_sum", "microbatch_token", "rollout_token")),
    Key("algorithm.scale_rewards", "group",
        "Standard deviation that advantages are divided by: the group's, the batch's, or none.",
        choices=("group", "batch", "none")),
    Key("algorithm.beta", 0.0,
        "Weight of the KL term against the reference policy; 0 is off and keeps no reference. Preference losses: their "
        "beta (ORPO's lambda).", float, minimum=0),
    Key("algorithm.kl", "auto", "Estimator of the KL term; auto is k1 in the reward and k3 in the loss.",
        choices=("auto", "k3", "k1", "abs", "k2")),
    Key("algorithm.kl_in_reward", False,
        "Subtract beta x KL from the rewards (of each token, or summed from the score) in place of adding it to the "
        "loss.", bool),
    Key("algorithm.kl_bias_correction", False,
        "Multiply the KL term of the loss by the probability ratio: unbiased for samples of an older policy.", bool),
    Key("algorithm.kl_controller", "fixed",
        "Whether beta stays, or moves so that the KL approaches kl_target.", choices=("fixed", "adaptive")),
    Key("algorithm.kl_target", 0.1, "KL per token that the adaptive controller steers to.", float, above=0),
    Key("algorithm.kl_horizon", 10_000.0, "Rows over which the adaptive controller moves beta.", float, above=0),
    Key("algorithm.offload_reference", False,
        "Keep a copied reference in the host's memory; it visits the device for its log-probs.", bool),
    Key("algorithm.ref_sync_steps", 0, "Steps between moves of the reference towards the policy; 0 is never.",
        int, minimum=0),
    Key("algorithm.ref_mixup_alpha", 0.6,
        "Share of the policy in the moved reference; 1 replaces it.", float, above=0, maximum=1),
    Key("algorithm.epsilon_low", 0.2, "The probability ratio is clipped below 1 - epsilon_low.", float, minimum=0),
    Key("algorithm.epsilon_high", 0.2,
        "The probability ratio is clipped above 1 + epsilon_high; cispo: the cap of the ratio itself.",
        float, minimum=0),
    Key("algorithm.num_iterations", 1, "Passes over each batch of completions.", int, minimum=1),
    Key("algorithm.old_logps", "auto",
        "Whose log-probs the probability ratio compares with: those of the policy before the step, computed by the "
        "trainer (trainer), or those that were recorded as the tokens were sampled (sampler). auto is sampler for a "
        "loss that is defined so (dppo), and else trainer, computed only where they differ from the policy's own.",
        choices=("auto", "trainer", "sampler")),
    Key("algorithm.importance_correction", "none",
        "Weights that correct for a sampler that differs from the trainer: the ratio of each token or of the whole "
        "row, cut to importance_min and importance_max (truncate), or 0 outside them (mask).",
        choices=("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")),
    Key("algorithm.importance_max", 3.0, "Largest ratio of the importance correction.", float, above=0),
    Key("algorithm.importance_min", None, "Smallest ratio of the importance correction; none is 0.", float, minimum=0),
    Key("algorithm.off_policy_mask_threshold", None,
        "Leave bad rows out whose mean log-prob fell by more than this since they were sampled; none is off.",
        float, minimum=0),
    Key("algorithm.top_entropy_quantile", 1.0,
        "Share of the tokens, those of highest entropy, that the policy loss learns from.", float, above=0, maximum=1),
    Key("algorithm.entropy_coef", 0.0, "Weight of the entropy bonus; 0 is off.", float, minimum=0),
    Key("algorithm.entropy_controller", "fixed",
        "Whether entropy_coef stays, or rises while the entropy is at or below entropy_target and falls otherwise; "
        "adaptive, it applies only at or below the target.", choices=("fixed", "adaptive")),
    Key("algorithm.entropy_target", 0.2, "Entropy per token that the adaptive controller keeps.", float, minimum=0),
    Key("algorithm.entropy_delta", 0.005, "How far entropy_coef moves in a step.", float, minimum=0),
    Key("algorithm.entropy_coef_min", 0.0, "Smallest adaptive entropy_coef.", float, minimum=0),
    Key("algorithm.entropy_coef_max", 1.0, "Largest adaptive entropy_coef.", float, minimum=0),
    Key("algorithm.mask_truncated", False, "Leave completions that did not end out of the loss.", bool),
    Key("algorithm.reward_clip", (),
        "Smallest and largest score: combined rewards are clipped to them before anything is added; empty is off.",
        float),
    Key("algorithm.overlong_buffer", 0,
        "Tokens before rollout.max_completion_length over which the score falls by up to 1 (DAPO's soft punishment).",
        int, minimum=0),
    Key("algorithm.missing_eos_penalty", 0.0,
        "Subtracted from the score of a completion that did not end.", float, minimum=0),
    Key("algorithm.dynamic_sampling", False,
        "Sample other prompts in place of those whose completions all score alike, until none is left.", bool),
    Key("algorithm.max_sampling_rounds", 10,
        "Rounds of sampling in a step with dynamic_sampling; then the run stops, or replay fills up.", int, minimum=1),
    Key("algorithm.replay_groups", 0,
        "Groups kept from earlier steps, to take the place of those whose completions all score alike; 0 is off.",
        int, minimum=0),

    Key("algorithm.loss_weights", (), "Weight of each loss of a preference mixture; empty is 1 for all.", float),
    Key("algorithm.reference_free", False, "Preference losses take the reference's log-probs to be 0.", bool),
    Key("algorithm.label_smoothing", 0.0,
        "sft: share of the target that is spread over the vocabulary; preference losses take it in brackets.",
        float, minimum=0, below=0.5),
    Key("algorithm.neftune_alpha", 0.0,
        "Size of NEFTune's noise on the embeddings in sft; 0 is off.", float, minimum=0),
    Key("algorithm.ld_alpha", None,
        "Weight of a pair's tokens beyond its shorter completion (LD-DPO); none is 1.", float, minimum=0, maximum=1),
    Key("algorithm.use_weighting", False, "Weigh pairs by how likely the policy is to write them (WPO).", bool),

    Key("critic.path", None, "Model the critic starts from, with a new score head if it has none; none is model.path."),
    Key("critic.shared", False,
        "The critic is a second head of the policy, trained with it by one optimizer: the other keys of critic, but "
        "coef and epsilon, are not read.", bool),
    Key("critic.coef", 0.1, "Weight of the value loss of a shared critic.", float, above=0),
    Key("critic.learning_rate", 1e-5, "Peak learning rate of the critic.", float, minimum=0),
    Key("critic.schedule", "constant", "Learning rate of the critic; it has no warm-up.",
        choices=("constant", "linear", "cosine", "inverse_sqrt")),
    Key("critic.max_grad_norm", 1.0, "The critic's gradients are scaled to this norm; 0 is off.", float, minimum=0),
    Key("critic.epsilon", 0.2, "Values are clipped to this distance of those before; none is off.", float, above=0),
    Key("critic.warmup_steps", 0, "First training steps, in which only the critic learns.", int, minimum=0),

    Key("optimizer.name", "adamw",
        "Optimizer; muon is for the matrices of the layers, with adamw for the rest.",
        choices=("adamw", "adafactor", "lion", "sgd", "muon")),
    Key("optimizer.learning_rate", 1e-6, "Peak learning rate.", float, minimum=0),
    Key("optimizer.schedule", "constant", "Learning rate after warm-up; wsd is constant and then falls.",
        choices=("constant", "linear", "cosine", "inverse_sqrt", "wsd")),
    Key("optimizer.warmup_steps", 0, "Training steps over which the learning rate rises from 0.", int, minimum=0),
    Key("optimizer.warmup_ratio", 0.0, "The same as a share of total_steps.", float, minimum=0, maximum=1),
    Key("optimizer.min_lr_ratio", 0.0,
        "Lowest learning rate after warm-up as a fraction of the peak.", float, minimum=0, maximum=1),
    Key("optimizer.cycles", 0.5, "Waves of the cosine; half a wave falls once.", float, above=0),
    Key("optimizer.decay_steps", 0, "Last training steps, over which wsd falls.", int, minimum=0),
    Key("optimizer.decay_shape", "linear", "How wsd falls.", choices=("linear", "cosine", "exponential")),
    Key("optimizer.b1", 0.9, "Decay of the first moment; the momentum of sgd.", float, minimum=0, below=1),
    Key("optimizer.b2", 0.999, "Decay of the second moment.", float, minimum=0, below=1),
    Key("optimizer.eps", 1e-8, "Added to the root of the second moment.", float, above=0),
    Key("optimizer.weight_decay", 0.0, "Decoupled weight decay.", float, minimum=0),
    Key("optimizer.no_decay", ("bias", "scale"), "Parameters whose path ends like this are not decayed."),
    Key("optimizer.moment_dtype", "float32", "Type the optimizer's moments are stored in.", choices=DTYPES[:2]),
    Key("optimizer.offload", False,
        "Keep the moments in the host's memory; they visit the device for each update.", bool),
    Key("optimizer.max_grad_norm", 1.0, "Gradients are scaled down to this global norm; 0 is off.", float, minimum=0),
    Key("optimizer.max_skipped_steps", 3,
        "Steps in a row that a gradient which is not finite may skip; one more stops the run.", int, minimum=0),

    Key("batch.prompts", 32, "Prompts per step; data rows (a pair is one) for offline algorithms.", int, minimum=1),
    Key("batch.minibatches", 1, "Optimizer updates per pass over the batch.", int, minimum=1),
    Key("batch.microbatch_rows", 0,
        "Rows per forward and backward pass; gradients add up exactly. 0 is a whole minibatch.", int, minimum=0),
    Key("batch.packing", "auto",
        "Compute a group's prompt once for its rows, no padding, and logits of scored tokens alone: rows lie one "
        "behind the other. The update is the same. auto is where completions of which some are short, or the rows of "
        "the data, gain by it.",
        choices=("auto", "true", "false")),
    Key("batch.pack_length", 0,
        "Tokens of a packed row; 0 is what takes the least time. Attention costs more in longer ones.", int, minimum=0),
    Key("batch.microbatch_tokens", 0,
        "Tokens per forward and backward pass of packed rows, over all devices. 0 is as many as microbatch_rows of "
        "full length have or, where that is 0 too, an eighth of the minibatch, or more where that is few.",
        int, minimum=0),
    Key("batch.shuffle", False, "Shuffle rows before they are split in minibatches.", bool),

    Key("mesh.data", -1, "Devices that hold copies of the model; -1 is what the others leave.", int, minimum=-1),
    Key("mesh.fsdp", 1, "Devices that share parameters and optimizer state, and split the batch.", int, minimum=-1),
    Key("mesh.tensor", 1, "Devices that share each matrix product.", int, minimum=-1),
    Key("mesh.context", 1, "Devices that split the positions of training rows, and share parameters as fsdp does.",
        int, minimum=-1),
    Key("mesh.expert", 1,
        "Devices that split the experts of a mixture of experts, and the batch; for the rest of the model, or without "
        "experts, as fsdp.", int, minimum=-1),

    Key("processes.coordinator", None,
        "Address of process 0, HOST:PORT, with a free port; or the variable JAXRL_COORDINATOR."),
    Key("processes.count", None, "Number of processes; or the variable JAXRL_PROCESS_COUNT.", int, minimum=1),
    Key("processes.index", None,
        "Number of this process, from 0; or the variable JAXRL_PROCESS_INDEX.", int, minimum=0),
    Key("processes.meet_seconds", 300, "Seconds until all processes must have come.", int, minimum=1),
    Key("processes.heartbeat_seconds", 100,
        "Seconds without a sign of life after which a process counts as lost and ends the run.", int, minimum=1),

    Key("checkpoint.every", 50, "Steps between checkpoints; 0 is only after the last step.", int, minimum=0),
    Key("checkpoint.keep", 2, "Newest checkpoints that are kept.", int, minimum=1),
    Key("checkpoint.keep_every", 0, "Of older ones, those whose step this divides are kept too; 0 is none.",
        int, minimum=0),
    Key("checkpoint.keep_hours", 0.0, "Of older ones, one for each so many hours is kept too; 0 is none.",
        float, minimum=0),
    Key("checkpoint.best", None,
        "Metric by which the best one is kept too, eval/reward for example: among the steps that were saved and have "
        "the metric."),
    Key("checkpoint.best_mode", "max", "Whether the greatest or the smallest is best.", choices=("max", "min")),
    Key("checkpoint.folder", None,
        "Folder for checkpoints, which may be in an object store (gs://, s3://); none is output_dir/checkpoints."),
    Key("checkpoint.resume", "auto",
        "`auto` goes on from the newest undamaged checkpoint of the run if there is one, `never` starts anew and "
        "deletes them; anything else is the path of a checkpoint to go on from."),

    Key("eval.every", 25,
        "Steps between evaluations; 0 is only before and after training, -1 is never.", int, minimum=-1),
    Key("eval.measure", "auto",
        "The loss on held-out rows, samples for held-out prompts, or both. auto is samples for online algorithms, and "
        "for offline ones the loss where the rows have what is learned.",
        choices=("auto", "loss", "samples", "both")),
    Key("eval.at_start", True, "Evaluate before the first step.", bool),
    Key("eval.at_end", True, "Evaluate after the last step, also where eval.every does not divide it.", bool),
    Key("eval.sets", (),
        "Several named sets in place of data.eval_path: each `name=path` or `name=path(split='test', samples=16)`, "
        "with the options of data.sources and its own prompts and samples; in a config file also a dictionary with "
        "`set`, the name. Metrics are `eval/<name>/...`; entries of one name are one set.", dict),
    Key("eval.prompts", 128, "Prompts, or rows, in an evaluation, of each set.", int, minimum=1),
    Key("eval.samples", 4, "Completions sampled per prompt.", int, minimum=1),
    Key("eval.temperature", None, "Temperature of these samples, 0 is greedy; none is rollout.temperature.",
        float, minimum=0),
    Key("eval.top_p", None, "Their top_p; none is rollout.top_p.", float, above=0, maximum=1),
    Key("eval.top_k", None, "Their top_k, 0 is off; none is rollout.top_k.", int, minimum=0),
    Key("eval.greedy", True, "Measure the greedy completion of each prompt too.", bool),
    Key("eval.correct_at", 1.0, "A completion is correct when its first reward is at least this.", float),
    Key("eval.answer", None,
        "How the answer of a completion is found for eval/maj@k: boxed, number (the last), hashes (after ####), text "
        "(all of it), `module:function` or `path/to/file.py:function`. none takes the entry `pred` of the first reward "
        "function's results, and leaves maj@k out where there is none."),
    Key("eval.extremes", False, "Measure eval/best@k and eval/worst@k too: of the rewards of k completions.", bool),
    Key("eval.interval", None,
        "Level of bootstrap intervals over prompts, 0.95 for example: eval/accuracy_low, eval/accuracy_high and so on; "
        "none measures none.", float, above=0, below=1),
    Key("eval.estimate", "unbiased",
        "What pass@k, maj@k, best@k and worst@k are estimated from: different samples of a prompt (unbiased), or "
        "verl's 1000 draws with replacement.", choices=("unbiased", "verl")),

    Key("export.push_to_hub", None,
        "Repository of the Hugging Face hub, OWNER/NAME, that the trained model (hf/, adapters merged) is pushed to at "
        "the end, with the token of the variable HF_TOKEN."),
    Key("export.private", False, "Make that repository for its owner alone.", bool),
    Key("export.overwrite", False, "Replace the model that it holds already.", bool),

    Key("logging.backends", ("console", "jsonl"), "Where metrics go; docs/logging.md.",
        choices=("console", "jsonl", "tensorboard", "wandb", "mlflow", "swanlab", "trackio")),
    Key("logging.project", "jaxrl_llm", "The project (experiment) of the run in wandb, mlflow, swanlab and trackio."),
    Key("logging.run_name", None, "The name of the run there; none is that of the folder output_dir."),
    Key("logging.table_rows", 64,
        "Completions in a table sent there, evenly spaced, at the steps that logging.completions_every divides.",
        int, minimum=1),
    Key("logging.names", "trl", "Whose names metrics have in metrics.jsonl.", choices=("trl", "verl")),
    Key("logging.completions_every", 10,
        "Steps between samples of completions in the log; 0 is never.", int, minimum=0),
    Key("logging.completions_shown", 3, "Completions in each sample.", int, minimum=1),
    Key("logging.profile_steps", None,
        "Training steps to profile, `4` or `3-5`: JAX's trace and a table of seconds by phase in output_dir/profile."),

    Key("watch.hang_seconds", 1800.0,
        "A run that is in one phase of a step for longer writes every Python stack to stacks.txt and ends; 0 is never.",
        float, minimum=0),
    Key("watch.kl", 1.0,
        "warning/kl_explosion above this KL per token, to the reference or, without one, to the policy that sampled; "
        "none is off.", float, above=0),
    Key("watch.entropy", 0.01, "warning/entropy_collapse below this entropy per token; none is off.", float, above=0),
    Key("watch.mismatch", 0.1,
        "warning/sampler_mismatch when log-probs of sampled tokens differ by more than this between sampler and "
        "trainer, on average; none is off.", float, above=0),
)
# fmt: on
