"""Keep and TopK: exact masks whatever the layout, the dtype or the compiler."""

import unittest.mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrize

from plures.errors import PluresError
from plures.methods.orthogonal_dropout.masks import Keep, TopK, largest, owned_part


def setting(seed: int, shape: tuple[int, ...], free_share: float = 0.7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    free = torch.rand(shape, generator=generator) < free_share
    return torch.randn(shape, generator=generator), free


@given(st.integers(0, 1000), st.floats(0, 1), st.booleans())
def test_topk_chooses_exactly_the_largest_free_scores(seed: int, share: float, ties: bool) -> None:
    scores, free = setting(seed, (6, 5, 3, 3))
    scores = scores.round() if ties else scores
    count = int(share * int(free.sum()))
    chosen = TopK(scores, free, count).chosen()
    assert int(chosen.sum()) == count
    assert not (chosen & ~free).any()
    if 0 < count < int(free.sum()):
        assert scores[chosen].abs().min() >= scores[free & ~chosen].abs().max()


@given(st.integers(0, 1000), st.integers(1, 60), st.booleans())
def test_the_largest_are_those_of_a_stable_sort(seed: int, count: int, ties: bool) -> None:
    values = np.abs(np.random.default_rng(seed).standard_normal(60)).astype(np.float32)
    values = values.round(1) if ties else values
    expected = np.zeros(60, bool)
    expected[np.argsort(-values, kind="stable")[:count]] = True
    assert (largest(values, count) == expected).all()


@given(st.integers(0, 1000), st.booleans())
def test_the_compiled_choice_is_the_same_one(seed: int, ties: bool) -> None:
    scores, free = setting(seed, (20, 30))
    mask = TopK((scores * 3).round() if ties else scores, free, 100)
    eager = mask.chosen()
    with unittest.mock.patch("torch.compiler.is_compiling", return_value=True):
        assert mask.chosen().equal(eager)


def test_excluded_weights_never_win_a_tie_at_zero() -> None:
    free = torch.zeros(100, dtype=torch.bool)
    free[40:60] = True
    chosen = TopK(torch.zeros(100), free, 20).chosen()
    assert chosen.equal(free)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_masked_weight_is_the_weight_or_zero_to_the_bit(dtype, layout) -> None:
    scores, free = setting(3, (8, 6, 3, 3))
    weight = torch.randn(8, 6, 3, 3).to(dtype).to(memory_format=layout)
    for mask, used in ((TopK(scores, free, 50), TopK(scores, free, 50).chosen()), (Keep(free), free)):
        masked = mask(weight)
        assert masked.dtype == dtype
        assert masked[used].equal(weight[used])
        assert (masked[~used] == 0).all()


def test_topk_under_channels_last_scores_chooses_the_same() -> None:
    scores, free = setting(5, (8, 6, 3, 3))
    plain = TopK(scores, free, 60).chosen()
    other = TopK(scores.to(memory_format=torch.channels_last), free.to(memory_format=torch.channels_last), 60)
    assert other.chosen().equal(plain)


def test_the_gradient_passes_to_the_score_of_free_weights() -> None:
    scores, free = setting(7, (5, 4))
    weight = torch.randn(5, 4, requires_grad=True)
    mask = TopK(scores, free, 6)
    upstream = torch.randn(5, 4)
    (mask(weight) * upstream).sum().backward()
    expected = torch.where(free, upstream * weight.detach() * scores.sign(), 0.0)
    torch.testing.assert_close(mask.scores.grad, expected)
    torch.testing.assert_close(weight.grad, torch.where(mask.chosen(), upstream, 0.0))


def test_one_score_per_kernel_gathers_the_gradient_of_its_kernel() -> None:
    scores, free = setting(2, (4, 3, 1, 1))
    weight = torch.randn(4, 3, 3, 3)
    mask = TopK(scores, free, 4)
    upstream = torch.randn(4, 3, 3, 3)
    (mask(weight) * upstream).sum().backward()
    expected = torch.where(free, (upstream * weight).sum((2, 3), keepdim=True) * scores.sign(), 0.0)
    torch.testing.assert_close(mask.scores.grad, expected)


def test_scores_stay_float32_under_half_weights() -> None:
    scores, free = setting(0, (50, 50))
    mask = TopK(scores.bfloat16(), free, 500)
    assert mask.scores.dtype == torch.float32
    layer = nn.Linear(50, 50).bfloat16()
    parametrize.register_parametrization(layer, "weight", mask)
    assert int((layer.weight != 0).sum()) <= 500


# The compiler's front end on both; what it makes of the graph is tested once here, and in test_orthogonal_dropout.
@pytest.mark.parametrize(
    ("kind", "backend"), [("keep", "aot_eager"), pytest.param("topk", "inductor", marks=pytest.mark.slow)]
)
def test_masks_under_autocast_and_compile_agree_with_eager(kind: str, backend: str) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 6, 3, bias=False)
    scores, free = setting(1, tuple(layer.weight.shape))
    mask = Keep(free) if kind == "keep" else TopK(scores, free, 40)
    parametrize.register_parametrization(layer, "weight", mask)
    images = torch.randn(2, 4, 8, 8)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(images), layer(images))
    gradients = []
    for run in (layer, compiled):
        layer.zero_grad()
        run(images).square().sum().backward()
        gradients.append([p.grad.clone() for p in layer.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1])
    with torch.autocast("cpu", torch.bfloat16):
        half = layer(images)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), layer(images), atol=0.1, rtol=0.1)


@given(st.integers(0, 1000), st.sampled_from([torch.contiguous_format, torch.channels_last]), st.booleans())
def test_a_member_is_cut_out_to_the_bit_in_the_layout_of_the_weight(seed: int, layout, kernels: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(4, 5, 3, 3, generator=generator).to(memory_format=layout)
    owners = torch.randint(0, 3, (4, 5, 1, 1) if kernels else (4, 5, 3, 3), generator=generator, dtype=torch.uint8)
    expected = torch.where(owners == 1, weight, 0.0)
    for given_weight in (weight, weight.clone().requires_grad_()):
        part = owned_part(given_weight, owners, 1).detach()
        assert part.view(torch.int32).equal(expected.view(torch.int32)), "a zero may not be negative"
        assert part.stride() == weight.stride()


def test_impossible_choices_are_refused() -> None:
    with pytest.raises(PluresError, match="cannot choose 3 of 2"):
        TopK(torch.zeros(2), torch.ones(2, dtype=torch.bool), 3)
    with pytest.raises(PluresError, match="boolean mask"):
        TopK(torch.zeros(2), torch.ones(2), 1)
