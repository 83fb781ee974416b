"""Bytes counted from compiled programs are those that the programs must move."""

import importlib.metadata
import json

import jax
import jax.numpy as jnp
import pytest
from packaging.version import Version

from benchmarks import compiled
from benchmarks.traffic import step_and_rest, traffic
from jaxrl_llm.tools.plan.topology import _cuda_folder

NUMBERS, LAYERS = 1 << 20, 16
BIG, STACK, ONE = ((NUMBERS,), jnp.float32), ((LAYERS, NUMBERS), jnp.float32), ((1, NUMBERS), jnp.float32)
INDEX = ((), jnp.int32)
FUSED = pytest.mark.skipif(
    Version(importlib.metadata.version("jaxlib")) >= Version("0.11"), reason="CPUs run its turns in several kernels"
)


def place(x, y, i):
    return jax.lax.dynamic_update_slice(x, y, (i, 0))


def add_up(x):
    return jax.lax.fori_loop(0, LAYERS, lambda i, total: jnp.sin(total) + x[i], jnp.zeros(NUMBERS))


def until(x, n):
    def step(at):
        return at[0] + 1, jnp.sin(at[1]) + x[at[0] % LAYERS]

    at = jax.lax.while_loop(lambda at: at[0] < n, step, (0, jnp.zeros(NUMBERS)))
    return jax.lax.while_loop(lambda at: at[0] < n + 1, step, at)[1]


@pytest.mark.parametrize(
    ("function", "arguments", "donated", "trips", "numbers"),
    [
        (lambda x: x + 1, [BIG], (), (), 2),
        (lambda x, y: jnp.sin(x) * x + y, [BIG, BIG], (), (), 3),  # one fusion
        (lambda x, i: jnp.sin(x[i]), [STACK, INDEX], (), (), 2),  # one layer of all
        (place, [STACK, ONE, INDEX], 0, (), 2),  # in place
        (place, [STACK, ONE, INDEX], (), (), 2 * LAYERS + 2),  # the old one is kept: a copy of all
        (add_up, [STACK], (), (), 3 * LAYERS + 1),
        pytest.param(until, [STACK, INDEX], (), ((5.0, 1.0),), 3 * 6 + 1, marks=FUSED),  # the second loop has one trip
    ],
)
def test_bytes_of_small_programs(function, arguments, donated, trips, numbers):
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in arguments]
    text = jax.jit(function, donate_argnums=donated).lower(*shapes).compile().as_text()
    assert traffic(text, trips).moved == pytest.approx(4 * NUMBERS * numbers, rel=0.02)


def test_a_turn_of_a_loop_apart_from_what_is_beside_it():
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (STACK, INDEX)]
    turn, rest = step_and_rest(jax.jit(until).lower(*shapes).compile().as_text())
    assert turn.moved == pytest.approx(2 * 4 * NUMBERS * 3, rel=0.02)  # one of each loop
    assert rest.moved < 1.1 * 4 * NUMBERS  # the zeros to begin with


HAND_WRITTEN = """\
HloModule hand_made, is_scheduled=true

%update (p0: bf16[4,256], p1: bf16[1,256], p2: s32[]) -> bf16[4,256] {
  %p0 = bf16[4,256]{1,0} parameter(0)
  %p1 = bf16[1,256]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %out = bf16[4,256]{1,0} dynamic-update-slice(%p0, %p1, %p2, %zero)
}

ENTRY %main (a: bf16[4,256], b: bf16[1,256], i: s32[]) -> bf16[4,256] {
  %a = bf16[4,256]{1,0} parameter(0)
  %b = bf16[1,256]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %in_place = bf16[4,256]{1,0} fusion(%a, %b, %i), kind=kLoop, calls=%update
  %start = (bf16[4,256]{1,0:T(8,128)(2,1)S(1)}, bf16[4,256]{1,0}, u32[]{:S(2)}) copy-start(%in_place)
  %done = bf16[4,256]{1,0:T(8,128)(2,1)S(1)} copy-done(%start)
  ROOT %again = bf16[4,256]{1,0} copy(%done)
}
"""


def test_what_lies_on_the_chip_is_no_traffic():
    row, whole = 2.0 * 256, 2.0 * 4 * 256
    found = traffic(HAND_WRITTEN)
    assert found.moved == (row + 4) + row + whole + whole  # in place; read to the chip; written from it
    assert found.kernels == 3


@pytest.mark.slow
@pytest.mark.skipif(not _cuda_folder(), reason="the GPU compiler is not installed: pip install '.[plan-cuda]'")
def test_a_decode_step_moves_little_more_than_it_must(monkeypatch):
    """The default program of four layers of Qwen3-0.6B on an h100: no copy of a cache, few kernels a layer."""
    monkeypatch.setitem(compiled.MODELS, "0.6b", compiled.MODELS["0.6b"] | {"num_hidden_layers": 4})
    found = compiled.measured("0.6b", "h100", "rollout")["rollout: decode"]
    assert found["moved"] <= 1.5 * found["least"]  # the head weighs more in four layers than in 28
    assert found["kernels"] <= 4 * 15 + 40
    assert found["temporaries"] <= 2e8
    assert found["beside"] <= 1e7


