"""Rows with images to token rows and tiles, on the folder of a tiny SmolVLM, and their refusals."""

import json
import shutil
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from jaxrl_llm.config import ConfigError, default
from jaxrl_llm.data import loading, opening
from jaxrl_llm.data.image_rows import ImageReader, Tiles
from jaxrl_llm.data.images import ImageLimits
from jaxrl_llm.data.length_limit import LimitedTokenizer
from jaxrl_llm.data.tokenize import RowTokenizer
from jaxrl_llm.models.files import hf
from jaxrl_llm.training.setup.data import tokenizer_of
from jaxrl_llm.training.setup.specs import data_spec
from tests.data.qwen_vl import qwen_vl_folder
from tests.data.smolvlm import picture, png, smolvlm_folder
from tests.data.vl_folders import vl_folder

IMAGE, OTHER = picture(40, 20), picture(9, 30, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return smolvlm_folder(tmp_path_factory.mktemp("model") / "smolvlm")


@pytest.fixture(scope="module")
def tokenizer(folder) -> Any:
    tokenizer = hf.load_tokenizer(folder)
    hf.remember_images(tokenizer, folder)
    return tokenizer


@pytest.fixture(scope="module")
def theirs(folder, tokenizer):
    """transformers' processor; that of SmolVLM writes the text of Idefics3's, and asks for packages of videos."""
    return Idefics3Processor(SmolVLMImageProcessorPil.from_pretrained(folder), tokenizer, image_seq_len=4)


def user(*content):
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    return {"role": "user", "content": parts}


PART = {"type": "image"}


def reference(theirs, messages, images, prompt=True):
    text = theirs.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    made = theirs(text=text, images=[images], return_tensors="np")
    return made["input_ids"][0].tolist(), np.moveaxis(made["pixel_values"][0], 1, -1)


def reader(kind, tokenizer, limit=None, overlong="error", **options):
    return LimitedTokenizer(RowTokenizer(kind, tokenizer, images=ImageReader(tokenizer, **options)), limit, overlong)


PROMPTS = {
    "verl": {"prompt": [{"role": "user", "content": "<image>what?<image>"}], "images": [{"bytes": png(IMAGE)}, OTHER]},
    "parts": {"prompt": [user(PART, "what?", PART)], "images": [IMAGE, OTHER]},
    "held in parts": {"prompt": [user(PART | {"image": png(IMAGE)}, "what?", PART | {"image": OTHER})]},
}  # fmt: skip


@pytest.mark.parametrize("form", PROMPTS)
def test_a_prompt_is_that_of_transformers_processor(tokenizer, theirs, form):
    """Token ids and pixels, of the whole chat template."""
    row = reader("prompts", tokenizer)(PROMPTS[form])
    assert row is not None
    ids, pixels = reference(theirs, [user(PART, "what?", PART)], [IMAGE, OTHER])
    assert row["prompt_ids"] == ids
    assert isinstance(row["pixels"], Tiles) and len(row["pixels"]) == len(pixels)
    np.testing.assert_array_equal(np.asarray(row["pixels"], np.float32), pixels)
    assert json.loads(json.dumps(row["prompt"])) == [user(PART, "what?", PART)]  # what records and queues keep


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Any:
    folder = qwen_vl_folder(tmp_path_factory.mktemp("model") / "qwen")
    tokenizer = hf.load_tokenizer(folder)
    hf.remember_images(tokenizer, folder)
    return tokenizer


@pytest.mark.parametrize("form", PROMPTS)
def test_a_prompt_with_images_of_any_size(qwen, form):
    """As many image tokens as the image has squares of patches, behind and before the tags of the chat template."""
    row = reader("prompts", qwen)(PROMPTS[form])
    assert row is not None
    # 40 x 20 pixels are over the bound of 512, and become 32 x 16; 9 x 30 become 8 x 32.
    first, second = (f"<|vision_start|>{'<|image_pad|>' * tokens}<|vision_end|>" for tokens in (8, 4))
    system = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    text = f"{system}<|im_start|>user\n{first}what?{second}<|im_end|>\n<|im_start|>assistant\n"
    assert row["prompt_ids"] == qwen(text, add_special_tokens=False)["input_ids"]
    assert [image.shape for image in row["pixels"]] == [(16, 32, 3), (32, 8, 3)] and len(row["pixels"]) == 2


def test_a_plain_text_has_the_tags_of_images(qwen):
    row = reader("completions", qwen)({"prompt": "see <image>: ", "completion": "a", "image": OTHER})
    assert row is not None
    text = f"see <|vision_start|>{'<|image_pad|>' * 4}<|vision_end|>: a<|im_end|>"
    assert row["ids"] == qwen(text, add_special_tokens=False)["input_ids"]
    assert sum(row["mask"]) == 2


def test_conversations_with_images_are_learned_outside_of_them(tokenizer, theirs):
    messages = [user(PART, "what?"), {"role": "assistant", "content": "a cat"}, user(PART, "and?"),
                {"role": "assistant", "content": "a dog"}]  # fmt: skip
    parts = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} if turn["role"] == "assistant" else turn
             for turn in messages]  # fmt: skip
    ids, pixels = reference(theirs, parts, [IMAGE, OTHER], prompt=False)
    row = reader("completions", tokenizer)({"messages": messages, "images": [IMAGE, OTHER]})
    assert row is not None and row["ids"] == ids
    np.testing.assert_array_equal(np.asarray(row["pixels"]), pixels)
    learned = tokenizer.decode([token for token, on in zip(ids, row["mask"], strict=True) if on])
    assert learned == " a cat<end_of_utterance>\n a dog<end_of_utterance>\n"
    whole = RowTokenizer("completions", tokenizer, loss_on="all", images=ImageReader(tokenizer))
    row = whole({"messages": messages, "images": [IMAGE, OTHER]})
    assert row is not None
    learned = tokenizer.decode([token for token, on in zip(ids, row["mask"], strict=True) if on])
    assert "image" not in learned and "row_1" not in learned and "what?" in learned


