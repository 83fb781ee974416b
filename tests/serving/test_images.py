"""Images in requests: those of `data:` URLs are seen, as `generate` sees them, and others are refused."""

import base64
import concurrent.futures
import io
import struct
import zlib

import httpx
import jax
import pytest
from rich.console import Console

import jaxrl_llm
from jaxrl_llm.commands import generate as command
from jaxrl_llm.commands.chat import Speaker, answerer, converse
from jaxrl_llm.config import ConfigError
from jaxrl_llm.data.tokenize import PIXELS
from jaxrl_llm.models.model import load_model
from jaxrl_llm.serving.app import Limits
from tests.data.qwen_vl import FOLDERS
from tests.data.smolvlm import picture, png
from tests.data.vl_folders import with_open_gates
from tests.models.conftest import variants

IMAGES = [picture(40, 20), picture(40, 20, 1)]


@pytest.fixture(scope="module", params=variants(FOLDERS, ("smolvlm",)))
def model(request, tmp_path_factory):
    folder = FOLDERS[request.param](tmp_path_factory.mktemp("model") / request.param)
    return with_open_gates(load_model(folder, init_key=jax.random.key(0)))


# Of what does not depend on the family: tiles of one size, and patches of images of any size.
ONE_OF_EACH = pytest.mark.parametrize("model", variants(("smolvlm", "qwen2_vl"), ("smolvlm",)), indirect=True)


def url_of(image):
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(png(image)).decode()}"}}


def message(*parts):
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "what is this? " * 6}]}]


@pytest.mark.slow
@pytest.mark.filterwarnings("error:Some donated buffers")
def test_a_request_with_an_image_is_answered_as_generate_does(listening, model):
    """With kept texts too: of two requests with the same tokens, the second has its own image."""
    running = listening(Limits(300, body=100_000), model=model, prefixes=2**24)
    answers = []
    plain = {"messages": message(), "temperature": 0, "max_tokens": 24}  # is sampled beside those with images
    with concurrent.futures.ThreadPoolExecutor(1) as beside:
        other = beside.submit(httpx.post, f"{running.url}/v1/chat/completions", json=plain, timeout=300)
        for image in IMAGES:
            body = {"messages": message(url_of(image)), "temperature": 0, "max_tokens": 6, "logprobs": True, "n": 2}
            reply = httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=300).raise_for_status().json()
            (text,) = jaxrl_llm.generate(model, [message({"type": "image"})], 6, temperature=0, images=[[image]])
            assert [choice["message"]["content"] for choice in reply["choices"]] == [text, text]
            answers.append([token["logprob"] for token in reply["choices"][0]["logprobs"]["content"]])
        text = other.result().raise_for_status().json()["choices"][0]["message"]["content"]
        assert [text] == jaxrl_llm.generate(model, [message()], 24, temperature=0)
    assert answers[0][0] != answers[1][0]
    assert running.server.queue.counts.prefix_hits == 0


