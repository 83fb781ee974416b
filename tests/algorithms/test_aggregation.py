import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.aggregation import MODES, as_float, loss_weights, masked_mean, masked_var, whiten

MASK = np.array([[1, 1, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0]], np.float32)
LOSS = np.arange(12, dtype=np.float32).reshape(3, 4)


def random_batch(rows=8, tokens=7, seed=0):
    rng = np.random.default_rng(seed)
    mask = (rng.random((rows, tokens)) < 0.6).astype(np.float32)
    mask[:, 0] = 1
    return mask, rng.normal(size=(rows, tokens)).astype(np.float32)


@pytest.mark.parametrize(
    ("given", "expected"), [("bfloat16", "float32"), ("float16", "float32"), ("int32", "float32"), ("bool", "float32")]
)
def test_as_float_raises_narrow_types_to_float32(given, expected):
    assert as_float(jnp.ones(2, given)).dtype == expected


def test_as_float_keeps_float64(x64):
    assert as_float(np.ones(2, np.float64)).dtype == "float64"


def test_masked_mean_by_hand():
    np.testing.assert_allclose(masked_mean(LOSS, MASK), (0 + 1 + 5 + 6 + 7) / 5)
    np.testing.assert_allclose(masked_mean(LOSS, MASK, axis=1), [0.5, 6.0, 0.0])
    np.testing.assert_allclose(masked_mean(LOSS, MASK, axis=0, keepdims=True), [[0, 3, 6, 7]])


def test_masked_mean_never_reads_outside_the_mask():
    poisoned = np.where(MASK > 0, LOSS, np.nan)
    np.testing.assert_array_equal(masked_mean(poisoned, MASK, axis=1), masked_mean(LOSS, MASK, axis=1))
    gradient = jax.grad(lambda x: masked_mean(x, MASK))(poisoned)
    np.testing.assert_allclose(gradient, MASK / 5)


@pytest.mark.parametrize("mask", [MASK, np.zeros_like(MASK)])
@pytest.mark.parametrize("function", [masked_var, whiten])
def test_gradients_of_moments_never_read_outside_the_mask(function, mask):
    weights = np.sin(LOSS)  # whitened numbers sum to 0, whatever they are
    gradient = jax.grad(lambda x: (weights * function(x, mask)).sum())
    poisoned = gradient(jnp.where(mask > 0, LOSS, jnp.nan))
    np.testing.assert_array_equal(poisoned, gradient(jnp.where(mask > 0, LOSS, 0.0)))
    assert (np.asarray(poisoned)[mask == 0] == 0).all()


@pytest.mark.parametrize("ddof", [0, 1])
def test_masked_var_is_numpys(ddof):
    mask, x = random_batch()
    np.testing.assert_allclose(masked_var(x, mask, ddof), x[mask > 0].var(ddof=ddof), rtol=1e-5)
    rows = [row[keep > 0].var(ddof=ddof) if keep.sum() > ddof else 0.0 for row, keep in zip(x, mask, strict=True)]
    np.testing.assert_allclose(masked_var(x, mask, ddof, axis=1), rows, rtol=1e-4, atol=1e-7)


def test_masked_var_of_one_value_is_zero():
    np.testing.assert_array_equal(masked_var([3.0, 9.0], [1, 0]), 0.0)


def test_whiten_by_hand():
    # mean 3, unbiased variance 4
    np.testing.assert_allclose(whiten([1.0, 3.0, 5.0, 99.0], [1, 1, 1, 0], eps=0.0), [-1, 0, 1, 0], atol=1e-6)
    np.testing.assert_allclose(
        whiten([1.0, 3.0, 5.0, 99.0], [1, 1, 1, 0], shift_mean=False, eps=0.0), [2, 3, 4, 0], atol=1e-6
    )
    np.testing.assert_allclose(whiten([1.0, 3.0], [1, 1], ddof=0, eps=0.0), [-1, 1], atol=1e-6)


def test_whiten_puts_eps_inside_the_square_root(x64):
    x = np.array([0.0, 2e-4])
    np.testing.assert_allclose(whiten(x, np.ones(2)), (x - 1e-4) / np.sqrt(2e-8 + 1e-8), rtol=1e-12)


def test_whitened_equal_values_are_exact_zeros():
    """The mean of 39 times 0.9 is another number in float32; whitened, the difference was 2e-3 (Adam takes any)."""
    mask = np.arange(10) < np.array([9, 7, 6, 3, 4, 1, 1, 8])[:, None]
    np.testing.assert_array_equal(whiten(np.full((8, 10), 0.9, np.float32), mask), 0.0)
    assert not np.any(whiten(np.full((2, 3), np.nan), np.zeros((2, 3))))


def test_whitened_tokens_have_zero_mean_and_unit_variance():
    mask, x = random_batch()
    result = np.asarray(whiten(100 + 7 * x, mask))
    assert abs(result[mask > 0].mean()) < 1e-5
    np.testing.assert_allclose(result[mask > 0].std(ddof=1), 1.0, rtol=1e-4)
    assert (result[mask == 0] == 0).all()


def test_loss_weights_by_hand():
    sequence = np.array([[1 / 6, 1 / 6, 0, 0], [0, 1 / 9, 1 / 9, 1 / 9], [0, 0, 0, 0]])
    np.testing.assert_allclose(loss_weights(MASK, "sequence"), sequence, rtol=1e-6)
    np.testing.assert_allclose(loss_weights(MASK, "token"), MASK / 5, rtol=1e-6)
    np.testing.assert_allclose(loss_weights(MASK, "constant", max_completion_length=10), MASK / 30, rtol=1e-6)
    np.testing.assert_allclose(loss_weights(MASK, "sequence_sum"), MASK / 3, rtol=1e-6)


