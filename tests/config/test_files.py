"""Files that are whole or not there."""

import pytest

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.files import read_json, replaced, write_json


def test_a_file_is_replaced_when_all_is_written(tmp_path):
    file = tmp_path / "numbers.json"
    assert read_json(file) is None
    write_json(file, {"a": [1, 2]})
    with replaced(file) as unfinished:
        unfinished.write_text('{"a": 3}')
        assert read_json(file) == {"a": [1, 2]}
    assert read_json(file) == {"a": 3} and list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_what_fails_leaves_the_former_file(tmp_path, error):
    file = tmp_path / "numbers.json"
    write_json(file, {"a": 1})

    def write():
        with replaced(file) as unfinished:
            unfinished.write_text("{")
            raise error

    with pytest.raises(error):
        write()
    assert read_json(file) == {"a": 1} and list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(("text", "said"), [("{", "is not JSON"), ("[1]", "must hold a JSON object, but holds a list")])
def test_what_is_no_object_is_refused(tmp_path, text, said):
    (tmp_path / "numbers.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"numbers\.json {said}"):
        read_json(tmp_path / "numbers.json")
