"""Tiny random models of every family, made by transformers, which is the oracle of these tests."""

import pytest

from tests.models.oracles import SHAPE, VARIANTS, VOCAB, make_oracle

__all__ = ["SHAPE", "VOCAB", "make_oracle"]
QUICK = ("llama", "gemma2", "qwen3_moe")  # between them, most of what families differ in


def variants(names, quick=QUICK):
    """Parameters of a fixture or test: the variants, of which those that are not quick run with the slow tests."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture(scope="module", params=variants(VARIANTS))
def oracle(request):
    return make_oracle(request.param)


@pytest.fixture(scope="module")
def folder(oracle, tmp_path_factory):
    """The oracle's folder, as transformers writes it."""
    path = tmp_path_factory.mktemp("oracle")
    oracle.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory):
    """An untied llama, for the tests that do not depend on the family."""
    path = tmp_path_factory.mktemp("llama")
    make_oracle("llama").save_pretrained(path)
    return path
