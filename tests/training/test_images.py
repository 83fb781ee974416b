"""Rows with images through online and offline training, on the embedded model and task of shapes."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_llm
from jaxrl_llm.algorithms.batch import Batch, Images, Inputs
from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.files import write_json
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.data import shapes, tasks
from jaxrl_llm.distributed.sharding import make_mesh, rows_to_global
from jaxrl_llm.models.adapters.lora import split
from jaxrl_llm.models.files import hf
from jaxrl_llm.models.model import describe
from jaxrl_llm.models.net import Net
from jaxrl_llm.models.vision.patch_rows import PatchRowsConfig
from jaxrl_llm.models.vision.row_images import row_images
from jaxrl_llm.models.vision.tower import Vision
from jaxrl_llm.training.images import prompt_images
from jaxrl_llm.training.objectives.objective import Positions
from jaxrl_llm.training.offline import as_examples, pad_examples, with_images
from jaxrl_llm.training.packing.planner import PackingSpec, TypicalRows, make_packer
from jaxrl_llm.training.passes import images_of_rows, scored_logps
from jaxrl_llm.training.rollouts.dynamic_sampling import _as_wide
from jaxrl_llm.training.rollouts.experience import Rollouts, pack, placed, unpack
from jaxrl_llm.training.setup.given import Given
from jaxrl_llm.training.setup.mesh import build_mesh
from jaxrl_llm.training.setup.models import build_model
from jaxrl_llm.training.setup.objectives import objective_of
from jaxrl_llm.training.setup.run import build, make_optimizer
from jaxrl_llm.training.setup.specs import packing_spec, update_spec
from jaxrl_llm.training.update import init_state, make_update
from tests.training.packing.test_packed_updates import config_of, packer_of, sample_of

PROMPT = "<|image|>" * shapes.IMAGE_TOKENS
TILES = tasks.generate("shapes", size=4)


@pytest.fixture(scope="module")
def model():
    return describe("embedded:shapes")


def configured(root, tmp_path, **changes):
    config = load_config_file(f"{root / 'configs' / 'vision_grpo.py'}:tiny")
    config.output_dir = str(tmp_path / "run")
    config.checkpoint.every, config.eval.every, config.logging.backends = 1, 0, ("jsonl",)
    config.update_from_flattened_dict(changes)
    return config


def leaves(params):
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(params)}


def letters(completions, **_):
    """Rewards for random networks, which hardly ever answer right and would learn from nothing."""
    return [float(sum(map(ord, completion)) % 7) for completion in completions]


def logged(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


@pytest.mark.slow
def test_a_step_on_images_moves_all_of_the_encoder(root, tmp_path):
    """And the sampler reads the images that the update reads."""
    changes = {"total_steps": 1, "optimizer.schedule": "constant", "optimizer.warmup_steps": 0}
    config = configured(root, tmp_path, **changes, **{"checkpoint.every": 0, "eval.every": -1})
    model = build_model(config, build_mesh(config))
    before, config.model.random_init = leaves(model.params), False
    after = leaves(jaxrl_llm.train(config, model=model, rewards=[letters]).model.params)
    assert any("['vision']['encoder']" in path for path in after)
    for path, x in after.items():
        assert np.isfinite(x).all() and not np.array_equal(x, before[path]), path
    (line,) = logged(tmp_path / "run")
    assert line["sampling/sampling_logp_difference/max"] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("vision", "parts"), [("trained", ()), ("trained", ("model.text_model.norm",)), ("frozen", ()), ("lora", ())]
)
def test_grpo_steps_on_images(root, tmp_path, vision, parts):
    """Two steps, of which the second is resumed: the parameters that are to move do, and the others are the same."""
    changes = {"model.vision": vision, "model.frozen": parts} | ({"lora.rank": 2} if vision == "lora" else {})
    config = configured(root, tmp_path, **changes)
    whole = jaxrl_llm.train(config)
    config.output_dir, config.total_steps = str(tmp_path / "again"), 1
    before = leaves(jaxrl_llm.train(config).model.params)
    config.total_steps = 2
    resumed, after = leaves(jaxrl_llm.train(config).model.params), leaves(whole.model.params)
    for path, x in after.items():
        np.testing.assert_array_equal(resumed[path], x, err_msg=path)
    moved = {path for path, x in after.items() if not np.array_equal(x, before[path])}
    in_tower = {path for path in moved if path.startswith("['vision']")}
    assert moved - in_tower
    assert bool(in_tower) == (vision != "frozen")
    if vision == "lora":
        assert all("lora_" in path for path in moved)


@pytest.mark.slow
@pytest.mark.parametrize("packing", [False, True])
def test_sft_steps_on_images(root, tmp_path, packing):
    """A model that learns which answer goes with an image has a lower loss than one that is shown grey ones."""

    def loss(task):
        config = configured(root, tmp_path / task, **{"algorithm.name": "sft", "data.packing": packing})
        config.batch.prompts, config.total_steps, config.data.max_length = 16, 40, 16
        config.optimizer.learning_rate = 2e-3  # demonstrations bear more than samples do
        rows = [{**row, "completion": row["answer"]} for row in tasks.generate(task, size=8)]
        jaxrl_llm.train(config, train_dataset=rows)
        return logged(tmp_path / task / "run")[-1]["loss"]

    assert loss("shapes") < 0.3 * loss("shapes_blank")  # 0.036 and 0.463


# What the config.json of a family has in place of that of `embedded:shapes`.
FAMILIES = {
    "gemma3": {
        "text_config": {"model_type": "gemma3_text", "sliding_window": 3, "sliding_window_pattern": 2, "head_dim": 16},
        "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False},
        "image_token_index": 2,
        "mm_tokens_per_image": 4,
    },
    "qwen2_vl": {
        "text_config": {
            "model_type": "qwen2_vl_text",
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        },
        "vision_config": {"depth": 2, "num_heads": 4, "embed_dim": 48, "mlp_ratio": 2, "hidden_size": 64},
        "image_token_id": 2,
    },
    "qwen2_5_vl": {
        "text_config": {
            "model_type": "qwen2_5_vl_text",
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        },
        "vision_config": {"depth": 2, "num_heads": 4, "window_size": 12, "fullatt_block_indexes": [1]},
        "image_token_id": 2,
    },
    "qwen3_vl": {
        "text_config": {
            "model_type": "qwen3_vl_text",
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
        },
        "vision_config": {"depth": 2, "num_heads": 4, "num_position_embeddings": 9, "deepstack_visual_indexes": [0]},
        "image_token_id": 2,
    },
    "qwen3_5": {
        "text_config": {
            "model_type": "qwen3_5_text",
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5,
            },
        },
        "vision_config": {"depth": 2, "num_heads": 4, "num_position_embeddings": 9},
        "image_token_id": 2,
    },
    "internvl": {"text_config": {"model_type": "qwen3", "head_dim": 16}, "vision_config": {}, "image_token_id": 2},
    "glm4v": {
        "text_config": {
            "model_type": "glm4v_text",
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        },
        "vision_config": {"depth": 2, "num_heads": 4, "out_hidden_size": 64, "image_size": 12},
        "image_token_id": 2,
    },
    "mistral3": {
        "text_config": {"model_type": "mistral", "sliding_window": 3},
        "vision_config": {"model_type": "pixtral"},
        "image_token_index": 2,
    },
    "gemma4": {
        "text_config": {
            "model_type": "gemma4_text", "sliding_window": 3, "head_dim": 16, "global_head_dim": 16, "pad_token_id": 0,
            "layer_types": ["sliding_attention", "full_attention"], "hidden_size_per_layer_input": 0,
            "use_bidirectional_attention": "vision",
        },
        "vision_config": {
            "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 12, "pooling_kernel_size": 2,
            "position_embedding_size": 4,
        },
        "image_token_id": 2,
    },
    "llava": {
        "text_config": {"model_type": "qwen2"}, "image_token_index": 2, "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False, "patch_size": 12},
    },
    "paligemma": {
        "text_config": {"model_type": "gemma2", "head_dim": 16, "sliding_window": 3}, "image_token_index": 2,
        "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False, "patch_size": 12},
        "projection_dim": 64,
    },
    "lfm2_vl": {
        "text_config": {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
        "vision_config": {"vision_use_head": False, "num_patches": 9},
        "image_token_id": 2,
        "projector_hidden_size": 40,
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_steps_of_other_families_on_images(root, tmp_path, family, algorithm):
    """All of it moves; and the sampler and the update, of packed rows, compute the same of a prompt with an image.

    Delta nets, short convolutions and PaliGemma read no packed rows, and the scale of Gemma 4's layers stays as it is,
    as does the norm behind the layer that LLaVA reads.
    """
    shutil.copytree(hf.EMBEDDED / "shapes", tmp_path / family)
    shapes = json.loads((tmp_path / family / "config.json").read_text())
    entries = {"model_type": family, **FAMILIES[family]}
    parts = {name: shapes[name] | entries[name] for name in ("text_config", "vision_config")}
    write_json(tmp_path / family / "config.json", entries | parts)
    config = configured(root, tmp_path, **{"model.path": str(tmp_path / family), "algorithm.name": algorithm})
    # transformers makes any tokenizer.json beside a qwen3_5 one of Qwen3.5's kind, which drops the words of questions.
    config.model.tokenizer = "embedded:shapes"
    config.batch.packing = "auto" if family in ("qwen3_5", "lfm2_vl", "paligemma") else "true"
    config.data.max_length, config.total_steps = 16, 1
    rows = [{**row, "completion": row["answer"]} for row in tasks.generate("shapes", size=8)]
    dataset = rows if algorithm == "sft" else None
    rewards = None if algorithm == "sft" else [letters]
    first = jaxrl_llm.train(config, train_dataset=dataset, rewards=rewards).model
    seen = {"gemma3": "all", "gemma4": "sliding", "paligemma": "prompt"}
    assert first.net.config.vision.bidirectional == seen.get(family, "")
    before, config.total_steps = leaves(first.params), 2
    for path, x in leaves(jaxrl_llm.train(config, train_dataset=dataset, rewards=rewards).model.params).items():
        kept = path.endswith("['out_scale']") or (family == "llava" and "['encoder']['norm']" in path)
        assert np.isfinite(x).all() and np.array_equal(x, before[path]) == kept, path
    lines = logged(tmp_path / "run")
    assert len(lines) == 2
    if algorithm == "grpo":
        assert max(line["sampling/sampling_logp_difference/max"] for line in lines) < 1e-5


def test_the_task_is_answered_by_its_image_alone():
    rows = tasks.generate("shapes", size=1200)
    answers = {}
    for row in rows:
        answers.setdefault(row["prompt"].removeprefix(PROMPT), []).append(row["answer"])
    assert set(answers) == {"colour", "count", "where"}
    for given in answers.values():
        assert len(set(given)) == 4
        assert max(given.count(answer) for answer in set(given)) < 0.32 * len(given)
    blank = tasks.generate("shapes_blank", size=1200)
    assert [(row["prompt"], row["answer"]) for row in blank] == [(row["prompt"], row["answer"]) for row in rows]
    assert len({row["pixels"].tobytes() for row in blank}) == 1
    assert not {row["pixels"].tobytes() for row in rows} & {
        row["pixels"].tobytes() for row in tasks.generate("shapes", "test", 50)
    }


def test_the_answers_are_what_is_drawn():
    """Read off the image: the colour of its brightest pixels, the quadrant, and the cells with any of them."""
    for row in tasks.generate("shapes", size=60):
        image = (row["pixels"][0] + 1) * 127.5
        lit = image.max(axis=-1) > 120
        colour = image[lit].mean(axis=0)
        nearest = min(shapes.COLOURS, key=lambda name: np.abs(colour - shapes.COLOURS[name]).sum())
        cells = lit.reshape(4, 6, 4, 6).any(axis=(1, 3))
        y, x = (int(index.mean() >= 2) for index in np.nonzero(cells))
        found = {"colour": nearest, "count": str(cells.sum()), "where": shapes.QUADRANTS[2 * y + x]}
        assert row["answer"] == found[row["prompt"].removeprefix(PROMPT)]


def test_rows_are_padded_to_the_most_tiles(model):
    vision = model.net.config.vision
    tile, ids = TILES[0]["pixels"], [2] * 4
    images = row_images([[*ids * 3, 5], [4], ids], [np.concatenate([tile] * 3), None, tile], vision)
    assert images.pixels.shape == (3, 4, 24, 24, 3)
    np.testing.assert_array_equal(images.count, [3, 0, 1])
    np.testing.assert_array_equal(images.pixels[2, 0], tile[0])
    assert row_images([[4], [5]], [None, tile[:0]], vision) is None
    examples = [{"prompt_ids": [*ids, 5], "pixels": tile}, {"prompt_ids": [5]}]
    np.testing.assert_array_equal(prompt_images(examples, vision).count, [1, 0])


def test_rows_of_images_of_any_size(model):
    """Patches have room for the row with most of them, grids for that with most images; each for those of a queue."""
    vision = dataclasses.replace(model.net.config.vision, encoder=PatchRowsConfig(patch_size=6))
    wide, small = np.ones((12, 36, 3), np.float32), np.ones((12, 12, 3), np.float32)
    images = row_images([[2] * 4, [5], [2, 5]], [[wide, small], None, [small.tolist()]], vision)
    assert images.pixels.shape == (3, 16, 216)
    np.testing.assert_array_equal(images.count, [2, 0, 1])
    np.testing.assert_array_equal(images.grids, [[[2, 6], [2, 2]], [[0, 0], [0, 0]], [[2, 2], [0, 0]]])
    assert images.pixels[0].all() and images.pixels[2, :4].all() and not images.pixels[2, 4:].any()
    examples = [{"prompt_ids": [2] * 4, "pixels": [wide, small]}, {"prompt_ids": [5]}]
    np.testing.assert_array_equal(prompt_images(examples, vision).grids, images.grids[:2])
    with pytest.raises(ConfigError, match=r"4 image tokens .*its 1 tile should have 3: expand"):
        row_images([[2] * 4], [[wide]], vision)
    with pytest.raises(ConfigError, match=r"an image of shape \(12, 35, 3\) .* multiples of 12 pixels"):
        row_images([[2] * 3], [[wide[:, 1:]]], vision)
    few = jax.tree.map(jnp.asarray, row_images([[2]] * 3, [[small]] * 3, vision))
    held, fresh = _as_wide(few, jax.tree.map(jnp.asarray, images))
    assert jax.tree.map(jnp.shape, held) == jax.tree.map(jnp.shape, fresh)
    np.testing.assert_array_equal(held.grids[:, 0], few.grids[:, 0])


@pytest.mark.parametrize(
    ("ids", "tiles", "message"),
    [
        ([2] * 3, TILES[0]["pixels"], "3 image tokens .*its 1 tile should have 4"),
        ([2] * 4, None, "4 image tokens .*its 0 tiles should have 0"),
        ([2] * 4, TILES[0]["pixels"][:, :12], r"tiles of shape \(12, 24, 3\)"),
    ],
)
def test_rows_whose_images_do_not_fit_are_refused(model, ids, tiles, message):
    with pytest.raises(ConfigError, match=message):
        row_images([ids], [tiles], model.net.config.vision)


def test_images_for_a_text_model_are_refused():
    with pytest.raises(ConfigError, match="the model reads text alone"):
        row_images([[2] * 4], [TILES[0]["pixels"]], None)
    assert row_images([[2] * 4], [None], None) is None


def test_pairs_share_the_images_of_their_prompt(model):
    row = {"chosen_ids": [2] * 4 + [5], "chosen_mask": [0] * 4 + [1], "pixels": TILES[0]["pixels"]}
    row |= {"rejected_ids": [2] * 4 + [6], "rejected_mask": [0] * 4 + [1]}
    examples = as_examples([row])
    batch = with_images(pad_examples(examples, 8), examples, model.net)
    np.testing.assert_array_equal(batch.inputs.images.count, [1, 1])
    np.testing.assert_array_equal(batch.inputs.images.pixels[0], batch.inputs.images.pixels[1])
    assert isinstance(batch, Batch)


def test_a_process_reads_the_images_of_its_own_rows(model):
    """In arrays as wide as the others'; of a share without images too."""

    class Unread(list):
        """Two tiles of another process, which is not to open their files."""

        def __array__(self, *_, **__):
            raise AssertionError("read")

    tile = TILES[0]["pixels"][0]
    tiles = [None, tile[None], np.stack([tile] * 2), None]
    rows = [[{"ids": [2] * 4 * len(x if x is not None else ()) + [5], "mask": [1], "pixels": x}] for x in tiles]
    batch = Batch(Inputs(np.zeros((4, 9), np.int32), np.ones((4, 9), np.int32)), np.ones((4, 9), np.float32))
    whole = with_images(batch, rows, model.net).inputs.images
    for own in (slice(0, 2), slice(3, 4)):
        given = [[{**row, "pixels": None if row["pixels"] is None else Unread(row["pixels"])}] for (row,) in rows]
        given[own] = rows[own]
        found = with_images(batch, given, model.net, own).inputs.images
        jax.tree.map(lambda x, y, own=own: np.testing.assert_array_equal(x, y[own]), found, whole)


