"""Every family on a mesh of 8 devices. test_families.py runs this file in a process with so many."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.distributed.sharding import make_mesh, path_name
from jaxrl_llm.models import moe
from jaxrl_llm.models.mixers import delta_net
from jaxrl_llm.models.model import load_model
from tests.models.images import VISION, image_documents, make_vision_oracle, padded_images
from tests.models.oracles import FAMILIES, VARIANTS, added_gradients, make_oracle

RECURRENT = ("qwen3_5_text", "falcon_h1")  # without experts, whose kernels are for their backend alone


def logits_and_gradients(net, params, tokens, segments, images=None):
    def loss(params, tokens, segments, images):
        logits = net.bind(params)(tokens, segments, images=images)
        logits = jnp.where((segments != 0)[..., None], logits, 0.0)  # what padding computes is nobody's
        return (jax.nn.log_softmax(logits) ** 2).mean(), logits

    return added_gradients(loss, params, tokens, segments, images)


@pytest.mark.parametrize("way", ["cpu", "accelerator"])
@pytest.mark.parametrize("variant", [*FAMILIES, "gemma4_text-experts", "glm_moe_dsa-shared", "mistral_large4-text"])
def test_eight_devices_compute_the_same(variant, way, tmp_path, monkeypatch):
    """Rows, parameters and heads are cut, and the experts or, of the other families, the positions."""
    config = VARIANTS[variant]()
    experts = hasattr(config, "num_experts_per_tok") or getattr(config, "enable_moe_block", False)
    if way == "accelerator":
        if not experts and variant not in RECURRENT:
            pytest.skip("only experts and recurrent layers are computed in another way there")
        monkeypatch.setattr(moe, "dense", moe.grouped)
    make_oracle(variant).save_pretrained(tmp_path)
    rng = np.random.default_rng(0)
    tokens, segments = jnp.asarray(rng.integers(0, 97, (8, 12))), np.ones((8, 12), np.int32)
    segments[2, :3] = 0
    whole = load_model(tmp_path)
    mesh = make_mesh(1, 2, 2, **{"expert" if experts else "context": 2})
    cut = load_model(tmp_path, mesh=mesh)
    expected, gradients = logits_and_gradients(whole.net, whole.params, tokens, segments)
    if way == "accelerator" and variant in RECURRENT:  # chunks of 5 tokens, whose states are by matrices
        monkeypatch.setattr(delta_net, "CHUNK", 5)
        monkeypatch.setattr(delta_net.GatedDeltaNet, "chunk", 5)
        monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with jax.set_mesh(mesh):
        found, cut_gradients = logits_and_gradients(cut.net, cut.params, tokens, segments)
    np.testing.assert_allclose(found, expected, atol=2e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-4), cut_gradients, gradients)
    matrices = {path_name(p): x for p, x in jax.tree_util.tree_leaves_with_path(cut.params) if x.ndim > 2}
    # Those of each head, Gemma 3n's of few streams or of a low rank, and DeepSeek-V4's and GLM-5.3's that are no maps
    # are whole.
    small = re.compile(r"_norm/scale$|/altup/|/laurel/right/|/position_bias$|/table$|indexer/places$")
    matrices = {path: x for path, x in matrices.items() if not small.search(path)}
    assert matrices
    for path, x in matrices.items():
        assert x.sharding.shard_shape(x.shape) != x.shape, f"{path} is whole on every device"


@pytest.mark.parametrize("family", sorted(VISION))
def test_eight_devices_compute_the_same_of_images(family, tmp_path):
    """Rows and their tiles, the encoder's matrices and heads are sharded, and the positions of the decoder."""
    make_vision_oracle(family).save_pretrained(tmp_path)
    documents = image_documents((2, 1, 0, 1), family)
    tokens, segments, images = padded_images(documents)
    whole = load_model(tmp_path)
    mesh = make_mesh(1, 2, 2, context=2)
    cut = load_model(tmp_path, mesh=mesh)
    expected, gradients = logits_and_gradients(whole.net, whole.params, tokens, segments, images)
    with jax.set_mesh(mesh):
        found, cut_gradients = logits_and_gradients(cut.net, cut.params, tokens, segments, images)
    np.testing.assert_allclose(found, expected, atol=2e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-4), cut_gradients, gradients)
    tower = cut.params["vision"]
    encoder, layers = tower["encoder"], tower["encoder"]["layers"]
    down, projector = layers["mlp"].get("fc2", layers["mlp"].get("down")), tower.get("projector", encoder.get("merger"))
    first = next(projector[name] for name in ("proj", "fc1", "gate") if name in projector)
    for linear in (encoder["patch"], layers["attention"]["q"], down, first):
        x = linear["kernel"]
        assert x.sharding.shard_shape(x.shape) != x.shape
