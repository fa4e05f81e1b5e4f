from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from runtime.kernels import flash, partials, sdpa
from runtime.kernels.partials import Band, trim, window
from runtime.kernels.registry import KERNELS, Kernel, Partial, choose_kernel
from tasp_lab.core.errors import RunError
from tests.support.accumulator import Accumulator

Tensor = torch.Tensor
CPU = torch.device("cpu")
on_both = pytest.mark.parametrize("kernel", [KERNELS["sdpa"], KERNELS["reference"]], ids=lambda kernel: kernel.name)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tensors are so small that threads on a busy machine would wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Case:
    """Sizes, a mask, how tensors lie in memory, and what the numbers are."""

    batch: int = 1
    queries: int = 9
    keys: int = 7
    kv_heads: int = 1
    group: int = 1
    head_dim: int = 8
    low: int = -99
    high: int = 99
    layout: str = "plain"
    seed: int = 0
    value_dim: int = 8

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def seen(self) -> Tensor:
        """Bool [queries, keys]."""
        distance = torch.arange(self.queries)[:, None] - torch.arange(self.keys)
        return (self.low <= distance) & (distance <= self.high)

    def tensors(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        heads = self.kv_heads * self.group
        q = torch.randn(self.batch, self.queries, heads, self.head_dim, generator=generator).to(dtype)
        sizes = self.head_dim, self.value_dim
        both = torch.randn(self.keys, self.batch, self.kv_heads, sum(sizes), generator=generator).to(dtype)
        k, v = both.transpose(0, 1).split(sizes, -1)
        if self.layout == "columns":
            return tuple(x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v))
        if self.layout == "gaps":
            return tuple(x.repeat_interleave(2, 3)[..., ::2] for x in (q, k, v))
        return q, k, v

    def attend(self, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor) -> Partial:
        return kernel.attend(q, k, v, scale=self.scale, low=self.low, high=self.high)


@st.composite
def cases(draw: st.DrawFn, most: int = 30) -> Case:
    queries, keys = draw(st.integers(0, most)), draw(st.integers(0, most))
    limits = st.integers(-keys - 2, queries + 2)
    low, high = draw(
        st.one_of(
            st.just((-most, most)),
            st.tuples(st.sampled_from([0, 1]), st.just(most)),
            st.tuples(limits, limits).map(sorted),
            st.tuples(limits, limits),
        )
    )
    head_dim = draw(st.sampled_from([1, 5, 8, 16, 64]))
    return Case(
        draw(st.integers(1, 2)),
        queries,
        keys,
        draw(st.integers(1, 3)),
        draw(st.integers(1, 4)),
        head_dim,
        low,
        high,
        draw(st.sampled_from(["plain", "columns", "gaps"])),
        draw(st.integers(0, 2**32)),
        draw(st.just(head_dim) | st.sampled_from([1, 5, 8, 16, 64])),
    )


