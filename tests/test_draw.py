"""The draw on the device is that of `sampler.truncated` and `sampler.gumbel_noise`: see `graft.model.kernels.draw`."""

import numpy as np
import pytest
import torch

from graft.model.hashing import GOLDEN
from graft.model.noise import gumbel_noise
from graft.model.sampler import LOWEST, truncated, weights

pytest.importorskip("triton", reason="Triton is not installed, and without it there are no kernels")

import triton
import triton.language as tl

import plain_kernels
from graft.model.kernels import draw as draw_kernels
from graft.model.kernels import scores as scores_of

REACH = scores_of.REACH.value
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEEDS = torch.arange(3000)
SETTINGS = [  # top_k, top_p, min_p
    (40, 1.0, 0.0),
    (42, 1.0, 0.0),
    (44, 1.0, 0.0),
    (0, 0.7, 0.0),
    (60, 0.9, 0.02),
    (0, 1.0, 0.01),
    (120, 0.99, 0.0),
    (1, 1.0, 0.0),
    (299, 1.0, 0.0),
    (300, 1.0, 0.0),
    (2**30, 0.5, 0.0),
    (0, 1e-9, 0.0),
    (0, 0.99999, 0.0),
    (0, 1.0, 1.0),
    (0, 1.0, 1e-7),
    (7, 0.3, 0.9),
]


@pytest.fixture
def small(monkeypatch):
    """A vocabulary of 300 is several chunks, the last of them not full."""
    monkeypatch.setattr(draw_kernels, "_CHUNK", 128)
    monkeypatch.setattr(draw_kernels, "_WIDE_CHUNK", 128)


def drawn(logits, rows, depths, *settings, **options):
    """What the kernels and the reference choose."""
    ours, expected = (torch.full((len(logits),), -1, device=DEVICE) for _ in range(2))
    inputs = [part.to(DEVICE) for part in (logits, rows, depths, *settings)]
    options = {name: part.to(DEVICE) if isinstance(part, torch.Tensor) else part for name, part in options.items()}
    draw_kernels.draw(*inputs, ours, **options)
    plain_kernels.draw(*inputs, expected, **options)
    return ours.cpu(), expected.cpu()


def logits_of(kind, settings):
    """Rows of 300 logits, each with settings of its own."""
    torch.manual_seed(len(kind))
    logits = torch.randn(len(settings), 300) * 2
    if kind == "coarse":  # as of bf16: some are equal
        logits = logits.round(decimals=1)
    if kind == "equal":
        logits = torch.full_like(logits, -1.5)
        logits[:, ::2] = -0.0
        logits[:, 100] = 0.0
    if kind == "forbidden":
        logits[:, 3:290] = -torch.inf
    return logits


@pytest.mark.parametrize(
    ("kind", "room"),
    [
        ("spread", 512),
        ("equal", 512),
        ("forbidden", 512),
        ("spread", 16),
        ("coarse", 16),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [("coarse", 512), ("equal", 16), ("forbidden", 16)]),
    ],
)
def test_the_last_token_that_a_truncation_keeps_can_be_drawn_and_the_next_cannot(kind, room, small, monkeypatch):
    """With 16 places the candidates do not fit, so that chunks draw or one program reads the whole row."""
    monkeypatch.setattr(draw_kernels, "_ROOM", room)
    settings = SETTINGS if room > 300 else SETTINGS[:7]
    logits = logits_of(kind, settings)
    top_k, top_p, min_p = (torch.tensor(column) for column in zip(*settings, strict=True))
    kept = truncated(logits, top_k, top_p, min_p)
    order = logits.argsort(dim=1, descending=True, stable=True)
    noise = gumbel_noise(SEEDS, torch.full_like(SEEDS, 9), 300)
    chosen = []  # the row, and a seed with which its choice depends on the last token kept
    for row in range(len(settings)):
        num_kept = int((kept[row] > -torch.inf).sum())
        for end in (num_kept, num_kept + 1):
            last = order[row, end - 1 : end]
            scores = torch.full((300,), -torch.inf).index_copy(0, order[row, :end], logits[row, order[row, :end]])
            decided = ((scores + noise).argmax(dim=1) == last).nonzero() if len(last) else last
            chosen += [(row, int(seed)) for seed in decided[:1]]
    assert len(chosen) > len(settings)
    rows, seeds = (torch.tensor(column) for column in zip(*chosen, strict=True))
    columns = (torch.full((len(rows),), 9), torch.ones(len(rows)), top_k[rows], top_p[rows], min_p[rows])
    depths = torch.zeros(len(rows), dtype=torch.int32)
    ours, expected = drawn(logits[rows], torch.arange(len(rows)), depths, seeds, *columns)
    assert torch.equal(ours, expected)