@pytest.mark.slow
def test_rows_read_what_was_encoded_once(model):
    """Log-probs of rows whose prompts were encoded once are those of rows that are encoded each."""
    net, params = model.net, model.net.init(jax.random.key(0))
    tokens = jnp.array([[2] * 4 + [3, 6], [2] * 4 + [3, 7], [0] * 4 + [3, 6], [0] * 4 + [3, 8]])
    segments = (tokens != 0).astype(jnp.int32)
    prompts = Images(jnp.asarray(np.stack([TILES[0]["pixels"], TILES[1]["pixels"]])), jnp.array([1, 0]))
    given, encoded = (images_of_rows(net, params, prompts, 2, encode, 1) for encode in (False, True))
    assert given.pixels.shape == (1, 2, 1, 24, 24, 3) and given.features is None
    assert encoded.pixels is None and encoded.features.shape == (1, 2, 4, 64)
    logps = [
        np.asarray(scored_logps(net, params, Inputs(tokens, segments, images=images), 1.0, 2, 1))
        for images in (given, encoded)
    ]
    np.testing.assert_allclose(logps[0], logps[1], atol=1e-6)
    assert np.abs(logps[0][:2, -1]).min() > 0


@pytest.mark.slow
@pytest.mark.parametrize("microbatch", [{"microbatch_tokens": 44, "pack_length": 22}, {"microbatch_rows": 2}], ids=str)
def test_an_update_of_rows_that_share_images_is_that_of_rows_with_their_own(model, microbatch, monkeypatch):
    """In packed rows and in others, where each image is encoded once for all micro-batches and its gradients are
    added up, encoder included; three groups of four, of which one has no image."""
    net = Net(dataclasses.replace(model.net.config, vision_training="trained"))
    mesh, draw, width, encoded = make_mesh(devices=jax.devices()[:1]), np.random.default_rng(0), 11, []
    tokens = np.repeat(draw.integers(3, net.config.vocab_size, (3, width)), 4, axis=0)
    tokens[:8, :4], tokens[8:, :4] = net.config.vision.image_token, 0
    tokens[:, 6:] = draw.integers(3, net.config.vocab_size, (12, width - 6))
    tokens *= np.arange(width) < draw.integers(7, width + 1, 12)[:, None]
    segments, mask = (tokens != 0).astype(np.int32), ((tokens != 0) & (np.arange(width) >= 6)).astype(np.float32)

    def numbers(mean, spread):
        return jnp.asarray((draw.normal(mean, spread, mask.shape) * mask).astype(np.float32))

    inputs = Inputs(jnp.asarray(tokens), jnp.asarray(segments), prompt_width=6)
    rows = Batch(inputs, jnp.asarray(mask), sample_logps=numbers(-3, 0.3), old_logps=numbers(-3, 0.3))
    rows = rows.replace(advantages=numbers(0, 1))
    prompts = Images(jnp.asarray(np.stack([tile["pixels"] for tile in TILES[:3]])), jnp.array([1, 1, 0]))
    own = Images(jnp.repeat(prompts.pixels, 4, axis=0), jnp.repeat(prompts.count, 4))
    given = {"microbatch_rows": 0, "microbatch_tokens": 0, "pack_length": 0} | microbatch
    config = config_of("grpo", **{f"batch__{name}": value for name, value in given.items()})
    params, encode = net.init(jax.random.key(0)), Vision.encode

    def counted(self, images, dtype, checkpointed):
        encoded.append(len(images.count))
        return encode(self, images, dtype, checkpointed)

    def updated(images):
        encoded.clear()
        batch = rows.replace(inputs=rows.inputs.replace(images=images))
        if "pack_length" in microbatch:
            batch = packer_of(config, net.config, mesh, objective, sample_of(batch))(batch)
        state = init_state(jax.tree.map(jnp.copy, params), optimizer, mesh)
        state, metrics = make_update(objective, optimizer, update_spec(config), mesh)(state, batch)
        return state.params, {name: float(metric.value) for name, metric in metrics.items()}, set(encoded)

    monkeypatch.setattr(Vision, "encode", counted)
    with jax.set_mesh(mesh):
        optimizer, objective = make_optimizer(config), objective_of(config, net)
        shared, metrics, of_prompts = updated(images_of_rows(net, params, prompts, 4, False, 1))
        expected, expected_metrics, of_rows = updated(own)
    assert of_prompts == {3}, of_rows
    assert metrics == pytest.approx(expected_metrics, rel=1e-5, abs=1e-6)
    moved = jax.tree.map(lambda x, y: float(jnp.abs(x - y).max()), expected, params)
    assert max(jax.tree.leaves(moved["vision"])) > 1e-2
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), shared, expected)