def by_definition(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Partial:
    """Head by head and row by row in float64, each over the list of keys that it sees."""
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    lse = torch.full(q.shape[:3], -math.inf, dtype=torch.float64)
    seen = case.seen()
    for batch, row, head in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        keys, values = (x[batch, seen[row], head // case.group].double() for x in (k, v))
        scores = keys @ q[batch, row, head].double() * case.scale
        if not scores.numel() or (scores == -math.inf).all():
            continue
        out[batch, row, head] = scores.softmax(0) @ values
        lse[batch, row, head] = scores.logsumexp(0)
    return Partial(out, lse)


def error(found: Tensor, expected: Tensor) -> float:
    """Of what is finite, relative in norm; what is not finite must be the same."""
    finite = expected.isfinite()
    same = torch.equal(found.isfinite(), finite)
    same &= torch.equal(found[~finite].double().nan_to_num(7, 8, 9), expected[~finite].double().nan_to_num(7, 8, 9))
    difference = (found[finite].double() - expected[finite].double()).norm()
    return float(difference / expected[finite].double().norm().clamp_min(1e-30)) if same else math.inf


def assert_close(found: Partial, expected: Partial, most: float = 1e-5) -> None:
    assert found.out.shape == expected.out.shape
    assert found.lse.shape == expected.lse.shape
    assert error(found.out, expected.out) < most
    # An error in lse is one relative to the sum of exponentials, so it counts as it is.
    assert error(1 + found.lse.exp(), 1 + expected.lse.exp()) < most


@given(cases(), st.sampled_from([3, 512]))
@settings(max_examples=150)
@example(Case(kv_heads=0), 512)
@example(Case(batch=0, low=-3, high=3), 512)
def test_every_kernel_is_softmax_attention_over_the_keys_seen(case: Case, rows_at_once: int) -> None:
    """For any sizes, ratio of heads, mask and strides; rows that see nothing have lse -inf and out 0."""
    q, k, v = case.tensors()
    expected = by_definition(case, q, k, v)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partials, "ROWS_AT_ONCE", rows_at_once)
        assert_close(case.attend(KERNELS["reference"], q, k, v), expected, 1e-12)
        assert_close(case.attend(KERNELS["sdpa"], q, k, v), expected)


@given(cases(), st.sampled_from([torch.float64, torch.bfloat16, torch.float16]))
@settings(max_examples=30)
def test_dtypes_of_the_cpu_operator(case: Case, dtype: torch.dtype) -> None:
    """Out has the dtype of the inputs, lse is never less exact than float32."""
    q, k, v = case.tensors(dtype)
    found, expected = case.attend(KERNELS["sdpa"], q, k, v), case.attend(KERNELS["reference"], q, k, v)
    assert found.out.dtype == dtype
    assert found.lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert error(found.out, expected.out) < (1e-12 if dtype == torch.float64 else 2**-7)
    assert error(1 + found.lse.exp(), 1 + expected.lse.exp()) < (1e-12 if dtype == torch.float64 else 1e-3)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("low", [-999, 0, -40])
def test_bfloat16_is_as_exact_as_torch(head_dim: int, low: int) -> None:
    """The error of sdpa is at most 1.5 times that of torch's public function, whatever the mask."""
    case = Case(1, 300, 300, 2, 2, head_dim, low, 999, value_dim=head_dim)
    q, k, v = case.tensors(torch.bfloat16)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    torchs = scaled_dot_product_attention(*heads_first, attn_mask=case.seen(), enable_gqa=True).transpose(1, 2)
    expected = case.attend(KERNELS["reference"], q, k, v)
    assert error(case.attend(KERNELS["sdpa"], q, k, v).out, expected.out) <= 1.5 * error(torchs, expected.out)


def test_windows_longer_than_a_tile() -> None:
    """Masks that cut the blocks in which the operator and the kernel walk, with keys far from the first row."""
    case = Case(1, 1100, 1500, 1, 2, 8, -900, -300)
    q, k, v = case.tensors()
    assert_close(case.attend(KERNELS["sdpa"], q, k, v), case.attend(KERNELS["reference"], q, k, v))


sizes = st.integers(0, 12)
limits = st.integers(-15, 15)


@given(sizes, sizes, limits, limits)
@settings(max_examples=200)
def test_trim_keeps_exactly_the_rows_and_keys_of_the_mask(queries: int, keys: int, low: int, high: int) -> None:
    seen = Case(queries=queries, keys=keys, low=low, high=high).seen()
    band = trim(queries, keys, low, high)
    rows, columns = seen.any(1).nonzero().flatten().tolist(), seen.any(0).nonzero().flatten().tolist()
    assert rows == list(range(band.first_query, band.first_query + band.queries))
    assert columns == list(range(band.first_key, band.first_key + band.keys))
    if not rows:
        return
    left = Case(queries=band.queries, keys=band.keys, low=band.low, high=band.high).seen()
    assert torch.equal(left, seen[rows][:, columns])
    assert band.unmasked == bool(left.all())
    assert band.causal == (torch.equal(left, torch.ones_like(left).tril()) and not band.unmasked)
    assert torch.equal(left, bottom_right(band.queries, band.keys, *window(band)))
    assert not (band.unmasked or band.causal) or window(band)[0] == -1, "a limit where there is none costs time"
    assert trim(band.queries, band.keys, band.low, band.high) == band._replace(first_query=0, first_key=0)


def bottom_right(queries: int, keys: int, left: int, right: int) -> Tensor:
    """Bool [queries, keys] as flash-attn says it: from row i's place, the last row being at the last key."""
    assert min(left, right) >= -1
    offset = torch.arange(keys) - torch.arange(queries)[:, None] - (keys - queries)
    return ((left < 0) | (offset >= -left)) & ((right < 0) | (offset <= right))


@on_both
@given(case=cases(), value=st.sampled_from([math.nan, math.inf, -math.inf]), in_keys=st.booleans(), data=st.data())
@settings(max_examples=100)
def test_a_row_depends_on_the_keys_that_it_sees(
    kernel: Kernel, case: Case, value: float, in_keys: bool, data: st.DataObject
) -> None:
    """What is not finite, in a key or a value, reaches exactly the rows that see it, and these as softmax says."""
    q, k, v = case.tensors()
    if case.keys:
        at = data.draw(st.integers(0, case.keys - 1))
        size = case.head_dim if in_keys else case.value_dim
        (k if in_keys else v)[:, at] = torch.tensor([value] + [0.0] * (size - 1))
        if math.isnan(value):
            (k if in_keys else v)[:, at] = value
    expected = by_definition(case, q, k, v)
    found = case.attend(kernel, q, k, v)
    if case.keys and math.isnan(value):
        assert torch.equal(found.out.isnan().any(-1), case.seen()[:, at, None].expand(found.lse.shape))
    assert error(found.out, expected.out) < 1e-5
    assert torch.equal(found.lse == -math.inf, expected.lse == -math.inf)
    assert torch.equal(found.lse.isfinite(), expected.lse.isfinite())


@on_both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keys", [6, 40, 700])  # the operator computes these three in different ways
@pytest.mark.parametrize("low", [-999, 0, -3])
def test_scores_of_plus_and_minus_infinity(kernel: Kernel, dtype: torch.dtype, keys: int, low: int) -> None:
    """A score of +inf makes a row NaN, one of -inf weighs nothing, and rows with nothing else weigh nothing."""
    case = Case(1, keys, keys, 1, 1, 8, low, 999)
    q, k, v = case.tensors(dtype)
    q[..., 0] = torch.tensor([1.0, -1.0]).repeat(keys)[:keys, None]
    k[:, :4] = torch.tensor([math.inf] + [0.0] * 7)
    k[:, 1] *= -1
    k[:, 1, :, 1:] = 0
    k[:, :1] = 0
    k[:, 0, :, 0] = -math.inf
    found, expected = case.attend(kernel, q, k, v), by_definition(case, q, k, v)
    assert error(found.out, expected.out) < (1e-5 if dtype == torch.float32 else 0.01)
    assert torch.equal(found.lse == -math.inf, expected.lse == -math.inf)


@on_both
def test_a_sum_of_exponentials_of_one_is_not_taken_for_none(kernel: Kernel) -> None:
    """The CPU operator says lse 0 for a row without weight; of a single key with score 0 it is right."""
    zeros = torch.zeros(1, 3, 2, 8)
    assert kernel.attend(zeros, zeros[:, :1], zeros[:, :1], scale=1.0, low=0, high=0).lse.tolist() == [
        [[0.0, 0.0], [-math.inf, -math.inf], [-math.inf, -math.inf]]
    ]


@given(cases(), st.data(), st.sampled_from([torch.float32, torch.float64]))
@settings(max_examples=100)
def test_merging_any_segments_of_keys_in_any_order_is_the_whole(
    case: Case, data: st.DataObject, dtype: torch.dtype
) -> None:
    """And of any segments of the queries; rows of a segment that see none of it are among them."""
    q, k, v = case.tensors(dtype)
    kernel, most = (KERNELS["sdpa"], 1e-5) if dtype == torch.float32 else (KERNELS["reference"], 1e-12)
    query_cuts, key_cuts = data.draw(cuts(case.queries)), data.draw(cuts(case.keys))
    blocks = data.draw(st.permutations([(rows, keys) for rows in query_cuts for keys in key_cuts]))
    total = accumulator(case, dtype)
    for (first_row, end_row), (first_key, end_key) in blocks:
        shift = first_key - first_row
        rows, keys = slice(first_row, end_row), slice(first_key, end_key)
        total.add(
            first_row,
            kernel.attend(
                q[:, rows], k[:, keys], v[:, keys], scale=case.scale, low=case.low + shift, high=case.high + shift
            ),
        )
    assert_close(Partial(*total.result(dtype)), case.attend(KERNELS["reference"], q, k, v), most)


def cuts(size: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """The segments between some places."""
    places = st.lists(st.integers(0, size), max_size=3).map(lambda drawn: sorted([0, *drawn, size]))
    return places.map(lambda edges: list(pairwise(edges)))


def accumulator(case: Case, dtype: torch.dtype = torch.float32) -> Accumulator:
    return Accumulator(case.batch, case.queries, case.kv_heads * case.group, case.value_dim, CPU, dtype)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(0, 2**32))
def test_merging_any_groups_of_keys_is_the_whole(groups: list[int], seed: int) -> None:
    case = Case(keys=len(groups), seed=seed)
    q, k, v = case.tensors(torch.float64)
    total = accumulator(case, torch.float64)
    for group in range(4):
        members = torch.tensor(groups) == group
        total.add(0, case.attend(KERNELS["reference"], q, k[:, members], v[:, members]))
    assert_close(Partial(*total.result(torch.float64)), case.attend(KERNELS["reference"], q, k, v), 1e-12)


@given(
    st.sampled_from([math.nan, math.inf, -math.inf, 1e4]), st.integers(0, 6), st.integers(0, 7), st.sampled_from("kv")
)
def test_merging_keeps_what_is_not_finite(value: float, at: int, cut: int, where: str) -> None:
    """In two parts as in one, in either order, also where one part is scores of -inf only."""
    case = Case(queries=2)
    q, k, v = case.tensors()
    q[..., 0] = torch.tensor([1.0, -1.0])[:, None]
    {"k": k, "v": v}[where][:, at, :, 0] = value
    halves = [case.attend(KERNELS["sdpa"], q, k[:, part], v[:, part]) for part in (slice(cut), slice(cut, None))]
    for ordered in (halves, halves[::-1]):
        total = accumulator(case)
        for half in ordered:
            total.add(0, half)
        assert error(total.result(torch.float32)[0], by_definition(case, q, k, v).out) < 1e-5


@pytest.mark.parametrize("rubbish_first", [True, False])
def test_a_side_with_lse_minus_infinity_weighs_nothing_whatever_its_out(rubbish_first: bool) -> None:
    rubbish = Partial(torch.full((1, 3, 1, 2), math.nan), torch.full((1, 3, 1), -math.inf))
    good = Partial(torch.ones(1, 2, 1, 2), torch.zeros(1, 2, 1))
    total = Accumulator(1, 4, 1, 2, CPU)
    for first, partial in [(0, rubbish), (1, good)] if rubbish_first else [(1, good), (0, rubbish)]:
        total.add(first, partial)
    out, lse = total.result(torch.bfloat16)
    assert out.dtype == torch.bfloat16
    assert out[0, :, 0, 0].tolist() == [0, 1, 1, 0]
    assert lse[0, :, 0].tolist() == [-math.inf, 0, 0, -math.inf]


def test_the_first_partial_is_copied_bit_for_bit_and_left_alone() -> None:
    q, k, v = Case().tensors()
    partial = Case().attend(KERNELS["sdpa"], q, k, v)
    before = partial.out.clone()
    total = accumulator(Case())
    total.add(0, partial)
    assert torch.equal(total.result(torch.float32)[0], before)
    total.add(0, partial)
    assert torch.equal(partial.out, before)


@pytest.mark.parametrize(
    ("name", "dtype", "device", "head_dim", "message"),
    [
        ("flash", torch.float32, "cpu", 64, "unknown attention kernel 'flash', expected auto, flash-attn, sdpa"),
        ("sdpa", torch.int64, "cpu", 64, "not torch.int64"),
        ("sdpa", torch.float64, "cuda", 64, "not torch.float64; expected reference"),
        ("sdpa", torch.float32, "cuda", 64, "torch.float16 and torch.bfloat16, not torch.float32"),
        ("sdpa", torch.bfloat16, "cuda", 20, "multiple of 8 up to 256, not 20"),
        ("sdpa", torch.float32, "mps", 64, "cannot run on mps: it runs on cpu and cuda, not mps; expected reference"),
        ("reference", torch.int64, "cpu", 64, "floating point, not torch.int64; and no other kernel can, either"),
        ("auto", torch.int64, "cpu", 64, "'reference' must be chosen by name"),
        ("flash-attn", torch.float32, "cuda", 64, "torch.float16 and torch.bfloat16, not torch.float32"),
        ("flash-attn", torch.bfloat16, "cuda", 300, "up to 256, not 300"),
        (
            "flash-attn",
            torch.bfloat16,
            "cpu",
            64,
            "kernel flash-attn cannot run on cpu: it runs on cuda, not cpu; expected sdpa or ",
        ),
        ("flash-attn", torch.bfloat16, "cuda", 64, "flash_attn_2_cuda does not import"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(
    name: str, dtype: torch.dtype, device: str, head_dim: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_2_cuda", None)
    with pytest.raises(RunError) as refused:
        choose_kernel(name, dtype, torch.device(device), head_dim)
    assert message in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def installed(patch: pytest.MonkeyPatch, name: str, **contents: object) -> None:
    """A module with these contents, and the packages that it lies in."""
    module = ModuleType(name)
    vars(module).update(contents)
    patch.setitem(sys.modules, name, module)


def install_flash_attn(patch: pytest.MonkeyPatch, version: str = "2.8.3", **functions: object) -> None:
    installed(patch, "flash_attn_2_cuda")
    installed(patch, "flash_attn", __version__=version)
    installed(patch, "flash_attn.flash_attn_interface", **functions)


def test_auto_is_the_fastest_kernel_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setitem(sys.modules, "flash_attn_2_cuda", None)
    assert choose_kernel("auto", torch.bfloat16, gpu, 64).name == "sdpa"
    install_flash_attn(monkeypatch)
    assert choose_kernel("auto", torch.bfloat16, gpu, 64).name == "flash-attn"
    assert choose_kernel("auto", torch.bfloat16, CPU, 64).name == "sdpa"


def test_a_flash_attn_that_pads_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    install_flash_attn(monkeypatch, "2.5.9.post1")
    assert choose_kernel("auto", torch.bfloat16, gpu, 64).name == "sdpa"
    with pytest.raises(RunError, match=r"it is release 2\.5\.9\.post1, expected 2\.6\.3 or later"):
        choose_kernel("flash-attn", torch.bfloat16, gpu, 64)


def test_flash_attn_on_triton_is_not_used_on_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backward pass refuses windows, and a causal call is one; its compiled backend is used."""
    gpu = torch.device("cuda")
    install_flash_attn(monkeypatch)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert choose_kernel("auto", torch.bfloat16, gpu, 64).name == "flash-attn"
    monkeypatch.setenv("FLASH_ATTENTION_TRITON_AMD_ENABLE", "TRUE")
    assert choose_kernel("auto", torch.bfloat16, gpu, 64).name == "sdpa"
    with pytest.raises(RunError, match=r"Triton backend .* has no backward pass for causal masks"):
        choose_kernel("flash-attn", torch.bfloat16, gpu, 64)


@pytest.mark.parametrize(
    ("name", "module", "capabilities"),
    [("flash-attn-3", "flash_attn_interface", {9}), ("flash-attn-4", "flash_attn.cute.interface", {9, 10})],
)
def test_later_flash_attentions_are_chosen_by_name_where_they_run(
    monkeypatch: pytest.MonkeyPatch, name: str, module: str, capabilities: set[int]
) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "flash_attn_2_cuda", None)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(RunError, match=f"{name} cannot run on cuda: its module {module} does not import"):
        choose_kernel(name, torch.bfloat16, gpu, 64)
    installed(monkeypatch, module)
    for major in (8, 9, 10, 12):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, major=major: (major, 0))
        if major in capabilities:
            assert choose_kernel(name, torch.bfloat16, gpu, 64).name == name
        else:
            with pytest.raises(RunError, match=rf"compute capability .*, not {major}\.0"):
                choose_kernel(name, torch.bfloat16, gpu, 64)
    assert choose_kernel("auto", torch.bfloat16, gpu, 64).name == "sdpa"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(RunError, match="GPUs of NVIDIA, not on those of AMD"):
        choose_kernel(name, torch.bfloat16, gpu, 64)


@pytest.mark.parametrize(
    ("capability", "available", "head_dim", "message"),
    [
        ((9, 0), True, 64, None),
        ((10, 0), True, 128, None),
        ((8, 0), True, 64, r"compute capability 9 or higher, not 8\.0"),
        ((9, 0), False, 64, "torch has no cuDNN here"),
        ((9, 0), True, 136, "up to 128, or 192 with values of 128, not 136"),
    ],
)
def test_cudnn_is_chosen_by_name_on_hopper_and_blackwell(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], available: bool, head_dim: int, message: str | None
) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setitem(sys.modules, "flash_attn_2_cuda", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: available)
    assert choose_kernel("auto", torch.bfloat16, gpu, head_dim).name == "sdpa"
    if message is None:
        assert choose_kernel("cudnn", torch.bfloat16, gpu, head_dim).name == "cudnn"
    else:
        with pytest.raises(RunError, match=message):
            choose_kernel("cudnn", torch.bfloat16, gpu, head_dim)


Takes = Callable[[int, int], bool]
"""Whether a stand-in takes keys and values of such widths."""


def only_equal(keys: int, values: int) -> bool:
    return keys == values


def as_3(keys: int, values: int) -> bool:
    """The check of mha_fwd in hopper/flash_api.cpp, Dao-AILab/flash-attention, but for keys up to 64."""
    return keys == values or (128 < keys <= 192 and 96 < values <= 128)


def any_width(keys: int, values: int) -> bool:
    return True


TORCH_KERNELS: list[tuple[str, Takes]] = [
    ("sdpa", only_equal), ("flash-attn-3", as_3), ("flash-attn-3", as_3), ("flash-attn-4", any_width),
    ("sdpa", only_equal),
]  # fmt: skip
"""Kernels that torch's operator of FlashAttention runs, one after another, and what it then takes."""


def flash_by_definition(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, left: int, right: int, takes: Takes = only_equal
) -> tuple[Tensor, Tensor]:
    """What flash-attn returns; its lse is [batch, heads, queries], and causal overrides the limit on the right."""
    assert takes(q.shape[-1], v.shape[-1])
    right = 0 if causal else right
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    scores = scores.masked_fill(~bottom_right(q.shape[1], k.shape[1], left, right), -math.inf)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v), scores.logsumexp(-1)


@pytest.mark.parametrize(
    ("name", "widths", "message"),
    [
        ("cudnn", (192, 128), ""),
        ("cudnn", (128, 64), ""),
        (
            "cudnn",
            (192, 96),
            "multiple of 8 up to 128, or 192 with values of 128, not 192; expected sdpa or flash-attn",
        ),
        ("flash-attn-4", (192, 128), ""),
        ("flash-attn-4", (64, 128), ""),
        ("flash-attn-4", (192, 64), "another width than keys up to 128, and 192/128, not 192/64; expected sdpa or"),
        ("flash-attn-3", (192, 64), ""),
        ("sdpa", (192, 128), ""),
        ("sdpa", (64, 20), "multiple of 8 up to 256, not 20"),
        ("reference", (7, 5), ""),
    ],
)
def test_values_of_another_width_than_keys(
    monkeypatch: pytest.MonkeyPatch, name: str, widths: tuple[int, int], message: str
) -> None:
    """What runs them, natively or padded; what does not is refused in one line, with kernels that do."""
    gpu = torch.device("cuda")
    monkeypatch.setitem(sys.modules, "flash_attn_2_cuda", None)
    for module in ("flash_attn_interface", "flash_attn.cute.interface"):
        installed(monkeypatch, module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    if not message:
        assert choose_kernel(name, torch.bfloat16, gpu, *widths).name == name
        return
    with pytest.raises(RunError) as refused:
        choose_kernel(name, torch.bfloat16, gpu, *widths)
    assert message in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def flash_2_6(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_softmax):  # type: ignore[no-untyped-def]
    out, lse = flash_by_definition(q, k, v, softmax_scale, causal, *window_size)
    return out, q, k, v, out, lse, None, None


class Flash28:
    """An operator made with torch.library.custom_op takes anything and keeps its first definition."""

    def __call__(self, *tensors, **options):  # type: ignore[no-untyped-def]
        return self._init_fn(*tensors, **options)

    @staticmethod
    def _init_fn(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        return_softmax,
    ):  # type: ignore[no-untyped-def]  # fmt: skip
        out, lse = flash_by_definition(q, k, v, softmax_scale, causal, window_size_left, window_size_right)
        return out, lse, None, None


def torch_operator(  # type: ignore[no-untyped-def]
    q, k, v, starts_q, starts_k, most_q, most_k, dropout_p, causal, debug, *, scale, window_size_left,
    window_size_right, takes=only_equal,
):  # fmt: skip
    """What torch's operator of FlashAttention returns. A window has both limits, or none, in which None is no limit."""
    assert starts_q is starts_k is None
    assert (most_q, most_k, debug) == (q.shape[1], k.shape[1], False)
    window = window_size_left, window_size_right
    assert window == (None, None) or (not causal and min(window) >= 0)
    left, right = (-1 if each is None else each for each in window)
    return *flash_by_definition(q, k, v, scale, causal, left, right, takes), None, None, None


class Implementations:
    """Which implementation torch's operators are; what is activated is counted."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.activated: list[str | None] = [None]
        patch.setattr(flash, "_activated", set())
        patch.setattr(flash.implementations, "current_flash_attention_impl", lambda: self.activated[-1])
        patch.setattr(flash.implementations, "activate_flash_attention_impl", self.activated.append)
        patch.setattr(flash.implementations, "restore_flash_attention_impl", lambda: self.activated.append(None))


def as_on_gpus(patch: pytest.MonkeyPatch) -> None:
    """Let the kernel sdpa call torch's FlashAttention on a CPU, too."""
    patch.setattr(sdpa, "_attend_on_cpu", flash.TORCH_FLASH.attend)
    patch.setattr(sdpa, "_gradients_on_cpu", flash.TORCH_FLASH.differentiate)


@given(cases())
@settings(max_examples=60)
@example(Case())
@example(Case(queries=40, keys=40, low=0))
@example(Case(queries=40, keys=30, low=-9, kv_heads=2, group=3))
@example(Case(queries=9, keys=20, low=-15, high=-3))
@example(Case(queries=4, keys=2, low=-1, high=2))
@example(Case(head_dim=192, value_dim=128))
def test_the_flash_attention_of_torch_is_asked_for_the_right_window(case: Case) -> None:
    """Against a stand-in with the operator's signature; implementations are switched only where another one ran."""
    q, k, v = case.tensors()
    expected = case.attend(KERNELS["reference"], q, k, v)
    with pytest.MonkeyPatch.context() as patch:
        found = Implementations(patch)
        as_on_gpus(patch)
        for name, takes in TORCH_KERNELS:
            patch.setattr(torch.ops.aten, "_flash_attention_forward", functools.partial(torch_operator, takes=takes))
            assert_close(case.attend(KERNELS[name], q, k, v), expected)
    assert found.activated in ([None], [None, "FA3", "FA4", None]), "the first where no key is seen"


def test_an_implementation_that_the_program_has_activated_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Implementations(monkeypatch)
    as_on_gpus(monkeypatch)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", torch_operator)
    found.activated.append("FA4")
    Case().attend(KERNELS["sdpa"], *Case().tensors())
    assert found.activated == [None, "FA4"]


def cudnn_operator(query, key, value, bias, compute_lse, dropout_p, causal, *, scale):  # type: ignore[no-untyped-def]
    """What torch's cuDNN operator returns; causal is aligned to the top left."""
    assert bias is None
    assert compute_lse
    assert not causal or query.shape[2] == key.shape[2]
    q, k, v = partials.heads_first(query, key, value)
    out, lse = flash_by_definition(q, k, v, scale, causal, -1, -1, any_width)
    return out.transpose(1, 2), lse.unsqueeze(-1), *[None] * 7


@given(cases())
@settings(max_examples=60)
@example(Case(queries=40, keys=40, low=0))
@example(Case(queries=40, keys=40, kv_heads=2, group=3))
def test_cudnn_is_asked_for_the_right_mask(case: Case) -> None:
    q, k, v = case.tensors()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops.aten, "_flash_attention_forward", torch_operator)
        patch.setattr(torch.backends.cuda, "can_use_cudnn_attention", lambda parameters: True)
        patch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", cudnn_operator)
        assert_close(case.attend(KERNELS["cudnn"], q, k, v), case.attend(KERNELS["reference"], q, k, v))


@given(cases())
@settings(max_examples=60)
@example(Case())
def test_flash_attn_is_asked_for_the_right_window_in_every_release(case: Case) -> None:
    """Against a stand-in that follows its documentation, with the signatures of releases 2.6 and 2.7 to 2.8."""
    q, k, v = case.tensors()
    expected = case.attend(KERNELS["reference"], q, k, v)
    releases: list[Callable[..., object]] = [flash_2_6, Flash28()]
    for forward in releases:
        with pytest.MonkeyPatch.context() as patch:
            install_flash_attn(patch, _flash_attn_forward=forward)
            assert_close(case.attend(KERNELS["flash-attn"], q, k, v), expected)


@pytest.mark.parametrize(
    ("operator", "band"),
    [
        (flash.TORCH_FLASH.attend, Band(0, 40, 0, 40, 0, 39)),
        (flash.TORCH_FLASH.attend, Band(0, 40, 0, 50, -49, 39)),
        (flash.TORCH_FLASH.attend, Band(0, 40, 0, 50, -20, 30)),
        (sdpa._cudnn_operator, Band(0, 40, 0, 40, 0, 39)),
        (sdpa._cudnn_operator, Band(0, 40, 0, 50, -49, 39)),
    ],
)
def test_the_gpu_operators_take_our_arguments(operator: partials.Compute, band: Band) -> None:
    """Their signatures and shapes, on tensors without data; their numbers need a GPU."""
    q = torch.empty(2, band.queries, 6, 64, dtype=torch.bfloat16, device="meta")
    k = torch.empty(2, band.keys, 3, 64, dtype=torch.bfloat16, device="meta")
    found = operator(q, k, k, 0.125, band)
    assert found.out.shape == q.shape
    assert found.lse.shape == q.shape[:3]
    assert found.lse.dtype == torch.float32
