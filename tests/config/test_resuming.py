"""What a message asks for where a run is to be gone on with: not what would begin it anew."""

import pytest

from jaxrl_llm.config import resuming


@pytest.fixture(autouse=True)
def as_before():
    before = resuming.way_on()
    yield
    resuming._words = before


@pytest.mark.parametrize(
    ("resume", "asked", "words"),
    [
        ("auto", "/runs/a", "start the same command again"),
        ("other/checkpoints/3", "/runs/a", "start the same command again"),
        ("never", "/runs/a", "start it again with checkpoint.resume=auto"),
        ("auto", "/runs/{new}", "start it again with output_dir=/runs/a"),
        ("never", "/runs/{new}", "start it again with checkpoint.resume=auto and output_dir=/runs/a"),
    ],
)
def test_the_same_command_goes_on_unless_it_begins_anew(resume, asked, words):
    resuming.begin(resume, asked, "/runs/a")
    assert resuming.way_on() == words
