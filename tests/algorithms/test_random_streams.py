"""Random streams: their numbers, which recorded runs depend on, and that none shares a key with another."""

from jaxrl_llm.algorithms import random_streams

OF_THE_RUN = {
    "EVALUATION": 2**31 - 1, "DROPOUT": 2**31 - 3, "ADAPTERS": 2**31 - 4, "VALUE_HEAD": 2**31 - 5,
    "ROUNDING": 2**31 - 6, "MOMENT_ROUNDING": 2**31 - 7, "MIXTURE": 2**31 - 8,
    "REFERENCE_ROUNDING": 2**31 - 9, "REFERENCE_SAMPLES": 2**31 - 10,
    "LAYERS": 2**31 - 11,
}  # fmt: skip
OF_A_STEP = {"REPLAY": 2**31 - 1, "ROW_SEEDS": 2**31 - 2}


def test_the_numbers_of_streams_are_fixed():
    streams = {name: value for name, value in vars(random_streams).items() if name.isupper()}
    assert streams == OF_THE_RUN | OF_A_STEP


def test_streams_of_one_key_differ():
    for streams in (OF_THE_RUN, OF_A_STEP):
        assert len(set(streams.values())) == len(streams)
