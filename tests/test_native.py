"""The native kernels against torch's dense layers, and the way their library is found, compiled and loaded."""

import ctypes
import hashlib
import os
import platform
import shutil
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from plures.errors import PluresError
from plures.methods.orthogonal_dropout.file import digits_per_word, unpack
from plures.native import build, library, training
from plures.native.operators import affine, block, convolution, linear, unblock
from plures.native.structures import LinearWeights, Lists, kernel_lists, linear_lists
from plures.tensors import checksums

pytestmark = pytest.mark.skipif(library.why_unavailable() is not None, reason="no native library")
FREE = 255


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn_owners(shape: tuple[int, ...], members: int, seed: int) -> Tensor:
    """Owners at random, a tenth free, and the first output channel's all of the last member."""
    owners = torch.randint(members, shape, generator=generator(seed), dtype=torch.uint8)
    owners[torch.rand(shape, generator=generator(seed + 1)) < 0.1] = FREE
    owners[0] = members - 1
    return owners


def agrees(found: Tensor, expected: Tensor) -> None:
    scale = expected.abs().max().clamp(min=1.0)
    assert found.shape == expected.shape
    assert float((found - expected).abs().max() / scale) < 1e-5


def after(sums: Tensor, relu: int) -> Tensor:
    return F.relu6(sums) if relu == 6 else sums.relu() if relu else sums


@given(
    members=st.integers(2, 6),
    sizes=st.tuples(st.integers(1, 20), st.integers(1, 70), st.integers(1, 11), st.integers(1, 11)),
    kernel=st.sampled_from([(1, 1), (3, 3), (3, 3), (5, 5), (2, 2), (1, 3), (3, 1)]),
    stride=st.sampled_from([(1, 1), (2, 2), (3, 3), (1, 2)]),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    batch=st.integers(1, 33),
    pixels=st.booleans(),
    whole=st.booleans(),
    relu=st.sampled_from([0, 1, 6]),
    added=st.booleans(),
    shared=st.booleans(),
    last=st.booleans(),
    threads=st.sampled_from([1, 3]),
    seed=st.integers(0, 1000),
)
def test_convolution_of_members_is_torchs_own(
    members, sizes, kernel, stride, padding, batch, pixels, whole, relu, added, shared, last, threads, seed
):
    outputs, inputs, height, width = sizes
    height, width = (max(size, k - 2 * p) for size, k, p in zip((height, width), kernel, padding, strict=True))
    random = generator(seed)
    weight = torch.randn(outputs, inputs, *kernel, generator=random) / (inputs * kernel[0] * kernel[1]) ** 0.5
    owners = drawn_owners((outputs, inputs, 1, 1) if whole else tuple(weight.shape), members, seed)
    bias = torch.randn(members, outputs, generator=random)
    scales = torch.rand(members, outputs, generator=random) + 0.5
    x = torch.randn((1 if shared else members) * batch, inputs, height, width, generator=random)
    if last:
        x = x.to(memory_format=torch.channels_last)
    each = [x] * members if shared else list(x.chunk(members))
    # In double precision: on AVX-512, torch's float32 convolution of one channel with strides 1 and 2 may be wrong.
    expected = torch.cat(
        [
            F.conv2d(
                part.double(),
                (weight * (owners == m) * scales[m].view(-1, 1, 1, 1)).double(),
                bias[m].double(),
                stride,
                padding,
            )
            for m, part in enumerate(each)
        ]
    ).float()
    residual = torch.randn(expected.shape, generator=random) if added else None
    expected = expected if residual is None else expected + residual
    expected = after(expected, relu)

    lanes = 1 if pixels else library.load().lanes
    lists = kernel_lists(weight, owners, list(range(members)), scales)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = convolution(
            block(x, 1 if shared else members, lanes),
            None if residual is None else block(residual, members, lanes),
            *lists[:3],
            bias,
            *(kernel, stride, padding, *lists[3:], relu),
        )
    finally:
        torch.set_num_threads(before)
    agrees(unblock(found, batch), expected)