def test_weighted_sums_are_the_losses_they_name():
    mask, loss = random_batch()
    total = lambda mode, **options: float((loss_weights(mask, mode, **options) * loss).sum())  # noqa: E731
    row_sums, lengths = (loss * mask).sum(1), mask.sum(1)
    np.testing.assert_allclose(total("sequence"), (row_sums / lengths).mean(), rtol=1e-5)
    np.testing.assert_allclose(total("token"), row_sums.sum() / mask.sum(), rtol=1e-5)
    np.testing.assert_allclose(total("constant", max_completion_length=32), row_sums.sum() / (8 * 32), rtol=1e-5)
    np.testing.assert_allclose(total("sequence_sum"), row_sums.mean(), rtol=1e-5)
    np.testing.assert_allclose(total("token_sum"), row_sums.sum(), rtol=1e-5)
    prompts = [(loss[i : i + 4] * mask[i : i + 4]).sum() / mask[i : i + 4].sum() for i in (0, 4)]
    np.testing.assert_allclose(total("prompt", group_size=4), np.mean(prompts), rtol=1e-5)
    blocks = [(loss[i : i + 2] * mask[i : i + 2]).sum() / mask[i : i + 2].sum() for i in range(0, 8, 2)]
    np.testing.assert_allclose(total("microbatch_token", microbatch_rows=2), np.mean(blocks), rtol=1e-5)


def test_empty_rows_count_as_rows_and_fill_rows_do_not():
    # a row without a token has token mean 0 and stays in the mean over rows
    assert float((loss_weights(MASK, "sequence") * np.ones_like(LOSS)).sum()) == pytest.approx(2 / 3)
    filled = loss_weights(MASK, "sequence", row_mask=[1, 1, 0])
    assert float((filled * np.ones_like(LOSS)).sum()) == pytest.approx(1.0)
    of_prompts = loss_weights(np.tile(MASK[:2], (2, 1)), "prompt", group_size=2, row_mask=[1, 1, 0, 0])
    np.testing.assert_allclose(of_prompts[:2], MASK[:2] / 5, rtol=1e-6)
    assert not of_prompts[2:].any()
    empty = np.vstack([MASK[:2], np.zeros((2, 4))])  # a prompt without a token stays in the mean over prompts, as SkyRL
    np.testing.assert_allclose(loss_weights(empty, "prompt", group_size=2)[:2], MASK[:2] / 10, rtol=1e-6)
    without = loss_weights(MASK, "token", row_mask=[1, 0, 0])
    np.testing.assert_allclose(without, [[0.5, 0.5, 0, 0], [0] * 4, [0] * 4])


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_batch_has_finite_zero_weights(mode):
    sizes = {"max_completion_length": 4, "group_size": 2, "microbatch_rows": 1}
    weights = loss_weights(np.zeros((2, 3)), mode, **sizes, token_count=np.zeros(2))
    np.testing.assert_array_equal(weights, 0)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "microbatch_token"])
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_the_gradient_does_not_depend_on_the_micro_batch_size(mode, parts):
    mask, x = random_batch()
    weights = loss_weights(mask, mode, max_completion_length=16, group_size=4, token_count=np.full(8, 50))

    def part_gradient(theta, rows):
        return jax.grad(lambda theta: (weights[rows] * jnp.sin(theta * x[rows])).sum())(theta)

    whole = part_gradient(0.7, slice(None))
    split = sum(part_gradient(0.7, rows) for rows in np.arange(8).reshape(parts, -1))
    np.testing.assert_allclose(split, whole, rtol=1e-5, atol=1e-7)


def test_the_token_mean_is_not_the_mean_of_micro_batch_token_means():
    mask, loss = random_batch()
    whole = (loss_weights(mask, "token") * loss).sum()
    blocks = (loss_weights(mask, "microbatch_token", microbatch_rows=2) * loss).sum()
    assert abs(float(whole - blocks)) > 1e-3
    one_block = loss_weights(mask, "microbatch_token", microbatch_rows=8)
    np.testing.assert_allclose(one_block, loss_weights(mask, "token"), rtol=1e-6)


def test_weights_are_float32_for_boolean_and_half_masks():
    for dtype in (bool, np.float16, np.int32):
        assert loss_weights(MASK.astype(dtype), "sequence").dtype == jnp.float32


def test_loss_weights_jit():
    jitted = jax.jit(loss_weights, static_argnames=("mode", "max_completion_length"))
    np.testing.assert_allclose(
        jitted(MASK, "constant", max_completion_length=3), loss_weights(MASK, "constant", max_completion_length=3)
    )


@pytest.mark.parametrize(
    ("mode", "options", "words"),
    [
        ("mean", {}, "unknown aggregation mode 'mean'"),
        ("constant", {}, "max_completion_length"),
        ("microbatch_token", {}, "got None for 3 rows"),
        ("microbatch_token", {"microbatch_rows": 2}, "divisor of 3"),
        ("prompt", {"group_size": 2}, "blocks of group_size rows; got 2 for 3 rows"),
    ],
)
def test_errors_name_value_and_fix(mode, options, words):
    with pytest.raises(ValueError, match=words):
        loss_weights(MASK, mode, **options)
