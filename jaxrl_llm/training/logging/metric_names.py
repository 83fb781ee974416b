"""The names of metrics in metrics.jsonl and other records: TRL's, or verl's (`logging.names`).

Within a run every metric has one name, TRL's where TRL has one. It is renamed on the way out, and back on resume.
"""

import re
from collections.abc import Mapping

# Phase of the stopwatch -> verl's word for it.
PHASES = {
    "rollout": "gen",
    "reward": "reward",
    "logps": "old_log_prob",
    "update": "update_actor",
    "evaluation": "testing",
    "checkpoint": "save_checkpoint",
}
SPREAD = ("mean", "max", "min")
REWARDS = {"mean": "reward", "max": "reward_max", "min": "reward_min"}
KL_PENALTY = "actor/reward_kl_penalty"  # on the reward

VERL: Mapping[str, str] = {
    "loss": "actor/loss",
    "policy_term": "actor/pg_loss",
    "entropy": "actor/entropy",
    "entropy_coef": "actor/entropy_coeff",
    "grad_norm": "actor/grad_norm",
    "lr": "actor/lr",
    "clip_ratio/region_mean": "actor/pg_clipfrac",
    "clip_ratio/dual_mean": "actor/pg_clipfrac_lower",
    "ratio/kl": "actor/ppo_kl",
    **{name: f"critic/score/{kind}" for kind, name in REWARDS.items()},
    **{f"{name}/{kind}": f"critic/{name}/{kind}" for name in ("advantages", "returns", "values") for kind in SPREAD},
    "critic/loss": "critic/vf_loss",
    "critic/explained_variance": "critic/vf_explained_var",
    **{f"completions/{kind}_length": f"response_length/{kind}" for kind in SPREAD},
    "completions/clipped_ratio": "response_length/clip_ratio",
    **{f"prompts/{kind}_length": f"prompt_length/{kind}" for kind in SPREAD},
    "step_tokens": "perf/total_num_tokens",
    "epoch": "training/epoch",
    "tools/call_frequency": "tool_call_counts/mean",
    "step_time": "perf/time_per_step",
    "mfu": "perf/mfu/actor",
    "machine/device_memory_peak_gib": "perf/max_memory_allocated_gb",
    **{f"time/{phase}": f"timing_s/{verl}" for phase, verl in PHASES.items()},
}
# Metrics that verl has besides, and what they are made of here.
VERL_MORE: Mapping[str, str] = {
    "training/global_step": "`step`",
    "timing_s/step": "`step_time`",
    "perf/throughput": "`step_tokens` by `step_time` and by the number of devices",
    "timing_per_token_ms/gen": "`time/rollout` by the completions' tokens of the step",
    "timing_per_token_ms/update_actor": "`time/update` by `step_tokens`",
    "critic/rewards/mean": "`reward`; less a KL penalty it is `objective/rlhf_reward`, of ppo alone",
    "critic/rewards/max": "`reward_max`; none with a KL penalty on the reward",
    "critic/rewards/min": "`reward_min`; none with a KL penalty on the reward",
    "num_turns/mean": "2 `environment/turns`: the messages of both sides",
}
TRL_PPO: Mapping[str, str] = {
    "policy_term": "loss/policy_avg",
    "critic/loss": "loss/value_avg",
    "critic/vf_clipfrac": "val/clipfrac_avg",
    "clip_ratio/region_mean": "policy/clipfrac_avg",
    "entropy": "policy/entropy_avg",
    "ratio/squared": "policy/approxkl_avg",
    "ratio/mean": "val/ratio",
    "reward": "objective/scores",
}

# In verl's records: the variable and the statistic of k completions.
EVALUATIONS: Mapping[str, str] = {
    "reward": "reward/mean@n",
    "accuracy": "acc/mean@n",
    "reward_std": "reward/std@n",
    "accuracy_std": "acc/std@n",
    "pass@k": "acc/best@k/mean",
    "maj@k": "acc/maj@k/mean",
    "best@k": "reward/best@k/mean",
    "worst@k": "reward/worst@k/mean",
}


