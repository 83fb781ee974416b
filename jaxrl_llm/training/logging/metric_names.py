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
    "reward": "critic/score/mean",
    "reward_max": "critic/score/max",
    "reward_min": "critic/score/min",
    **{f"{name}/{kind}": f"critic/{name}/{kind}" for name in ("advantages", "returns", "values") for kind in SPREAD},
    "critic/loss": "critic/vf_loss",
    "critic/explained_variance": "critic/vf_explained_var",
    **{f"completions/{kind}_length": f"response_length/{kind}" for kind in SPREAD},
    "completions/clipped_ratio": "response_length/clip_ratio",
    **{f"prompts/{kind}_length": f"prompt_length/{kind}" for kind in SPREAD},
    "step_time": "perf/time_per_step",
    "tokens_per_second": "perf/throughput",
    "machine/device_memory_peak_gib": "perf/max_memory_allocated_gb",
    **{f"time/{phase}": f"timing_s/{verl}" for phase, verl in PHASES.items()},
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
        match = re.fullmatch(r"eval/(?!(?:.+/)?rewards/)(?:(.+)/)?(reward|accuracy|(pass|maj|best|worst)@(\d+))", name)
        if self._data is None or not match:
            return name
        eval_set, metric, kind, k = match.groups()
        n = self._samples.get((eval_set or "").partition("/")[0], self._samples[""])
        main = metric == "accuracy" or (kind in ("pass", "maj") and int(k) == n)
        statistic = EVALUATIONS[f"{kind}@k" if kind else metric].replace("@k", f"@{k}").replace("@n", f"@{n}")
        return f"val-{'core' if main else 'aux'}/{eval_set or self._data}/{statistic}"

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
    penalty, coef = "actor/reward_kl_penalty", "actor/reward_kl_penalty_coeff"
    kl = {"kl": "actor/kl_loss", "kl_coef": "actor/kl_coef"}
    if kl_in_reward:
        kl = {"kl": penalty, "kl_coef": coef}
    elif kl_in_both:
        kl |= {"reward_kl": penalty, "kl_coef": coef}
    return MetricNames({**VERL, **kl}, data, samples)
