"""Names of the random streams: the number that each folds into a key, so that no two of them share numbers.

Training steps fold their own number (1, 2, ...) into the run's key, and rows theirs into the key of a step. The streams
below count down from the largest 32-bit integer, where no step or row arrives. A stream's number is part of every
recorded run: changing one changes what is drawn.
"""

# Folded into the run's key, `jax.random.key(config.seed)`.
EVALUATION = 2**31 - 1
DROPOUT = 2**31 - 3
ADAPTERS = 2**31 - 4
VALUE_HEAD = 2**31 - 5
ROUNDING = 2**31 - 6  # of parameters, by the number of updates made
MOMENT_ROUNDING = 2**31 - 7
MIXTURE = 2**31 - 8  # of samples and given rows, by the number of steps made
REFERENCE_ROUNDING = 2**31 - 9  # of a reference policy that moves, by the number of steps made
REFERENCE_SAMPLES = 2**31 - 10  # of the reference before the first step, by row
LAYERS = 2**31 - 11  # that are updated, by the number of updates made

# Folded into the key of a step. REPLAY may equal EVALUATION: it is never folded into the same key.
REPLAY = 2**31 - 1
ROW_SEEDS = 2**31 - 2