def forbid_reading_rows(monkeypatch, room, chunk):
    """No program may read a whole row. The sizes are such that no test with other functions has, since Triton would run
    kernels that it compiled with those."""
    monkeypatch.setattr(draw_kernels, "_ROOM", room)
    monkeypatch.setattr(draw_kernels, "_CHUNK", chunk)
    monkeypatch.setattr(draw_kernels, "_WIDE_CHUNK", chunk)
    monkeypatch.setattr(draw_kernels, "_draw_row", _must_not_run)


@triton.jit
def _must_not_run(inputs, key, top_k, top_p, min_p, out, HAS_BIAS, CHUNK):
    tl.store(out + inputs[3], -2)


@triton.jit
def _lowest_first(score, ids, key):
    return -score.to(tl.float64)


def check_lowest(logits, temperatures, top_k, top_p, min_p, monkeypatch):
    """Noise that prefers the least likely token shows where the kernels cut, however unlikely the last token is."""
    forbid_reading_rows(monkeypatch, room=128, chunk=64)
    monkeypatch.setattr(draw_kernels, "with_noise", _lowest_first)
    ones, rows = torch.ones(len(logits), dtype=torch.int64), torch.arange(len(logits))
    ours, _ = drawn(logits, rows, ones, ones, ones, temperatures, top_k, top_p, min_p)
    warm = logits / temperatures[:, None]
    can_be_drawn = truncated(warm, top_k, top_p, min_p) > -torch.inf
    is_truncated = ((top_k > 0) & (top_k < 300)) | (top_p < 1) | (min_p > 0)
    is_near = warm.amax(dim=1, keepdim=True) - warm < REACH
    can_be_drawn &= is_near | ~is_truncated[:, None]
    last = torch.where(can_be_drawn, warm, torch.inf).argmin(dim=1)
    assert torch.equal(ours, last)


FAR_SETTINGS = [
    (0, 1 - 1e-6, 0.0),
    (100, 1 - 1e-7, 1e-9),
    (100, 1.0, 1e-6),
    (90, 1.0, 1e-10),
    (110, 0.9, 1e-12),
    (299, 1.0, 1e-12),
    (0, 1.0, 1e-9),
    (0, 1.0, 1e-20),
]


# Between the first token and the others, which span 3 nats. Far tokens begin at 11.1 nats, weights are 0 from 27.8.
@pytest.mark.parametrize("gaps", [(8.2, 10.0, 11.0, 12.5, 19.0), (21.0, 26.5, 30.0), (41.5, 43.5, 60.0)])
def test_a_truncation_can_end_among_the_far_tokens(gaps, monkeypatch):
    torch.manual_seed(0)
    settings = [(gap, *each) for gap in gaps for each in SETTINGS + FAR_SETTINGS]
    if max(gaps) > REACH:  # more tokens than fit are near enough to be drawn, but the last one that top-k keeps is not
        settings += [(41.5, 270, 1.0, 0.0), (41.5, 270, 1.0, 1e-9)]
    settings += [(30.0, 100, 1.0, 1e-9)]  # top-k ends among more equal tokens than fit, but all of them fail min-p
    gap, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*settings, strict=True))
    logits = torch.rand(len(settings), 300) * 3
    logits[-1] = 0.0
    logits[:, 77] = 3.0 + gap
    check_lowest(logits, torch.ones(len(settings)), top_k, top_p, min_p, monkeypatch)


LOW_SETTINGS = [
    *((k, 1.0, 0.0) for k in (3, 10, 20, 40, 100, 299)),
    (40, 0.99, 0.0),
    (100, 0.9999, 0.0),
    (0, 0.9, 0.0),
    (50, 1.0, 1e-6),
    (50, 0.95, 1e-12),
]