def bomb(width: int, height: int) -> str:
    """A PNG of so many pixels that says so in a few bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    data = b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


@ONE_OF_EACH
@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}, "send the image itself"),
        ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, "send the image itself"),
        ({"type": "image", "image": "/etc/passwd"}, "send the image itself"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,YWJj"}}, "is no image that can be read"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,@@"}}, "is no base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png"}}, "without a comma"),
        ({"type": "image_url", "image_url": {"url": "data:;base64," + "A" * 4}}, "is no image that can be read"),
        ({"type": "image_url", "image_url": {"url": bomb(60_000, 60_000)}}, "pixels"),
        ({"type": "image_url", "image_url": {"url": bomb(300, 300)}}, "truncated or broken"),
    ],
)
def test_images_that_are_not_in_the_request_are_refused(listening, model, part, words):
    running = listening(Limits(300, body=100_000), model=model)
    reply = httpx.post(f"{running.url}/v1/chat/completions", json={"messages": message(part)}, timeout=60)
    assert reply.status_code == 400 and words in reply.json()["error"]["message"]


@pytest.mark.slow
def test_text_has_no_token_of_an_image(listening, model):
    """In a chat, as text and as ids."""
    running, token = listening(Limits(300, body=100_000), model=model), model.net.config.vision.image_token
    word = model.tokenizer.convert_ids_to_tokens(token)
    chat = {"messages": message({"type": "text", "text": f"see {word} there"})}
    bodies = [("chat/completions", chat), *(("completions", {"prompt": prompt}) for prompt in (f"see {word}", [token]))]
    for path, body in bodies:
        reply = httpx.post(f"{running.url}/v1/{path}", json=body, timeout=60)
        assert reply.status_code == 400
        assert f"has no images, and its text has {word}" in reply.json()["error"]["message"]


@pytest.mark.slow
@ONE_OF_EACH
def test_images_are_bounded_together(listening, model):
    """Bytes of the tiles of all requests; room is there again when an answer has ended."""
    own = message(url_of(picture(8, 8)))
    (row,) = command.prompt_rows(model, [message({"type": "image"})], [[picture(8, 8)]])
    running = listening(Limits(300, body=100_000, images=row[PIXELS].nbytes), model=model)
    with httpx.Client(base_url=f"{running.url}/v1", timeout=300) as web:
        for _ in range(4):
            assert web.post("/chat/completions", json={"messages": own, "max_tokens": 2}).status_code == 200
        several = {"messages": message(*[url_of(picture(8, 8))] * 2), "max_tokens": 2}
        reply = web.post("/chat/completions", json=several)
        assert reply.status_code == 400 and "bytes as tiles" in reply.json()["error"]["message"]


def test_a_text_model_refuses_images(listening):
    reply = httpx.post(f"{listening().url}/v1/chat/completions", json={"messages": message(url_of(IMAGES[0]))})
    assert reply.status_code == 400 and "this model reads text" in reply.json()["error"]["message"]


@pytest.mark.slow
@ONE_OF_EACH
def test_the_command_reads_files(model, tmp_path, capsys, monkeypatch):
    IMAGES[0].save(tmp_path / "a.png")
    monkeypatch.setattr(command, "load_model", lambda *_, **__: model)
    given = ["--model=smolvlm", "--temperature=0", "--max_new_tokens=6"]
    command.main([*given, "--prompt=see <image> and say", f"--image={tmp_path / 'a.png'}"])
    printed = capsys.readouterr().out.removesuffix("\n")
    (text,) = jaxrl_llm.generate(model, ["see <image> and say"], 6, temperature=0, images=[[IMAGES[0]]])
    assert printed == text
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "see <image> and say", "images": ["a.png"]}\n')
    command.main([*given, f"--prompts_file={tmp_path / 'prompts.jsonl'}"])
    assert capsys.readouterr().out.removesuffix("\n") == text


@pytest.mark.slow
@ONE_OF_EACH
def test_a_conversation_has_images(model, tmp_path):
    for name, image in zip("ab", IMAGES, strict=True):
        image.save(tmp_path / f"{name}.png")
    answer, said = answerer(model, max_new_tokens=6, temperature=0.0), []
    speaker, out = Speaker("m", lambda *asked: said.append(answer(*asked)) or said[-1], True), io.StringIO()
    lines = (f"/image {tmp_path / 'a.png'}", "what?", "/image no.png", f"/image {tmp_path / 'b.png'}", "and?")
    converse([speaker], io.StringIO("".join(f"{line}\n" for line in lines)), Console(file=out, width=1000))
    first = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]
    behind = [{"role": "assistant", "content": said[0]}]
    second = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "and?"}]}]
    assert [said[0]] == jaxrl_llm.generate(model, [first], 6, temperature=0, images=[IMAGES[:1]])
    assert [said[1]] == jaxrl_llm.generate(model, [first + behind + second], 6, temperature=0, images=[IMAGES])
    assert "no.png' is no file here" in out.getvalue()


@ONE_OF_EACH
def test_images_of_prompts_are_checked(model):
    with pytest.raises(ConfigError, match="images has 1 entries for 2 prompts"):
        jaxrl_llm.generate(model, ["a", "b"], images=[[IMAGES[0]]])
    with pytest.raises(ConfigError, match=r"0 placeholders .* and 1 image"):
        jaxrl_llm.generate(model, ["a"], images=[[IMAGES[0]]])
    with pytest.raises(ConfigError, match="--image is of --prompt"):
        command.read_prompts("", "prompts.jsonl", False, image=["a.png"])
