"""Users' rows with images end to end: verl's parquet file through GRPO to a folder that transformers loads; pairs."""

import json

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import jaxrl_llm
from jaxrl_llm.config import ConfigError, default
from jaxrl_llm.data import image_processors
from jaxrl_llm.data.image_rows import ImageReader
from jaxrl_llm.data.tokenize import RowTokenizer
from jaxrl_llm.models.vision.row_images import row_images
from jaxrl_llm.training.images import shown_images
from jaxrl_llm.training.setup.data import tokenizer_of
from tests.data.qwen_vl import FOLDERS
from tests.data.smolvlm import picture, png
from tests.data.vl_folders import PARTS as OTHERS
from tests.data.vl_folders import as_transformers, with_open_gates
from tests.models.conftest import variants

SIZES = [(40, 20), (16, 16), (9, 30), (30, 31)]
OPTIONS = {  # with which an image is fewer tokens; those of the others are "max_pixels=128"
    "smolvlm": "longest_edge=16", "mistral3": "longest_edge=16", "internvl": "max_patches=1", "glm4v": "max_pixels=256",
    "aya_vision": "max_patches=1", "cohere2_vision": "max_patches=1", "glm4v_moe": "max_pixels=256",
    "pixtral": "longest_edge=16", "gemma4": "max_soft_tokens=70", "lfm2_vl": "max_tiles=2",
    "gemma4_unified": "max_soft_tokens=70", "glm46v": "max_pixels=256", "glm_ocr": "max_pixels=256",
    "ovis2": "max_patches=1", "kimi_k25": "max_patches=4", "lighton_ocr": "longest_edge=16",
    "glm5_next": "max_image_tokens=4",
}  # fmt: skip
PICTURES, UNLIKE = ([picture(*size, first + seed) for seed, size in enumerate(SIZES)] for first in (0, 9))


@pytest.fixture(scope="module", params=variants(FOLDERS, ("smolvlm",)))
def folder(request, tmp_path_factory):
    return FOLDERS[request.param](tmp_path_factory.mktemp("model") / request.param)


def verl_rows():
    """One image, two images, and none."""
    prompts = ["<image>what?", "<image><image>which?", "why?", "<image>where?"]
    images = [PICTURES[:1], PICTURES[1:3], [], PICTURES[3:]]
    return [
        {
            "data_source": "pictures",
            "prompt": [{"role": "user", "content": prompt}],
            "images": [{"bytes": png(image), "path": None} for image in own],
            "reward_model": {"style": "rule", "ground_truth": str(len(own))},
        }
        for prompt, own in zip(prompts, images, strict=True)
    ]


def configured(folder, tmp_path, **changes):
    config = default()
    config.model.path, config.model.random_init, config.model.vision = str(folder), True, "trained"
    config.output_dir, config.logging.backends = str(tmp_path / "run"), ("jsonl",)
    config.total_steps, config.batch.prompts, config.rollout.group_size = 2, 4, 2
    config.rollout.max_prompt_length, config.rollout.max_completion_length = 128, 4
    config.data.max_length, config.eval.every, config.checkpoint.every = 144, -1, 0
    if "gemma4" in str(folder):  # whose images are always as many tokens as they may be
        config.rollout.max_prompt_length, config.data.max_length = 320, 336
    config.update_from_flattened_dict(changes)
    return config