@pytest.mark.parametrize("temperature", [0.1, 0.03])
def test_a_truncation_can_end_anywhere_at_a_low_temperature(temperature, monkeypatch):
    torch.manual_seed(4)
    settings = LOW_SETTINGS * 2
    logits, temperatures = torch.randn(len(settings), 300) * 2, torch.full((len(settings),), temperature)
    columns = (torch.tensor(column) for column in zip(*settings, strict=True))
    check_lowest(logits, temperatures, *columns, monkeypatch)


@pytest.mark.parametrize("kind", ["certain", "cold"])
def test_draws_of_rows_that_end_among_the_far_tokens_are_those_of_the_reference(kind, monkeypatch):
    forbid_reading_rows(monkeypatch, room=256, chunk=256)
    torch.manual_seed(5)
    settings = [*LOW_SETTINGS, *FAR_SETTINGS]
    count = len(settings)
    logits, temperatures = torch.randn(count, 300) * 2, torch.ones(count)
    if kind == "certain":
        logits[:, 5] += torch.linspace(10, 60, count)
    if kind == "cold":
        temperatures = torch.linspace(0.05, 0.3, count)
    columns = (torch.tensor(column) for column in zip(*settings, strict=True))
    zeros, rows = torch.zeros(count, dtype=torch.int64), torch.arange(count)
    ours, expected = drawn(logits, rows, zeros, rows + 50, zeros, temperatures, *columns)
    assert torch.equal(ours, expected)


def test_draws_are_those_of_the_keyed_noise_at_every_token():
    torch.manual_seed(0)
    logits = torch.randn(8, 1600)[:, :1500]  # of a wider product
    rows, depths = torch.tensor([0, 0, 0, 1, 2, 2, 3, -1]), torch.tensor([0, 1, 1, 0, 0, 5, 0, 0])
    seeds, positions = torch.tensor([7, -(2**61), 9, 7]), torch.tensor([5, 900, 6, 5])
    off = (torch.zeros(4, dtype=torch.int64), torch.ones(4), torch.zeros(4))
    for temperatures in ([1.0, 0.3, 0.0, 2.5], [0.0, 2.5, 1e-7, 0.0]):
        for truncates in (False, True):
            settings = (seeds, positions, torch.tensor(temperatures), *off)
            ours, expected = drawn(logits, rows.int(), depths.int(), *settings, truncates=truncates)
            assert torch.equal(ours, expected) and ours[-1] == -1, "padding is left alone"


