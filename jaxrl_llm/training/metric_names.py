"""The names that metrics have in metrics.jsonl and other records: TRL's, or verl's (`logging.names`).

Within a run every metric has one name, TRL's where TRL has one. It is renamed on the way out.
"""

from collections.abc import Mapping

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


def shown_names(config) -> dict[str, str]:
    """The names of metrics in the records of a run, by their names within it; a metric that is missing keeps its own.

    No two of them are the same, so that the inverse reads the records of a run that goes on.
    """
    algorithm = config.algorithm
    if config.logging.names == "trl":
        return dict(TRL_PPO) if algorithm.name == "ppo" else {}
    if algorithm.kl_in_reward:
        terms = {"kl": "actor/reward_kl_penalty", "kl_coef": "actor/reward_kl_penalty_coeff"}
    else:
        terms = {"kl": "actor/kl_loss", "kl_coef": "actor/kl_coef"}
    source, samples = f"val-core/{config.data.eval_path or config.data.path}", config.eval.samples
    evaluation = {
        "eval/reward": f"{source}/reward/mean@{samples}",
        "eval/accuracy": f"{source}/acc/mean@{samples}",
        **{f"eval/pass@{k}": f"{source}/acc/best@{k}/mean" for k in range(1, samples + 1)},
    }
    return {**VERL, **terms, **evaluation}