@pytest.mark.slow
def test_rows_that_begin_alike_see_their_own_images(model):
    """Packed rows of a group of agents' sessions, whose image tokens are the same and whose images are not."""
    net, params, mesh = model.net, model.net.init(jax.random.key(0)), make_mesh(devices=jax.devices()[:1])
    tokens = np.array([[3, *[2] * 4, 6, 7], [3, *[2] * 4, 6, 8]])
    segments, mask = np.ones(tokens.shape, np.int32), np.array([[0.0] * 6 + [1.0]] * 2)
    images = Images(jnp.asarray(np.stack([TILES[0]["pixels"], TILES[1]["pixels"]])), jnp.array([1, 1]))
    spec = PackingSpec("true", 0, 0, 0, group_size=2, whole_groups=False, documents=False, noise=False, own_images=True)
    packer = make_packer(spec, net.config, mesh, Positions(), TypicalRows(tokens, segments, mask))
    with jax.set_mesh(mesh):
        layout = packer.passing(*rows_to_global((tokens, segments, mask), mesh))
    expected, logps = (
        scored_logps(net, params, Inputs(tokens, segments, images=images, layout=layout), 1.0, 2, 1)
        for layout in (None, layout)
    )
    np.testing.assert_allclose(np.asarray(logps)[:, -1], np.asarray(expected)[:, -1], atol=1e-6)
    config = load_config_file("configs/vision_grpo.py:tiny")
    assert not packing_spec(config).own_images
    config.environment.agent = "agents.py:run"
    assert packing_spec(config).own_images


