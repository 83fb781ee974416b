"""Objectives and estimators without a file of their own on the embedded model and task of grpo.py, by name.

    python -m jaxrl_llm.train --config=configs/further.py:maxrl

FORMS has the settings in which each differs from grpo.py beside it, without its KL term. Losses that correct for
samples of an older policy get such samples here: batches are made ahead (`rollout.staleness`), or each serves several
updates.
"""

from pathlib import Path

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.resolve import import_file

AHEAD = {"rollout.staleness": 2, "algorithm.old_logps": "sampler"}  # two updates old; the ratio covers them
UNCLIPPED = {"algorithm.epsilon_high": 0.2}  # which these losses do not read
FORMS = {
    # MaxRL (arXiv 2602.02710): advantages over the group's mean, so that what is solved seldom counts more.
    "maxrl": {"algorithm.advantage": "maxrl"},
    # PKPO (arXiv 2505.15201): the gradient of the best of four samples.
    "pkpo": {"algorithm.advantage": "pkpo(k=4)"},
    # The optimal token baseline (arXiv 2602.07078): of least variance at each place of a completion.
    "otb": {"algorithm.advantage": "otb"},
    # GPG (arXiv 2504.02546): REINFORCE, with advantages that grow with the share of scores which are 0.
    "gpg": {"algorithm.advantage": "gpg", "algorithm.loss": "reinforce", **UNCLIPPED},
    # TOPR (arXiv 2503.14286): bad rows fade out as the policy leaves them, good ones count whole.
    "topr": {"algorithm.loss": "topr", **AHEAD, **UNCLIPPED},
    # DPPO (arXiv 2602.04879): leaves out tokens by how far their probability, not its ratio, has moved.
    "dppo": {"algorithm.loss": "dppo", "algorithm.epsilon_high": 0.2, **AHEAD},
    # prime-rl's `ipo`: the same in both directions, whatever the advantage; named apart from the preference loss.
    "prime_ipo": {"algorithm.loss": "ipo", **AHEAD, **UNCLIPPED},
    # GLM-5 (arXiv 2602.15763): leaves out tokens whose ratio left its range on either side.
    "rollout_is": {"algorithm.loss": "rollout_is", **AHEAD},
    # VAPO's likelihood term (arXiv 2504.05118): correct completions are learned as in supervised fine-tuning too.
    "positive_nll": {"algorithm.positive_nll_coef": 0.1},
    # DRO (arXiv 2405.19107): a square penalty on the log-ratio in place of a clip.
    "dro": {"algorithm.loss": "dro(beta=0.1)", "batch.minibatches": 2, **UNCLIPPED},
    # VESPO (arXiv 2602.10693): rows weighed by a soft function of their ratio.
    "vespo": {"algorithm.loss": "vespo", "batch.minibatches": 2, **UNCLIPPED},
    # M2PO (arXiv 2510.01161): leaves out tokens until the second moment of the log-ratio is small.
    "m2po": {"algorithm.loss": "m2po", **AHEAD, **UNCLIPPED},
    # A-3PO (arXiv 2512.06547): decoupled PPO whose old log-probs lie between the sampler's and the policy's.
    "interpolated": {
        "rollout.staleness": 2, "algorithm.old_logps": "interpolated",
        "algorithm.importance_correction": "token_truncate", "algorithm.importance_max": 2.0,
    },
}  # fmt: skip


def get_config(arg: str = ""):
    """A name of FORMS, the first where there is none; with `,tiny` two steps, for a test."""
    name, _, size = arg.partition(",")
    name = name or next(iter(FORMS))
    if name not in FORMS or size not in ("", "tiny"):
        raise ConfigError(f"configs/further.py has no form {arg!r}; it has {', '.join(FORMS)}, each also with ',tiny'")
    config = import_file(Path(__file__).with_name("grpo.py")).get_config(size)
    config.output_dir = f"runs/{name}"
    config.total_steps = min(config.total_steps, 120)
    config.algorithm.beta = 0.0
    config.update_from_flattened_dict(FORMS[name])
    return config
