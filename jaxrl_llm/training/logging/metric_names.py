"""The names that metrics have in metrics.jsonl and other records: TRL's, or verl's (`logging.names`).

Within a run every metric has one name, TRL's where TRL has one. It is renamed on the way out.
"""

import re
from collections.abc import Mapping

from jaxrl_llm.config import eval_set

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
    **{f"time/{ours}": f"timing_s/{theirs}" for ours, theirs in PHASES.items()},
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


# In verl's records: the variable and the statistic. k is the number of completions.
EVALUATIONS: Mapping[str, str] = {
    "reward": "reward/mean@n",
    "accuracy": "acc/mean@n",
    "pass@k": "acc/best@k/mean",
    "maj@k": "acc/maj@k/mean",
    "best@k": "reward/best@k/mean",
    "worst@k": "reward/worst@k/mean",
}


class Names(dict[str, str]):
    """The names of metrics in the records of a run, by their names within it; one that is missing keeps its own.

    No two of them are the same, so that `own` reads the records of a run that goes on. `data` is what verl's names call
    held-out prompts without a name, `samples` the completions of each in every set, by name.
    """

    def __init__(self, names: Mapping[str, str], data: str | None = None, samples: Mapping[str, int] | None = None):
        super().__init__(names)
        self._back = {shown: name for name, shown in names.items()}
        self._data, self._samples = data, dict(samples or {})

    def shown(self, name: str) -> str:
        """The name of a metric in the records."""
        return self[name] if name in self else self._evaluated(name)

    def own(self, shown: str) -> str:
        """The name within the run of a metric in the records."""
        if shown in self._back or self._data is None or not shown.startswith(("val-core/", "val-aux/")):
            return self._back.get(shown, shown)
        for metric, theirs in EVALUATIONS.items():
            pattern = re.escape(theirs).replace("@n", r"@\d+").replace("@k", r"@(\d+)")
            if found := re.fullmatch(rf"val-(?:core|aux)/(.+)/{pattern}", shown):
                where = "" if found[1] == self._data else f"{found[1]}/"
                return f"eval/{where}{metric.replace('@k', f'@{found[2]}') if '@k' in metric else metric}"
        return shown

    def _evaluated(self, name: str) -> str:
        """verl's name of a metric of evaluations: its main ones are val-core, the others val-aux."""
        found = re.fullmatch(r"eval/(?:(.+)/)?(reward|accuracy|(pass|maj|best|worst)@(\d+))", name)
        if self._data is None or not found:
            return name
        where, metric, kind, k = found.groups()
        n = self._samples.get((where or "").partition("/")[0], self._samples[""])
        main = metric == "accuracy" or (kind in ("pass", "maj") and int(k) == n)
        statistic = EVALUATIONS[f"{kind}@k" if kind else metric].replace("@k", f"@{k}").replace("@n", f"@{n}")
        return f"val-{'core' if main else 'aux'}/{where or self._data}/{statistic}"


def shown_names(config) -> Names:
    """The names of metrics in the records of the run."""
    algorithm = config.algorithm
    if config.logging.names == "trl":
        return Names(TRL_PPO if algorithm.name == "ppo" else {})
    if algorithm.kl_in_reward:
        terms = {"kl": "actor/reward_kl_penalty", "kl_coef": "actor/reward_kl_penalty_coeff"}
    else:
        terms = {"kl": "actor/kl_loss", "kl_coef": "actor/kl_coef"}
    samples = {"": config.eval.samples}
    for entry in config.eval.sets:
        name, own, _ = eval_set(entry)
        samples[name] = own.get("samples", samples.get(name, config.eval.samples))
    return Names({**VERL, **terms}, config.data.eval_path or config.data.path, samples)