class MetricNames(dict[str, str]):
    """The recorded name of each metric by its name within the run; one that is missing keeps its name.

    No two are the same, so that `internal` reads the records of a resumed run. `data` is the name in verl's records of
    held-out prompts without a name (None: evaluations are not renamed), `samples` the completions of each prompt by the
    name of its set, "" for the sets that are not listed.
    """

    def __init__(
        self, names: Mapping[str, str] | None = None, data: str | None = None, samples: Mapping[str, int] | None = None
    ):
        super().__init__(names or {})
        self._internal = {shown: name for name, shown in self.items()}
        self._data, self._samples = data, dict(samples or {})

    def shown(self, name: str) -> str:
        """The recorded name of a metric of the run.

        verl records the main metrics of an evaluation under val-core, the others under val-aux.
        """
        if name in self:
            return self[name]
        # What a reward function says beside its score keeps its name, be that accuracy or reward.
        own = r"eval/(?!(?:.+/)?rewards/)(?:(.+)/)?"
        match = re.fullmatch(own + r"((?:reward|accuracy)(?:_std)?|(pass|maj|best|worst)@(\d+))", name)
        if self._data is None or not match:
            return name
        eval_set, metric, kind, k = match.groups()
        n = self._samples.get((eval_set or "").partition("/")[0], self._samples[""])
        main = metric == "accuracy" or (kind in ("pass", "maj") and int(k) == n)
        statistic = EVALUATIONS[f"{kind}@k" if kind else metric].replace("@k", f"@{k}").replace("@n", f"@{n}")
        return f"val-{'core' if main else 'aux'}/{eval_set or self._data}/{statistic}"

    def more(self, step: int, metrics: Mapping[str, float | None]) -> dict[str, float | None]:
        """The metrics of VERL_MORE, computed from those of a training step by the run's names; none in TRL's records.

        None is a number that is not finite.
        """
        if self._data is None or "step_tokens" not in metrics:
            return {}
        import jax  # here, as the report reads names without it

        found: dict[str, float | None] = {"training/global_step": step, "timing_s/step": metrics["step_time"]}
        tokens, prompt = metrics["step_tokens"] or 0.0, metrics.get("prompts/mean_length") or 0.0
        if seconds := metrics["step_time"]:
            found["perf/throughput"] = tokens / (seconds * jax.device_count())
        completion = metrics.get("completions/mean_length") or 0.0
        completions = tokens * completion / (prompt + completion) if completion else 0.0
        for phase, count in (("rollout", completions), ("update", tokens)):
            if count and (seconds := metrics.get(f"time/{phase}")) is not None:
                found[f"timing_per_token_ms/{PHASES[phase]}"] = 1000 * seconds / count
        penalised = "reward_kl" in self or self["kl"] == KL_PENALTY
        rewards = {"mean": "objective/rlhf_reward"} if penalised else REWARDS
        found |= {f"critic/rewards/{kind}": metrics[name] for kind, name in rewards.items() if name in metrics}
        if (turns := metrics.get("environment/turns")) is not None:
            found["num_turns/mean"] = 2 * turns
        return found

    def is_more(self, shown: str) -> bool:
        """True for the recorded name of a metric of `more`, which no other of the run has."""
        return self._data is not None and shown in VERL_MORE

    def internal(self, shown: str) -> str:
        """The name within the run of a recorded metric; the inverse of `shown`."""
        if shown in self._internal or self._data is None or not shown.startswith(("val-core/", "val-aux/")):
            return self._internal.get(shown, shown)
        for metric, statistic in EVALUATIONS.items():
            pattern = re.escape(statistic).replace("@n", r"@\d+").replace("@k", r"@(\d+)")
            if match := re.fullmatch(rf"val-(?:core|aux)/(.+)/{pattern}", shown):
                eval_set = "" if match[1] == self._data else f"{match[1]}/"
                return f"eval/{eval_set}{metric.replace('@k', f'@{match[2]}') if '@k' in metric else metric}"
        return shown


def verl_names(kl_in_reward: bool, kl_in_both: bool, data: str, samples: Mapping[str, int]) -> MetricNames:
    """verl's names; `data` and `samples` as `MetricNames` takes them.

    The KL is a penalty on the reward (`kl_in_reward`), a term of the loss, or there is one of each (`kl_in_both`).
    """
    coef = f"{KL_PENALTY}_coeff"
    kl = {"kl": "actor/kl_loss", "kl_coef": "actor/kl_coef"}
    if kl_in_reward:
        kl = {"kl": KL_PENALTY, "kl_coef": coef}
    elif kl_in_both:
        kl |= {"reward_kl": KL_PENALTY, "kl_coef": coef}
    return MetricNames({**VERL, **kl}, data, samples)