def test_greedy_drawn_and_truncated_rows_share_a_step_and_each_has_its_bias(small):
    torch.manual_seed(3)
    num_rows, rows = 6, torch.arange(24) % 6
    logits, bias = torch.randn(24, 300), torch.randn(num_rows, 300) * 2
    bias[:, 40:60] = -torch.inf
    settings = (
        torch.arange(num_rows) + 100,
        torch.arange(num_rows) * 1000,
        torch.tensor([0.0, 1.0, 0.6, 1.7, 0.0, 1e-7]),
        torch.tensor([5, 0, 30, 0, 0, 3]),
        torch.tensor([0.5, 1.0, 0.9, 0.6, 1.0, 0.9]),
        torch.tensor([0.0, 0.0, 0.01, 0.0, 0.0, 0.0]),
    )
    ours, expected = drawn(logits, rows, torch.arange(24) // 6, *settings, bias=bias)
    assert torch.equal(ours, expected)
    unbiased, _ = drawn(logits, rows, torch.arange(24) // 6, *settings)
    assert not torch.equal(ours, unbiased)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nan_logits_still_give_a_token_of_the_vocabulary(small):
    logits = torch.randn(6, 300)
    logits[0] = torch.nan
    logits[1, 7] = torch.nan
    logits[2] = -torch.inf
    logits[3, 250] = torch.inf
    logits[4:] = logits[2:4]
    settings = (torch.ones(2), torch.tensor([0, 9]), torch.tensor([1.0, 0.7]), torch.tensor([0.0, 0.1]))
    rows, zeros = torch.tensor([1, 1, 1, 1, 0, 0]), torch.zeros(6, dtype=torch.int64)
    ours, expected = drawn(logits, rows, zeros, torch.tensor([1, 2]), torch.tensor([1, 2]), *settings)
    assert bool(((ours >= 0) & (ours < 300)).all())
    assert ours[2:].tolist() == expected[2:].tolist() == [0, 250, 0, 250]


@triton.jit
def _bins_and_weights(scores, bins, weight, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    halvings = scores_of.halvings_of(tl.load(scores + at), 0.0)
    tl.store(bins + at, scores_of.bins_of(halvings))
    tl.store(weight + at, scores_of.weights_of(halvings))


def test_kernels_weigh_every_score_as_the_sampler_does():
    """At all places where a bin or a weight changes, and at the floats next to them."""
    halving = torch.arange(64 * 16, dtype=torch.float64) / 16 * np.log(2)
    places = torch.cat([halving, torch.tensor([LOWEST, REACH])]).float()
    places = torch.cat([places, *(places.nextafter(torch.tensor(end)) for end in (0.0, 99.0))])
    below = torch.cat([places, torch.tensor([torch.inf]), torch.linspace(0, 70, 2**14 - 1 - len(places))]).sort()[0]
    bins = torch.empty(2**14, dtype=torch.int32, device=DEVICE)
    ours = torch.empty(2**14, dtype=torch.int64, device=DEVICE)
    _bins_and_weights[(16,)](-below.to(DEVICE), bins, ours, SIZE=1024)
    assert torch.equal(ours.cpu(), weights(-below[None])[0])
    bins = bins.cpu()
    assert bool((bins.diff() >= 0).all()), "bins are in the order of the scores"
    assert torch.equal(bins == 2047, below >= REACH)
    halvings = below[below < REACH].double() / np.log(2)
    expected = torch.where(halvings < 21, halvings * 64, 21 * 64 + (halvings - 21) * 16)
    assert bool(((bins[below < REACH] - expected + 0.5).abs() <= 0.5 + 1e-4).all())


@triton.jit
def _noise(keys, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    key = tl.load(keys + at).to(tl.uint64)
    tl.store(out + at, scores_of.with_noise(tl.zeros([SIZE], tl.float32), at * 0, key))


def unmixed(number):
    """The inverse of `hashing.mix64`, of a Python integer."""
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        whole = number
        for _ in range(64 // shift):
            whole = number ^ whole >> shift
        number = whole * pow(factor, -1, 2**64) % 2**64
    return (number - GOLDEN) % 2**64


def signed(numbers):
    return torch.tensor([number - (number >> 63 << 64) for number in numbers])


def test_no_noise_makes_a_token_out_of_reach_the_best():
    """The noise of the least and the greatest random numbers, but for the one that rounds to u = 1: see REACH."""
    bits = [0, 1, 2**51, 2**52, 2**53 - 5, 2**53 - 4, 2**53 - 3, 2**53 - 2]
    keys = [unmixed(number << 11) for number in bits]
    seeds = signed([unmixed(unmixed(key)) for key in keys])
    noise = gumbel_noise(seeds, torch.zeros_like(seeds), 1)[:, 0]
    assert noise[0] == noise.min() == pytest.approx(-np.log(54 * np.log(2)))
    assert noise[-1] == noise.max() == pytest.approx(52 * np.log(2))
    assert noise.max() - noise.min() < REACH - 4
    ours = torch.empty(len(keys), dtype=torch.float64, device=DEVICE)
    _noise[(1,)](signed(keys).to(DEVICE), ours, SIZE=len(keys))
    np.testing.assert_allclose(ours.cpu().numpy(), noise.numpy(), rtol=1e-13)


def test_weights_are_exponentials():
    scores = torch.cat([torch.linspace(-27, 0, 5000), torch.tensor([-40.0, -torch.inf])])[None]
    ours = weights(scores)[0].double() / 2**40
    np.testing.assert_allclose(ours.numpy(), np.exp(scores[0].double().numpy()), rtol=3e-7, atol=2.0**-39)
    assert weights(torch.tensor([[1.0, torch.inf, -torch.inf]])).tolist() == [[0, 2**40, 0]]
