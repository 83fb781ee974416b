"""Mergers of squares of patches into embeddings of the decoder."""

import jax.numpy as jnp
import pytest
from flax import nnx

from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.vision.mergers import MERGERS
from jaxrl_llm.models.vision.patch_rows import PatchRowsConfig


@pytest.mark.parametrize("norm", ["square", "patch"])
@pytest.mark.parametrize("merger", MERGERS)
def test_embeddings_have_the_width_of_the_decoder(merger, norm):
    """Which is neither that of a patch nor that of a square of them."""
    encoder = PatchRowsConfig(width=6, merge=2, merger=merger, merger_ffn=10, merger_norm=norm)
    net = ModelConfig(vocab_size=8, width=6, layers=1, heads=1, kv_heads=1, head_dim=6, ffn=8)
    embeddings = nnx.eval_shape(lambda: MERGERS[merger](encoder, 14, net, nnx.Rngs(0))(jnp.ones((3, 8, 6))))
    assert embeddings.shape == (3, 2, 14)