@pytest.mark.slow
@pytest.mark.skipif(not _cuda_folder(), reason="the GPU compiler is not installed: pip install '.[plan-cuda]'")
def test_a_decode_step_passes_once_over_the_states_of_delta_nets(monkeypatch):
    """Two gated delta nets of Qwen3.5-0.8B on an h100: most of what is moved are states, read once and written once."""
    shape = {"num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2, "vocab_size": 4096}
    monkeypatch.setitem(compiled.MODELS, "0.8b-hybrid", compiled.MODELS["0.8b-hybrid"] | shape)
    found = compiled.measured("0.8b-hybrid", "h100", "rollout")["rollout: decode"]
    assert found["moved"] <= 1.3 * found["least"]  # small kernels weigh more in two layers
    assert found["kernels"] <= 2 * 25 + 25
    assert found["temporaries"] <= 2e7


@pytest.mark.slow
@pytest.mark.skipif(not _cuda_folder(), reason="the GPU compiler is not installed: pip install '.[plan-cuda]'")
@pytest.mark.parametrize("phase", compiled.FEW["0.6b of 2 layers"])
def test_long_rows_have_no_array_of_length_times_length(phase):
    """Packed rows of a rollout, rows of fine-tuning as they are, and rows that are only scored."""
    found = compiled.measured("0.6b of 2 layers", "h100", phase)[compiled.FURTHER[phase][1][0]]
    assert found["squares"] == []


def test_arrays_of_length_times_length():
    text = (
        "a = pred[2,64,64]{2,1,0} fusion(bf16[64,3], f8e4m3fn[128,64]) b = f32[] c = s32[64] d = (f32[64,128], u8[5])"
    )
    assert compiled.squares(text, 64) == ["f32[64,128]", "f8e4m3fn[128,64]", "pred[2,64,64]"]


def test_the_page_of_what_was_measured():
    store = json.loads(compiled.STORE.read_text())
    assert compiled.PAGE.read_text() == compiled.page(store)
    assert set(store["cells"]) <= {" | ".join(cell) for cell in compiled.cells()}


def test_a_peer_stands_behind_the_same_step_of_this_library():
    """GB over our least, and over its own; a peer without our step beside it has no row."""
    ours = {"moved": 12e9, "least": 10e9, "kernels": 400.0, "temporaries": 1e7, "beside": 0.0, "seconds": 20.4}
    ours["exchanged"] = 0.0
    peer = {"moved": 30e9, "least": 15e9, "kernels": 500.0, "temporaries": 5e9, "beside": 45e9, "seconds": 6.0}
    peers = {"0.6b | h100 | tunix": peer | {"versions": {"google-tunix": "1.2", "jax": "3.4"}}}
    store = {"versions": {}, "cells": {"0.6b | h100 | rollout": {"rollout: decode": ours}}, "peers": peers}
    page = compiled.page(store)
    assert "| jaxrl_llm | 12.00 | 1.20 | 1.20 | 400 | 0.01 | 0.00 | 20 |" in page
    assert "| google-tunix 1.2, jax 3.4 | 30.00 | 3.00 | 2.00 | 500 | 5.00 | 45.00 | 6 |" in page
    assert "peer" not in compiled.page(store | {"cells": {}})


def test_what_a_stored_peer_must_move_is_known():
    """Tunix's least is ours and the keys and values of the prompts that it keeps for 56 rows more."""
    store = json.loads(compiled.STORE.read_text())
    ours = store["cells"]["0.6b | h100 | rollout"]["rollout: decode"]["least"]
    keys_and_values = 2 * 2 * 28 * 8 * 128  # of a token, in bytes
    assert set(store["peers"]) == set(compiled.PEERS)
    peer = store["peers"]["0.6b | h100 | tunix"]
    assert peer["least"] - ours == pytest.approx(56 * 512 * keys_and_values, rel=1e-3)
    assert peer["moved"] > peer["least"]


@pytest.mark.slow
@pytest.mark.skipif(not _cuda_folder(), reason="the GPU compiler is not installed: pip install '.[plan-cuda]'")
def test_a_mixture_reads_its_experts_once_and_no_token_for_all_of_them(monkeypatch):
    """Of one layer of Qwen3-30B-A3B on an h100: an array of all copies of a prompt for every expert would be 17 GB."""
    name = "30b-a3b of 2 layers"
    monkeypatch.setitem(compiled.MODELS, name, compiled.MODELS[name] | {"num_hidden_layers": 1})
    found = compiled.measured(name, "h100", "rollout")
    decode = found["rollout: decode"]
    assert decode["moved"] <= 1.2 * decode["least"]
    assert found["rollout: prefill"]["temporaries"] < 1e9


@pytest.mark.slow
@pytest.mark.skipif(not _cuda_folder(), reason="the GPU compiler is not installed: pip install '.[plan-cuda]'")
@pytest.mark.parametrize(
    ("name", "key"), [("30b-a3b of 2 layers", "model.quantize_experts"), ("8b of 3 layers", "model.quantize")]
)
def test_matrices_of_4_bits_are_no_numbers_while_decoding(name, key, monkeypatch):
    """Written as numbers and read again they would be three times, and twice, what one layer must move."""
    monkeypatch.setitem(compiled.MODELS, name, compiled.MODELS[name] | {"num_hidden_layers": 1})
    found = compiled.measured(name, "h100", "rollout", {"lora.rank": 16, key: "nf4"})["rollout: decode"]
    assert found["moved"] <= 1.2 * found["least"]