def test_what_is_frozen(model):
    net = model.net
    assert set(split(net.shapes(), net.config.frozen)[0]) == {"vision"}
    trained = dataclasses.replace(net.config, vision_training="trained")
    assert split(net.shapes(), trained.frozen) == ({}, net.shapes())


def test_a_queue_keeps_the_images(model):
    mesh = make_mesh()
    images = Images(jnp.asarray(np.stack([TILES[0]["pixels"]])), jnp.array([1]), grids=jnp.array([[[4, 4]]]))
    from jaxrl_llm.rollout.slots import Rollout

    rollout = Rollout(*(jnp.zeros((1, 2)) for _ in Rollout._fields))
    rollouts = Rollouts(rollout, [], ["a"], ["b"], np.zeros((1, 1), np.float32), images=images)
    (found,) = (placed(batch, mesh) for batch in unpack(pack([rollouts])))
    np.testing.assert_array_equal(found.images.pixels, images.pixels)
    np.testing.assert_array_equal(found.images.count, images.count)
    np.testing.assert_array_equal(found.images.grids, images.grids)


@pytest.mark.parametrize("lost", [{"algorithm.replay_groups": 2}, {"teacher.path": "embedded:shapes"}], ids=str)
def test_settings_that_lose_images_are_refused_before_the_first_step(root, tmp_path, lost):
    config, mesh = configured(root, tmp_path, **lost), make_mesh(devices=jax.devices()[:1])
    with jax.set_mesh(mesh), pytest.raises(ConfigError, match=f"^{next(iter(lost))} is set, but rows have images"):
        build(config, mesh, Given(train_dataset=TILES))