@pytest.mark.slow
def test_verls_rows_to_a_folder_that_transformers_loads(folder, tmp_path):
    """Two steps of GRPO; the reward sees the images; the exported model and transformers' give the same logits."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForImageTextToText

    from tests.models.images import as_published

    pq.write_table(pa.Table.from_pylist(verl_rows()), tmp_path / "rows.parquet")
    seen = {}

    def reward(prompts, completions, images, ground_truth, **kwargs):
        assert [str(len(own)) for own in images] == ground_truth
        for prompt, own in zip(prompts, images, strict=True):
            seen[json.dumps(prompt)] = [image.tobytes() for image in own]
        return [float(len(completion[0]["content"]) % 3) for completion in completions]

    changes = {"data.path": str(tmp_path / "rows.parquet"), "model.vision": "frozen"}
    result = jaxrl_llm.train(configured(folder, tmp_path, **changes), rewards=reward)
    assert len(seen) == 4 and sorted(map(len, seen.values())) == [0, 1, 1, 2]
    assert [image.tobytes() for image in PICTURES[1:3]] in seen.values()
    rows = pq.read_table(tmp_path / "run" / "completions" / "completions_00002.parquet").to_pylist()
    shown = [json.loads(row["images"]) if row["images"] else [] for row in rows]
    assert sorted(map(len, shown)) == [0, 0, 1, 1, 1, 1, 2, 2]
    assert all(url.startswith("data:image/png;base64,") and len(url) < 8192 for urls in shown for url in urls)

    out = tmp_path / "exported"
    jaxrl_llm.save_hf(with_open_gates(result.model), out)
    assert image_processors.load(out, result.model.tokenizer) is not None
    tokenize = RowTokenizer("prompts", result.model.tokenizer, images=ImageReader(result.model.tokenizer))
    row = tokenize({"prompt": verl_rows()[1]["prompt"], "images": PICTURES[1:3]})
    assert row is not None
    again, ids = jaxrl_llm.load_model(out), np.array([row["prompt_ids"]])
    own = again(ids, images=row_images(ids.tolist(), [row["pixels"]], again.net.config.vision))
    theirs = as_published(AutoModelForImageTextToText.from_pretrained(out, attn_implementation="eager").eval())
    given = {"input_ids": torch.tensor(ids)}
    if folder.name in OTHERS:
        given |= as_transformers(out, PICTURES[1:3], ids)
        values = given.pop("pixel_values")
    elif folder.name == "smolvlm":
        values = torch.tensor(np.asarray(row["pixels"]).transpose(0, 3, 1, 2))[None]
    else:
        made = Qwen2VLImageProcessorPil.from_pretrained(out)(images=PICTURES[1:3], return_tensors="pt")
        values, grids = made["pixel_values"], made["image_grid_thw"]
        is_image = given["input_ids"] == theirs.config.image_token_id
        given |= {"image_grid_thw": grids, "mm_token_type_ids": is_image.int()}
    with torch.no_grad():
        logits = theirs(pixel_values=values, **given).logits
        blank = theirs(pixel_values=values * 0 + 0.5, **given).logits
    np.testing.assert_allclose(np.asarray(own), logits.numpy(), atol=2e-5)
    assert np.abs(np.asarray(own) - blank.numpy()).max() > 1e-3


@pytest.mark.slow
def test_options_of_the_image_processor(folder, tmp_path):
    """Rows are read by them, and the exported folder reads images so by itself, also in transformers."""
    if "llava" in folder.name or folder.name in ("paligemma", "mllama", "deepseek_vl"):
        pytest.skip("images of LLaVA, PaliGemma, Llama 3.2 Vision and DeepSeek-VL have no options")
    image, qwen = picture(64, 64), folder.name.startswith("qwen")
    options = OPTIONS.get(folder.name, "max_pixels=128")
    row = {"prompt": [{"role": "user", "content": "<image>what?"}], "images": [image], "completion": "a cat"}
    config = configured(folder, tmp_path, **{"algorithm.name": "sft", "total_steps": 0})
    config.data.image_processor = options

    def read(tokenizer):
        made = RowTokenizer("prompts", tokenizer, images=ImageReader(tokenizer))(row)
        assert made is not None
        return made["prompt_ids"], [np.asarray(tile) for tile in made["pixels"]]

    plain, given = (
        read(tokenizer_of(configured(folder, tmp_path, **x))) for x in ({}, {"data.image_processor": options})
    )
    assert len(given[0]) < len(plain[0])
    result = jaxrl_llm.train(config, train_dataset=[row] * 4)
    jaxrl_llm.save_hf(result.model, tmp_path / "exported")
    again = jaxrl_llm.load_model(tmp_path / "exported")
    for found in (read(result.model.tokenizer), read(again.tokenizer)):
        assert found[0] == given[0]
        jax.tree.map(np.testing.assert_array_equal, found[1], given[1])
    entries = json.loads((tmp_path / "exported" / "preprocessor_config.json").read_text())
    name, value = options.split("=")
    assert (entries | (entries.get("size") or {}))["longest_edge" if name == "max_pixels" else name] == int(value)
    if qwen:
        assert Qwen2VLImageProcessorPil.from_pretrained(tmp_path / "exported").size["longest_edge"] == 128
    kept = tokenizer_of(configured(folder, tmp_path), model=result.model)  # of another run with the model in memory
    assert read(kept)[0] == given[0]


def test_options_for_a_text_model_are_refused(tmp_path):
    config = configured("embedded:tiny", tmp_path, **{"data.image_processor": "max_pixels=128"})
    config.model.path, config.model.vision = default().model.path, "frozen"
    with pytest.raises(ConfigError, match="image_processor is 'max_pixels=128', but the model reads text alone"):
        tokenizer_of(config)


def losses_of(pictures, folder, tmp_path, algorithm):
    """Of two steps, of questions about the pictures."""
    answers = [[{"role": "assistant", "content": word}] for word in ("a cat", "a dog")]
    answers = {"completion": answers[0]} if algorithm == "sft" else {"chosen": answers[0], "rejected": answers[1]}
    prompt = [{"role": "user", "content": "what?"}]
    rows = [{"prompt": prompt, "images": [image], **answers} for image in pictures]
    config = configured(folder, tmp_path, **{"algorithm.name": algorithm, "total_steps": 2})
    config.optimizer.learning_rate, config.algorithm.beta = 1e-2, 0.1 if algorithm == "preference" else 0.0
    return [step["loss"] for step in jaxrl_llm.train(config, train_dataset=rows).metrics]


# For what depends on no family: tiles of one size, patches of images of any size, layers that read images alone.
ONE_OF_EACH = pytest.mark.parametrize(
    "folder", variants(("smolvlm", "qwen2_vl", "mllama"), ("smolvlm", "qwen2_vl")), indirect=True
)


@pytest.mark.slow
@ONE_OF_EACH
@pytest.mark.parametrize("algorithm", ["sft", "preference"])
def test_trls_rows_are_learned(folder, tmp_path, algorithm):
    """Losses of rows with images are finite, and those of other images, as large, are others."""
    losses = losses_of(PICTURES, folder, tmp_path / "some", algorithm)
    others = losses_of(UNLIKE, folder, tmp_path / "others", algorithm)
    assert np.isfinite(losses).all() and len(losses) == 2 and losses[1] != others[1]


@pytest.mark.slow
@ONE_OF_EACH
def test_evaluation_sees_the_images(folder, tmp_path):
    """Of rows in memory; a row is answered right where its image is the one that it was made with."""

    def reward(completions, images, ground_truth, **kwargs):
        known = [image.tobytes() for image in PICTURES]
        return [float(sum(image.tobytes() in known for image in own) == int(truth))
                for own, truth in zip(images, ground_truth, strict=True)]  # fmt: skip

    config = configured(folder, tmp_path, **{"eval.samples": 2, "eval.prompts": 4})
    metrics = jaxrl_llm.evaluate(config, eval_dataset=verl_rows(), rewards=reward)
    assert metrics["eval/accuracy"] == 1.0


def test_a_text_model_refuses_the_rows_before_it_is_loaded(tmp_path):
    config = configured("embedded:tiny", tmp_path)
    config.model.path, config.model.vision = default().model.path, "frozen"
    with pytest.raises(ConfigError, match=r"row 0: the row has images in column 'images', but the model reads text"):
        jaxrl_llm.train(config, train_dataset=verl_rows(), rewards=lambda completions, **_: [0.0] * len(completions))


@ONE_OF_EACH
def test_records_have_thumbnails(folder):
    tokenizer = tokenizer_of(configured(folder, folder))
    tokenize = RowTokenizer("prompts", tokenizer, images=ImageReader(tokenizer))
    examples = [tokenize({"prompt": row["prompt"], "images": row["images"]}) for row in verl_rows()]
    shown = shown_images([row for row in examples if row is not None], 2)
    assert shown is not None
    assert [len(own) for own in shown[0]] == [1, 1, 2, 2, 0, 0, 1, 1] and shown[1][4] is None
    assert shown_images([{"prompt": "text"}], 2) is None
