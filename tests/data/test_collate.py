import numpy as np
import pytest

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.data.collate import pad_prompts, pad_rows


def test_prompts_are_at_the_right_edge():
    tokens, segments = pad_prompts([[5, 6], [7, 8, 9], [0]], 3)
    # Token 0 of the last prompt is real: only the segments tell padding.
    assert tokens[:, -1].tolist() == [6, 9, 0]
    assert segments.tolist() == [[0, 1, 1], [1, 1, 1], [0, 0, 1]]
    assert [row[on == 1].tolist() for row, on in zip(tokens, segments, strict=True)] == [[5, 6], [7, 8, 9], [0]]
    assert tokens.dtype == segments.dtype == np.int32


def test_rows_are_at_the_left_edge():
    tokens, segments, mask = pad_rows([([5, 6, 7], [0, 1, 1]), ([8], [0.5])], 4)
    assert tokens[0, :3].tolist() == [5, 6, 7]
    assert tokens[1, 0] == 8
    assert segments.tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert mask.tolist() == [[0, 1, 1, 0], [0.5, 0, 0, 0]]
    assert (tokens.dtype, segments.dtype, mask.dtype) == (np.int32, np.int32, np.float32)


def test_empty_batches_have_the_right_shape():
    assert pad_prompts([], 4)[0].shape == (0, 4)
    assert pad_rows([], 4)[2].shape == (0, 4)


def test_errors():
    with pytest.raises(ConfigError, match="row 1 has 3 tokens, more than the batch width 2"):
        pad_prompts([[1], [1, 2, 3]], 2)
    with pytest.raises(ConfigError, match="row 0 has 3 tokens, more than the batch width 2"):
        pad_rows([([1, 2, 3], [1, 1, 1])], 2)
    with pytest.raises(ConfigError, match="row 0 has 2 tokens but 1 mask values"):
        pad_rows([([1, 2], [1])], 2)