@given(
    members=st.integers(2, 6),
    outputs=st.integers(1, 40),
    inputs=st.integers(1, 1100),
    rows=st.integers(1, 110),
    blocks=st.booleans(),
    relu=st.booleans(),
    shared=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_linear_layer_of_members_is_torchs_own(members, outputs, inputs, rows, blocks, relu, shared, seed):
    random = generator(seed)
    weight = torch.randn(outputs, inputs, generator=random) / inputs**0.5
    bias = torch.randn(members, outputs, generator=random)
    x = torch.randn(1 if shared else members, rows, inputs, generator=random)
    owners = drawn_owners((-(-outputs // 8) if blocks else outputs, inputs), members, seed)
    spread = owners.repeat_interleave(8, 0)[:outputs] if blocks else owners
    chain = chain_of(linear_lists(weight, owners, list(range(members))), relu=relu)
    chain[4] = bias
    found = linear(x, *chain)
    expected = torch.stack([F.linear(x[0 if shared else m], weight * (spread == m), bias[m]) for m in range(members)])
    agrees(found, expected.relu() if relu else expected)


@pytest.mark.parametrize("rows", [1, 3, 5, 40, 70])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_chain_is_layer_after_layer(rows, threads):
    random, members = generator(rows), 3
    weights = [torch.randn(shape, generator=random) / 8 for shape in ((70, 65), (24, 70), (members, 9, 24))]
    owners = [drawn_owners((70, 65), members, 0), drawn_owners((3, 70), members, 1), None]
    layers = [linear_lists(weight, whose, [0, 1, 2]) for weight, whose in zip(weights, owners, strict=True)]
    x, chain = torch.randn(1, rows, 65, generator=random), chain_of(*layers, relu=True)
    chain[4] = torch.randn(members, 70 + 24 + 9, generator=random)
    torch.set_num_threads(threads)
    found = linear(x, *chain)
    expected = []
    for m in range(members):
        y, biases = x[0], chain[4][m].split([70, 24, 9])
        masks = [owners[0] == m, owners[1].repeat_interleave(8, 0) == m]
        for weight, bias in zip((weights[0] * masks[0], weights[1] * masks[1], weights[2][m]), biases, strict=True):
            y = F.linear(y, weight, bias).relu()
        expected.append(y)
    agrees(found, torch.stack(expected))
    few = [chain[0][[2, 0]], *chain[1:4], chain[4][[2, 0]], chain[5][[2, 0]], chain[6]]
    assert linear(x, *few).equal(found[[2, 0]])


def chain_of(*layers: LinearWeights, relu: bool = False) -> list[object]:
    """Return what a chain of linear layers is called with, beside rows; biases of zero."""
    members = len(layers[0].starts)
    joined = [torch.cat([getattr(one, name) for one in layers]) for name in ("places", "weights", "owners")]
    ids = torch.arange(members, dtype=torch.int32)
    sizes = [n for one in layers for n in (one.inputs, one.outputs, one.each, len(one.places), relu)]
    starts = torch.cat([one.starts for one in layers], 1)
    return [starts, *joined, torch.zeros(members, sum(one.outputs for one in layers)), ids, sizes]


def layer_of(channels: int = 10) -> tuple[Tensor, Lists, Tensor]:
    members, batch, outputs = 3, 9, channels + 2
    weight = torch.randn(outputs, channels, 3, 3, generator=generator(0))
    lists = kernel_lists(weight, drawn_owners((outputs, channels, 1, 1), members, 0), list(range(members)))
    return torch.randn(members * batch, channels, 6, 7, generator=generator(1)), lists, torch.zeros(members, outputs)


def run(x: Tensor, lists: Lists, bias: Tensor, lanes: int) -> Tensor:
    return convolution(block(x, len(bias), lanes), None, *lists[:3], bias, (3, 3), (1, 1), (1, 1), *lists[3:], True)


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("owned", ["kernels", "weights", "private"])
def test_groups_and_weights_of_their_own_are_torchs(groups, owned):
    members, shape = 3, (12, 6 // groups, 3, 3)
    weight = torch.randn((members, *shape) if owned == "private" else shape, generator=generator(0))
    owners = drawn_owners(shape if owned == "weights" else (*shape[:2], 1, 1), members, 0)
    lists = kernel_lists(weight, None if owned == "private" else owners, [0, 1, 2], groups=groups)
    x, bias = torch.randn(members * 4, 6, 5, 7, generator=generator(1)), torch.zeros(members, 12)
    each = weight if owned == "private" else torch.stack([weight * (owners == m) for m in range(members)])
    expected = [F.conv2d(part, one, None, 1, 1, 1, groups) for part, one in zip(x.chunk(3), each, strict=True)]
    agrees(unblock(run(x, lists, bias, 1), 4), torch.cat(expected).relu())


@given(
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 60), st.integers(1, 60)),
    kernel=st.sampled_from([(3, 3), (5, 5), (7, 7), (2, 2), (1, 3), (3, 1)]),
    stride=st.sampled_from([(1, 1), (2, 2), (3, 3), (1, 2)]),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    multiplier=st.sampled_from([1, 1, 2]),
    batch=st.sampled_from([1, 2, 17]),
    relu=st.sampled_from([0, 1, 6]),
    added=st.booleans(),
    split=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_depthwise_layers_of_members_are_torchs_own_with_any_number_of_threads(
    sizes, kernel, stride, padding, multiplier, batch, relu, added, split, seed
):
    (channels, height, width), random, members = sizes, generator(seed), 2
    height, width = (max(size, k - 2 * p) for size, k, p in zip((height, width), kernel, padding, strict=True))
    outputs = channels * multiplier
    weight = torch.randn(members, outputs, 1, *kernel, generator=random)
    owners = drawn_owners((outputs, 1, 1, 1), members, seed) if split else None
    lists = kernel_lists(weight[0] if split else weight, owners, [0, 1], groups=channels)
    each = torch.stack([weight[0] * (owners == m) for m in range(members)]) if split else weight
    x, bias = torch.randn(members * batch, channels, height, width, generator=random), torch.randn(members, outputs)
    pairs = zip(x.chunk(members), each, bias, strict=True)
    expected = torch.cat([F.conv2d(*map(Tensor.double, of), stride, padding, 1, channels) for of in pairs]).float()
    residual = torch.randn(expected.shape, generator=random) if added else None
    before, settings_of = torch.get_num_threads(), (kernel, stride, padding, *lists[3:], relu)
    for lanes in (1, library.load().lanes):
        found = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            shortcut = None if residual is None else block(residual, members, lanes)
            found.append(convolution(block(x, members, lanes), shortcut, *lists[:3], bias, *settings_of))
        torch.set_num_threads(before)
        assert found[0].equal(found[1])
        agrees(unblock(found[0], batch), after(expected if residual is None else expected + residual, relu))


@given(
    channels=st.integers(30, 80),
    outputs=st.integers(30, 140),
    size=st.tuples(st.integers(3, 13), st.integers(3, 19)),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    batch=st.sampled_from([5, 8, 9, 16, 17]),
    relu=st.sampled_from([0, 1, 6]),
    added=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_layers_of_many_kernels_are_torchs_own(channels, outputs, size, padding, batch, relu, added, seed):
    random, members = generator(seed), 2
    weight = torch.randn(outputs, channels, 3, 3, generator=random) / channels**0.5 / 3
    owners = drawn_owners((outputs, channels, 1, 1), members, seed)
    lists, bias = kernel_lists(weight, owners, [0, 1]), torch.randn(members, outputs, generator=random)
    x = torch.randn(members * batch, channels, *size, generator=random)
    each = [(weight * (owners == m)).double() for m in range(members)]
    settings_of = ((3, 3), (1, 1), padding, *lists[3:], relu)
    pairs = zip(x.double().chunk(members), each, bias.double(), strict=True)
    expected = torch.cat([F.conv2d(*of, 1, padding) for of in pairs]).float()
    residual = torch.randn(expected.shape, generator=random) if added else None
    expected = after(expected if residual is None else expected + residual, relu)
    for lanes in library.load().layouts[1:]:
        shortcut = None if residual is None else block(residual, members, lanes)
        found = convolution(block(x, members, lanes), shortcut, *lists[:3], bias, *settings_of)
        agrees(unblock(found, batch), expected)


@pytest.mark.parametrize("pixels", [True, False])
@pytest.mark.parametrize("channels", [10, 80])
def test_bits_do_not_depend_on_threads(pixels, channels):
    x, lists, bias = layer_of(channels)
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(run(x, lists, bias, 1 if pixels else library.load().lanes))
    finally:
        torch.set_num_threads(before)
    assert results[0].equal(results[1])
    assert results[0].equal(results[2])


def test_members_up_to_255():
    members = 255
    owners = torch.arange(255, dtype=torch.uint8).reshape(15, 17)
    weight = torch.randn(15, 17, generator=generator(0))
    x = torch.randn(members, 3, 17, generator=generator(1))
    found = linear(x, *chain_of(linear_lists(weight, owners, list(range(members)))))
    expected = torch.stack([x[m] @ (weight * (owners == m)).T for m in range(members)])
    agrees(found, expected)


def test_nan_passes_relu_as_in_torch():
    x, lists, bias = layer_of()
    both = torch.tensor([[[[[[torch.nan], [-1.0]]]]]])
    for relu in (1, 6):
        found = affine(both, torch.ones(1, 1), torch.zeros(1, 1), relu).flatten()
        assert found[0].isnan()
        assert found[1] == 0
        settings_of = ((3, 3), (1, 1), (1, 1), *lists[3:], relu)
        for lanes in (1, library.load().lanes):
            y = convolution(block(torch.full_like(x, torch.nan), 3, lanes), None, *lists[:3], bias, *settings_of)
            assert y.isnan().any()


@given(members=st.integers(1, 4), batch=st.integers(1, 20), relu=st.sampled_from([0, 1, 6]), seed=st.integers(0, 99))
def test_affine_is_a_folded_norm_layer(members, batch, relu, seed):
    random = generator(seed)
    x = torch.randn(members * batch, 5, 3, 4, generator=random)
    factor, shift = torch.randn(2, members, 5, generator=random)
    expected = x.view(members, batch, 5, 3, 4) * factor.view(members, 1, 5, 1, 1) + shift.view(members, 1, 5, 1, 1)
    found = unblock(affine(block(x, members, library.load().lanes), factor, shift, relu), batch)
    agrees(found, after(expected, relu).flatten(0, 1))


def test_operators_pass_torchs_own_checks():
    x, lists, bias = layer_of()
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    blocked = block(x, 3, 1)
    settings_of = ((3, 3), (1, 1), (1, 1), *lists[3:], True)
    torch.library.opcheck(convolution.default, (blocked, None, *lists[:3], bias, *settings_of), test_utils=tests)
    torch.library.opcheck(block.default, (x, 3, library.load().lanes), test_utils=tests)
    torch.library.opcheck(unblock.default, (blocked, 9), test_utils=tests)
    torch.library.opcheck(affine.default, (blocked, torch.ones(3, 10), torch.ones(3, 10), True), test_utils=tests)
    weight = torch.randn(9, 10, generator=generator(0))
    rows = torch.randn(3, 4, 10, generator=generator(1))
    for shape in ((9, 10), (2, 10)):
        chain = chain_of(linear_lists(weight, drawn_owners(shape, 3, 0), [0, 1, 2]))
        torch.library.opcheck(linear.default, (rows, *chain), test_utils=tests)


def test_export_and_compile_see_one_operator():
    x, lists, bias = layer_of()

    class Layer(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return run(x, lists, bias, 1) * 2

    exported = torch.export.export(Layer(), (x,))
    assert sum("plures.convolution" in str(node.target) for node in exported.graph.nodes) == 1
    compiled = torch.compile(Layer(), fullgraph=True, backend="aot_eager")
    assert compiled(x).equal(Layer()(x))


@pytest.mark.parametrize(
    "wrong",
    [lambda x: x.double(), lambda x: x[:, :, :5], lambda x: x[0], lambda x: x[:2]],
    ids=["dtype", "channels", "dimensions", "members"],
)
def test_wrong_activations_are_refused(wrong):
    x, lists, bias = layer_of()
    blocked = wrong(block(x, 3, 1))
    with pytest.raises(PluresError):
        convolution(blocked, None, *lists[:3], bias, (3, 3), (1, 1), (1, 1), *lists[3:], True)


HOSTILE_NUMBERS = st.sampled_from([-(2**40), -1, 0, 1, 2, 3, 8, 64, 2**16, 2**31, 2**40])
DAMAGES = {
    "dtype": lambda t: t.double() if t.is_floating_point() else t.long(),
    "half": lambda t: t.half(),
    "meta": lambda t: t.to("meta"),
    "shorter": lambda t: t[:-1],
    "empty": lambda t: t[:0],
    "dimensions": lambda t: t[None],
    "flat": lambda t: t.flatten(),
    "strides": lambda t: torch.stack([t, t], -1)[..., 0],
    "sparse": lambda t: t.to_sparse(),
    "negative": lambda t: torch.full_like(t, -1),
    "large": lambda t: torch.full_like(t, 255 if t.dtype == torch.uint8 else 2**15 - 1),
    "one more": lambda t: t + 1,
    "reversed": lambda t: t.flip(-1),
    "part of wider rows": lambda t: torch.cat([t, t], -1).chunk(2, -1)[0] if t.dim() else t,
    "gradient": lambda t: t.clone().requires_grad_() if t.is_floating_point() else t.double(),
}


def valid_calls() -> dict[str, tuple[object, list[object], list[int]]]:
    """Each operator with right arguments, and the places of the tensors that a kernel's addresses depend on."""
    x, lists, bias = layer_of()
    weight = torch.randn(9, 70, generator=generator(0))
    rows = torch.randn(3, 4, 70, generator=generator(1))
    single, blocks = (linear_lists(weight, drawn_owners(shape, 3, 0), [0, 1, 2]) for shape in ((9, 70), (2, 70)))
    private = linear_lists(torch.randn(3, 5, 9, generator=generator(2)), None, [0, 1, 2])
    blocked = block(x, 3, library.load().lanes)
    of_convolution = [blocked, None, *lists[:3], bias, [3, 3], [1, 1], [1, 1], *lists[3:], True]
    return {
        "convolution": (convolution, of_convolution, [2, 3]),
        "linear": (linear, [rows, *chain_of(single, private)], [1, 2]),
        "block_linear": (linear, [rows, *chain_of(blocks, relu=True)], [1, 2]),
        "block": (block, [x, 3, library.load().lanes], []),
        "unblock": (unblock, [blocked, 9], []),
        "affine": (affine, [blocked, torch.ones(3, 10), torch.zeros(3, 10), False], []),
    }


@given(st.data())
def test_wrong_arguments_are_refused_or_make_no_difference(data):
    """No argument lets a kernel read or write beyond a buffer: it is refused, or it means what torch says it means."""
    name = data.draw(st.sampled_from(list(valid_calls())))
    operator, right, lists = valid_calls()[name]
    place = data.draw(st.integers(0, len(right) - 1))
    wrong = list(right)
    if isinstance(right[place], Tensor):
        damage = data.draw(st.sampled_from(list(DAMAGES)))
        wrong[place] = DAMAGES[damage](right[place])
    elif isinstance(right[place], list):
        damage = str(wrong[place].__setitem__(0, data.draw(HOSTILE_NUMBERS)))
    else:
        damage = wrong[place] = None if right[place] is None else data.draw(HOSTILE_NUMBERS)
    try:
        found = operator(*wrong)
    except (PluresError, RuntimeError) as error:  # torch itself refuses what is not in the schema
        if isinstance(error, PluresError):
            assert str(error).count(". ") == 0
        return
    expected = operator(*right)
    if damage in ("strides", "part of wider rows"):
        assert found.equal(expected)
    assert found.is_meta or found.isfinite().all()
    harmless = ("flat", "reversed", "one more", "part of wider rows")
    assert place not in lists or damage in harmless, "lists that do not fit are refused"


def test_lists_whose_rows_lie_apart_are_refused():
    operator, right, _ = valid_calls()["convolution"]
    right[2] = torch.cat([right[2], right[2]], -1).chunk(2, -1)[0]
    with pytest.raises(PluresError, match="do not fit this layer"):
        operator(*right)


@pytest.mark.parametrize("convert", [torch.Tensor.half, torch.Tensor.bfloat16, torch.Tensor.double])
def test_every_tensor_of_a_layer_must_be_float32(convert):
    for operator, right, _ in valid_calls().values():
        for place, value in enumerate(right):
            if isinstance(value, Tensor) and value.is_floating_point():
                with pytest.raises(PluresError, match="float32"):
                    operator(*right[:place], convert(value), *right[place + 1 :])


def test_lists_beyond_the_last_group_are_refused():
    """The last group has six inputs only: what would be right in the others lies beyond the end."""
    weight = torch.randn(9, 134, generator=generator(0))
    chain = chain_of(linear_lists(weight, torch.zeros(9, 134, dtype=torch.uint8), [0]))
    x, places = torch.randn(1, 4, 134), chain[1]
    places[-1] = 6
    with pytest.raises(PluresError, match="places must be below 6"):
        linear(x, *chain)
    places[-1] = 5
    linear(x, *chain)
    places[0] = 128  # after it was found right
    with pytest.raises(PluresError, match="places must be below 128"):
        linear(x, *chain)


def test_a_library_with_another_layout_is_refused(monkeypatch):
    class Maps(ctypes.Structure):
        _fields_ = (("values", ctypes.c_void_p),)

    monkeypatch.setattr(library, "STRUCTURES", (Maps, *library.STRUCTURES[1:]))
    with pytest.raises(library.UnavailableError, match="another layout of Maps"):
        library.Library(library.load().path)


@pytest.mark.parametrize("damage", ["dtype", "half", "meta", "shorter", "empty", "dimensions", "sparse"])
def test_training_refuses_what_does_not_fit(damage):
    lanes = library.load().lanes
    x, weight, bias = torch.randn(1, 2, 6, 5, 5, lanes), torch.randn(4, 6, 3, 3), torch.zeros(1, 4)
    mask = torch.rand(4, 6, generator=generator(0)) < 0.5
    weight = weight * mask[..., None, None]
    kernels = training.kernels_of(mask[None])
    layer = training.Convolved(weight, bias, kernels, (1, 1), (1, 1))
    for place in range(3):
        given = [x, weight, bias]
        given[place] = DAMAGES[damage](given[place])
        if (place, damage) != (0, "shorter"):  # fewer images
            with pytest.raises(PluresError):
                training.run_layers(given[0], layer._replace(weight=given[1], bias=given[2]))
    for stride, padding in ((0, (1, 1)), (-1, (1, 1)), (2**40, (1, 1)), (1, (-1, 1)), (1, (2**40, 1))):
        with pytest.raises(PluresError):
            training.run_layers(x, layer._replace(stride=(stride, stride), padding=padding))
    tables = [torch.ones(1, 6) for _ in range(4)]
    rest = (torch.zeros(1, dtype=torch.int64), 0.1, 1e-5)
    normed = training.Normed(*tables, *rest)
    if damage != "shorter":
        with pytest.raises(PluresError):
            training.run_layers(DAMAGES[damage](x), None, normed)
    with pytest.raises(PluresError):
        training.run_layers(x, None, normed, DAMAGES[damage](x))
    for place in range(4):
        given = [*tables[:place], DAMAGES[damage](tables[place]), *tables[place + 1 :]]
        with pytest.raises(PluresError):
            training.run_layers(x, None, training.Normed(*given, *rest))


# ---- finding, compiling and loading ----


@pytest.fixture
def compiler() -> str:
    found = shutil.which("cc")
    if found is None:
        pytest.fail("no C compiler; install one, or skip the native tests by PLURES_NATIVE=0")
    return found


@pytest.fixture(scope="module", autouse=True)
def quick_compiler() -> Iterator[None]:
    """What is compiled here is compiled fast, not for speed."""
    with pytest.MonkeyPatch.context() as patch:
        library.load()  # with the flags that users have
        patch.setattr(build, "FLAGS", tuple("-O0" if flag == "-O3" else flag for flag in build.FLAGS))
        yield


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cc") is None:
        pytest.fail("no C compiler; install one, or skip the native tests by PLURES_NATIVE=0")
    folder = tmp_path_factory.mktemp("compiled")
    return build.compile_into(folder, ["portable"])


def test_portable_kernels_are_torchs_own_too(compiled, monkeypatch):
    portable = library.Library(compiled, "portable")
    assert portable.instructions == "portable"
    monkeypatch.setattr("plures.native.operators.load", lambda: portable)
    x, lists, bias = layer_of()
    by_pixels, by_images = (unblock(run(x, lists, bias, lanes), 9) for lanes in (1, portable.lanes))
    agrees(by_images, by_pixels)


def test_a_compiled_library_is_found_again(compiled):
    assert build.find(compiled.parent, ["portable"]) == compiled
    assert build.find(compiled.parent, ["avx2"]) is None


def test_two_may_compile_at_once(compiler, tmp_path):
    with ThreadPoolExecutor(2) as pool:  # each runs compilers of its own
        made = list(pool.map(lambda _: build.compile_into(tmp_path, ["portable"]), range(2)))
    assert build.find(tmp_path, ["portable"]) in made
    assert set(tmp_path.iterdir()) == set(made), "nothing is left behind"
    assert library.Library(made[0], "portable").lanes == build.LEVELS["portable"][0]


@pytest.mark.parametrize("damage", [b"", b"not a library", None])
def test_a_damaged_library_is_removed_and_never_loaded(compiled, tmp_path, damage):
    copy = tmp_path / compiled.name
    content = bytearray(compiled.read_bytes())
    content[len(content) // 2] ^= 1
    copy.write_bytes(bytes(content) if damage is None else damage)
    assert build.find(tmp_path, ["portable"]) is None
    assert not copy.exists()


def test_a_folder_that_others_write_to_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / "plures" / "native"
    folder.mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for place in (folder, folder.parent):
        place.chmod(0o777)
        with pytest.raises(library.UnavailableError, match="other users can write to"):
            library.cache_folder()
        place.chmod(0o700)
    assert stat.S_IMODE(library.cache_folder().stat().st_mode) == 0o700


def test_a_user_without_a_home_to_write_to_is_told_what_to_set(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    told = "no folder to compile the native library into .*: set XDG_CACHE_HOME to a folder of your own"
    with pytest.raises(library.UnavailableError, match=told):
        library.cache_folder()
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user whom the system does not know
    monkeypatch.delenv("XDG_CACHE_HOME")
    with pytest.raises(library.UnavailableError, match=told):
        library.cache_folder()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert library.cache_folder() == tmp_path / "plures" / "native"


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("PLURES_NATIVE", "0", "PLURES_NATIVE=0"),
        ("PLURES_NATIVE", "yes", "use 0, 1 or one of avx512, avx2, portable"),
        ("CC", "no-such-compiler", "no C compiler"),
        ("CC", "false", "cannot be compiled"),
    ],
)
def test_why_there_is_no_library(tmp_path, monkeypatch, variable, value, reason):
    tmp_path.chmod(0o700)
    monkeypatch.setattr(library, "_load_once", library._load_once.__wrapped__)  # nothing is known of earlier calls
    monkeypatch.setattr(build, "find", lambda *_: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PLURES_NATIVE", "")
    monkeypatch.setenv(variable, value)
    assert reason in library.why_unavailable()


@pytest.fixture(scope="module")
def sixteen_lanes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source as it is compiled for AVX-512, in vectors that every CPU can run."""
    if shutil.which("cc") is None:
        pytest.fail("no C compiler; install one, or skip the native tests by PLURES_NATIVE=0")
    levels = ["portable", "avx2"] if "avx2" in build.levels_of(platform.machine()) else ["portable"]
    with pytest.MonkeyPatch.context() as patch:
        for level, wide in zip(levels, ("avx512", "avx2"), strict=False):
            patch.setitem(build.LEVELS, level, (build.LEVELS[wide][0], ("-DPLURES_PLAIN",)))
        return build.compile_into(tmp_path_factory.mktemp("sixteen"), levels)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [(3, 3), (1, 1)])
@pytest.mark.parametrize("outputs", [9, 90])
def test_the_tiles_of_avx512_are_torchs_own(sixteen_lanes, monkeypatch, whole, stride, size, outputs):
    wide = library.Library(sixteen_lanes, "portable")
    monkeypatch.setattr("plures.native.operators.load", lambda: wide)
    members, batch, padding = 3, 19, size[0] // 2
    weight = torch.randn(outputs, 70, *size, generator=generator(0)) / 25
    owners = drawn_owners((outputs, 70, 1, 1) if whole else tuple(weight.shape), members, 0)
    lists = kernel_lists(weight, owners, list(range(members)))
    x = torch.randn(members * batch, 70, 9, 11, generator=generator(1))
    bias = torch.randn(members, outputs, generator=generator(2))
    expected = torch.cat(
        [F.conv2d(part, weight * (owners == m), bias[m], stride, padding) for m, part in enumerate(x.chunk(members))]
    )
    for lanes in wide.layouts:
        settings_of = (size, (stride, stride), (padding, padding), *lists[3:], False)
        found = convolution(block(x, members, lanes), None, *lists[:3], bias, *settings_of)
        agrees(unblock(found, batch), expected)


def test_blocks_of_avx512_are_torchs_own(sixteen_lanes, monkeypatch):
    monkeypatch.setattr("plures.native.operators.load", lambda: library.Library(sixteen_lanes, "portable"))
    weight = torch.randn(21, 600, generator=generator(0)) / 25
    owners = drawn_owners((3, 600), 3, 0)
    chain, x = chain_of(linear_lists(weight, owners, [0, 1, 2])), torch.randn(3, 31, 600, generator=generator(1))
    spread = owners.repeat_interleave(8, 0)[:21]
    found = linear(x, *chain)
    agrees(found, torch.stack([x[m] @ (weight * (spread == m)).T for m in range(3)]))


def test_avx512_kernels_compile(compiler, tmp_path):
    """Where the CPU cannot run them, they are at least the same source with wider vectors."""
    if "avx512" not in build.levels_of(os.uname().machine):
        pytest.skip("not an x86 machine")
    path = build.compile_into(tmp_path, ["avx512", "portable"])
    assert library.Library(path, "portable").lanes == build.LEVELS["portable"][0]


@given(st.integers(2, 256), st.integers(1, 300), st.integers(0, 99))
def test_any_words_are_unpacked_as_plain_divisions_would(base: int, count: int, seed: int) -> None:
    words = torch.randint(-(2**63), 2**63 - 1, (-(-count // digits_per_word(base)),), generator=generator(seed))
    numbers = [word % 2**64 for word in words.tolist()]
    expected = [number // base**place % base for number in numbers for place in range(digits_per_word(base))]
    assert unpack(words, base, count).tolist() == expected[:count]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_checksums_are_those_of_hashlib(threads: int, monkeypatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    sizes = [*range(130), 1000, 4096, 99_999]
    named = {str(size): torch.randint(256, (size,), generator=generator(size), dtype=torch.uint8) for size in sizes}
    named |= {"scalar": torch.tensor(3), "half": torch.ones(5, 7, dtype=torch.bfloat16)}

    def plain(tensor: Tensor) -> str:
        label = f"{tensor.dtype}{list(tensor.shape)}".encode()
        return hashlib.sha256(label + bytes(tensor.reshape(-1).view(torch.uint8).tolist())).hexdigest()[:16]

    expected = {name: plain(tensor) for name, tensor in named.items()}
    assert checksums(named) == expected
    named["many axes"] = torch.zeros([1] * 40)  # its label does not fit into a block: all of them by hashlib
    assert checksums(named) == expected | {"many axes": plain(named["many axes"])}
