"""Prompt lookup: the tokens proposed to follow a row."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.rollout.speculative import prompt_lookup


@pytest.mark.parametrize(
    ("prompt", "sampled", "coming", "expected"),
    [
        ([1, 2, 3, 4], [1, 2], [], [3, 4]),  # in the prompt
        ([1, 2, 9, 1, 2, 8, 3], [1, 2], [], [8, 3]),  # the latest time
        ([7, 7, 7], [1, 2, 3, 1, 2], [], [3, 1]),  # in the row itself
        ([7, 4, 1], [2, 5, 1, 2], [], [5, 1]),  # across both
        ([4, 4], [4, 4], [], [4, 4]),  # a token that is repeated
        ([1, 2, 3, 4], [1, 2], [1, 2, 6], [3, 4]),  # not what is to come
    ],
)
def test_what_followed_the_last_two_tokens(prompt, sampled, coming, expected):
    width, room = 8, 8
    padding = width - len(prompt)
    prompts = jnp.asarray((sampled[-2:] * width)[:padding] + prompt)[None]  # padding is the same and is no text
    mask = jnp.arange(width)[None] >= padding
    rows = jnp.asarray(sampled + coming + [0] * (room - len(sampled) - len(coming)))[None, None]
    found = prompt_lookup(prompts, mask, rows, jnp.asarray([[len(sampled)]]), 2)[0, 0]
    np.testing.assert_array_equal(found, expected)


def test_rows_of_a_group_share_its_prompt():
    prompts = jnp.asarray([[1, 2, 3, 4], [1, 2, 5, 6]])
    rows = jnp.asarray([[[1, 2, 0], [2, 3, 0]], [[1, 2, 0], [2, 5, 0]]])
    found = prompt_lookup(prompts, jnp.ones((2, 4), bool), rows, jnp.full((2, 2), 2), 1)
    np.testing.assert_array_equal(found[..., 0], [[3, 4], [5, 6]])