def test_plain_text_and_pairs(tokenizer, theirs):
    row = reader("completions", tokenizer)({"prompt": "see <image>: ", "completion": "a", "image": IMAGE})
    made = theirs(text="see <image>: ", images=[IMAGE], return_tensors="np")["input_ids"][0].tolist()
    assert row is not None and row["ids"] == [*made, ord("a"), tokenizer.eos_token_id]
    prompt = reader("prompts", tokenizer)({"prompt": "see <image>: ", "image": IMAGE})
    assert prompt is not None and prompt["prompt_ids"] == made and prompt["prompt"] == "see <image>: "
    answers = {name: [{"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
    ids, pixels = reference(theirs, [user(PART, "what?")], [IMAGE])
    for example in (
        {"prompt": [{"role": "user", "content": "what?"}], **answers, "images": [IMAGE]},
        {name: [user(PART, "what?"), *answer] for name, answer in answers.items()} | {"images": [IMAGE]},
    ):
        row = reader("pairs", tokenizer)(example)
        assert row is not None and row["chosen_ids"][: len(ids)] == row["rejected_ids"][: len(ids)] == ids
        np.testing.assert_array_equal(np.asarray(row["pixels"]), pixels)


def test_no_row_is_truncated_inside_its_images(tokenizer):
    example = {"prompt": [user("a long question", PART)], "image": IMAGE}
    whole = reader("prompts", tokenizer)(example)
    assert whole is not None
    length = len(whole["prompt_ids"])
    with pytest.raises(ConfigError, match=f"the prompt has {length} tokens, more than"):
        reader("prompts", tokenizer, length - 1)(example)
    kept = reader("prompts", tokenizer, length - 2, "truncate_left")
    row = kept(example)
    assert row is not None and row["prompt_ids"] == whole["prompt_ids"][2:]
    dropped = reader("prompts", tokenizer, length - 2, "truncate_left")
    first = {
        "prompt": [user(PART, "a question"), {"role": "assistant", "content": "so"}, user("x" * 40)],
        "image": IMAGE,
    }
    dropped.limit = 50
    assert dropped(first) is None and (dropped.long, dropped.split_images) == (1, 1)
    with pytest.raises(ConfigError, match="1 of these would have been truncated inside their images"):
        dropped.report(0)


def test_a_text_model_refuses_images(tokenizer_folder):
    plain = hf.load_tokenizer(tokenizer_folder)
    parts = {"prompt": [user(PART, "?")]}
    for example in ({"prompt": "a <image>", "images": [png(IMAGE)]}, {"prompt": "a", "image": "a/b.PNG"}, parts):
        with pytest.raises(ConfigError, match=r"the model reads text alone: use one .* data\.image_key=none"):
            reader("prompts", plain)(example)
    row = reader("prompts", plain)({"prompt": "a", "image": "registry/container:latest"})
    assert row is not None and row["prompt_ids"] == [ord("a")]
    row = reader("prompts", plain, key="none")({"prompt": "a", "image": png(IMAGE)})
    assert row is not None and "pixels" not in row


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({"prompt": [user(PART, "<image>")], "image": IMAGE}, "wrote <image> 2 times for a row of 1 image;"),
        ({"prompt": [user(PART)], "images": ["https://example.com/a.png"]}, r"image 0: .*data\.image_urls=False"),
        ({"prompt": [user(PART)], "images": [b"broken"]}, "image 0: an image of 6 bytes is no image"),
        ({"prompt": [user(PART)], "images": []}, "1 placeholder .* and 0 images"),
        ({"prompt": "an <image> tag"}, "no images, and its text has <image>, which stands for one"),
        ({"prompt": [user("<video>?")], "images": [], "videos": ["a.mp4"]}, "the row has videos in the column"),
    ],
)
def test_rows_that_cannot_be_read_are_refused(tokenizer, example, message):
    with pytest.raises(ConfigError, match=message):
        reader("prompts", tokenizer)(example)


@pytest.mark.parametrize("entry", ["written", "left out", "left out, without a processor"])
def test_an_image_token_in_a_row_without_images(folder, tmp_path, entry):
    """transformers leaves entries out of config.json that are the family's default."""
    shutil.copytree(folder, copy := tmp_path / "model")
    config = json.loads((copy / "config.json").read_text())
    token = config["image_token_id"] if entry == "written" else config.pop("image_token_id")
    (copy / "config.json").write_text(json.dumps(config))
    if entry == "left out, without a processor":
        (copy / "preprocessor_config.json").unlink()
        (copy / "processor_config.json").unlink(missing_ok=True)
    tokenizer = hf.load_tokenizer(copy)
    hf.remember_images(tokenizer, copy)
    own = ImageReader(tokenizer)
    own.check_none([token + 1])
    if "processor" in entry:
        assert own.image_id is None
        return
    assert own.image_id == token
    with pytest.raises(ConfigError, match="the row has no images, and its text has <image>, which stands for one"):
        own.check_none([token + 1, token])


def test_a_template_without_images_is_refused(tokenizer, folder):
    other: Any = hf.load_tokenizer(folder)
    hf.remember_images(other, folder)
    other.chat_template = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    with pytest.raises(ConfigError, match="0 image tokens, and 12 are those of its 1 image: the chat"):
        reader("prompts", other)({"prompt": [user(PART, "?")], "image": IMAGE})


def config_of(folder, path):
    config = default()
    config.model.path, config.data.path, config.algorithm.name = str(folder), str(path), "grpo"
    return config


def test_files_of_rows_and_paths_beside_them(folder, tmp_path):
    """A parquet file as verl writes it, with bytes and paths that start at its folder."""
    (tmp_path / "pictures").mkdir()
    OTHER.save(tmp_path / "pictures" / "b.png")
    prompt = [{"role": "user", "content": "<image>what?"}]
    rows = [
        {"data_source": "d", "prompt": prompt, "images": [{"bytes": png(IMAGE), "path": None}],
         "reward_model": {"style": "rule", "ground_truth": "1"}},
        {"data_source": "d", "prompt": prompt, "images": [{"bytes": None, "path": "pictures/b.png"}],
         "reward_model": {"style": "rule", "ground_truth": "2"}},
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    config = config_of(folder, tmp_path / "rows.parquet")
    tokenizer, spec = tokenizer_of(config), data_spec(config)
    made = loading.tokenized(spec, opening.open_sources(spec, tokenizer), "prompts", tokenizer).rows
    for row, image in zip(made, (IMAGE, OTHER), strict=True):
        (read,) = row["pixels"].read()
        assert read.size == image.size and read.tobytes() == image.tobytes()
    (tmp_path / "pictures" / "b.png").unlink()
    with pytest.raises(ConfigError, match=r"b\.png cannot be read"):
        np.asarray(made[1]["pixels"])
    with pytest.raises(ConfigError, match=r"rows\.parquet row 1: image 0: the image 'pictures/b\.png' is no file here"):
        loading.tokenized(spec, opening.open_sources(spec, tokenizer), "prompts", tokenizer)


def test_columns_that_datasets_decodes_are_read_within_bounds(folder):
    """As TRL's data sets have them: the library would decode an image of any size before it is looked at."""
    import datasets

    rows = datasets.Dataset.from_dict(
        {"prompt": [[{"role": "user", "content": "?"}]], "images": [[IMAGE]]},
        features=datasets.Features(
            {"prompt": [{"role": datasets.Value("string"), "content": datasets.Value("string")}],
             "images": datasets.List(datasets.Image())}
        ),
    )  # fmt: skip
    config = config_of(folder, "unused")
    tokenizer, spec = tokenizer_of(config), data_spec(config)
    (row,) = loading.tokenized(spec, opening.open_sources(spec, tokenizer, rows), "prompts", tokenizer).rows
    assert row["pixels"].read()[0].tobytes() == IMAGE.tobytes() and isinstance(row["images"][0]["bytes"], bytes)
    config.data.image_pixels = 799
    spec = data_spec(config)
    assert spec.image_limits == ImageLimits(pixels=799)
    with pytest.raises(ConfigError, match=r"40 x 20 pixels, and data\.image_pixels=799"):
        loading.tokenized(spec, opening.open_sources(spec, tokenizer, rows), "prompts", tokenizer)


def test_an_image_without_patches_is_named_with_its_row(tmp_path):
    folder = vl_folder(tmp_path / "mistral3", "mistral3")
    config = config_of(folder, "unused")
    tokenizer, spec = tokenizer_of(config), data_spec(config)
    rows = [{"prompt": "<image>", "images": [picture(*size)]} for size in ((40, 20), (300, 2))]
    with pytest.raises(ConfigError, match=r"row 1: an image of 300 x 2 pixels, scaled to .*; crop it, or drop the row"):
        loading.tokenized(spec, opening.open_sources(spec, tokenizer, rows), "prompts", tokenizer)


@pytest.mark.slow
def test_a_stream_reads_images(folder):
    config = config_of(folder, "unused")
    config.data.streaming, config.batch.prompts = True, 1
    tokenizer, spec = tokenizer_of(config), data_spec(config)
    sources = opening.open_sources(spec, tokenizer, [{"prompt": "<image>", "images": [IMAGE]}])
    (row,) = next(loading.stream(spec, sources, "prompts", tokenizer))
    expected = reader("prompts", tokenizer)({"prompt": "<image>", "images": [IMAGE]})
    assert expected is not None and row["prompt_ids"] == expected["prompt_ids"]
    np.testing.assert_array_equal(np.asarray(row["pixels"]), np.asarray(expected["pixels"]))
