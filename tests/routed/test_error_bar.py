"""How far a sampled result may be off: the bar of known terms, and of real draws."""

import math

import pytest
import torch

from prescore import exact_attention, prescored_attention
from prescore.config import Routed
from prescore.routed import error_bound as within
from prescore.routed.error_bound import attend_within, error_limit, estimated_error, longest_error, of_single_query
from prescore.routed.sources import Estimate

CONFIG = Routed(min_weight=1 / 64, cluster_size=32, chunk_size=64, sinks=4, exact_until=256, tolerance=0.1)
LENGTH = 900


def clustered(seed, dim=32):
    """Keys around a few centres, queries that look for some of them."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(12, dim, generator=generator)
    label, wanted = (torch.randint(12, (1, heads, LENGTH), generator=generator) for heads in (2, 4))
    key = centres[label] + 0.5 * torch.randn(1, 2, LENGTH, dim, generator=generator)
    query = 2 * (centres[wanted] + torch.randn(1, 4, LENGTH, dim, generator=generator))
    return query, key, torch.randn(1, 2, LENGTH, dim, generator=generator)


def bars_of(qkv, seed, backend):
    """True errors, estimated errors and limits of queries after one look, none of which reads everything."""
    found = []

    def one_look(*given):
        found.append(attend_within(*given))
        return found[0]._replace(limit=torch.zeros_like(found[0].limit))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(within, "attend_within", one_look)
        patch.setattr(within, "LOOKS", 1)
        output = prescored_attention(*qkv, CONFIG, is_causal=True, generator=seed, backend=backend)
    # compiled code takes the queries along that read everything
    routed = slice(CONFIG.exact_until - LENGTH, None)
    error, limit = (t.flatten(0, 1)[:, routed] for t in (found[0].error, found[0].limit))
    exact = exact_attention(*qkv, is_causal=True).output
    true = ((output - exact).norm(dim=-1) / exact.norm(dim=-1))[0, :, CONFIG.exact_until :]
    some = torch.isfinite(limit) & (limit > 0)
    return true[some], error[some], limit[some]


@pytest.mark.parametrize("backend", ["auto", "plain"])
@pytest.mark.parametrize("sharpness", [0.5, 1.0, 2.0])
def test_an_error_bar_is_neither_too_small_nor_useless(sharpness, backend):
    """Whatever the tolerance makes of them: single bars hold as often as they say, and are not much too wide."""
    query, key, value = clustered(seed=9)
    found = [bars_of((sharpness * query, key, value), seed, backend) for seed in range(4)]
    true, error, limit = (torch.cat(parts) for parts in zip(*found, strict=True))
    assert len(true) > 1000
    assert (true > limit).double().mean() <= 1 - of_single_query(0.95)
    rms = (true.square().mean() / error.square().mean()).sqrt()
    assert 0.5 < rms < 1.05


def test_what_is_not_read_is_estimated_without_a_bias():
    """Errors of many draws cancel, where values follow the keys and a mean would be off for all of them."""
    query, key, _ = clustered(seed=10)
    value = key @ torch.randn(32, 32, generator=torch.Generator().manual_seed(0)) + 1
    config = CONFIG.replace(rows=4, tolerance=2.0)
    exact = exact_attention(query, key, value, is_causal=True).output[:, :, 256:]
    off = torch.zeros_like(exact)
    single, n_draws = 0.0, 64
    for seed in range(n_draws):
        output = prescored_attention(query, key, value, config, is_causal=True, generator=seed)[:, :, 256:]
        off += (output - exact) / n_draws
        single += float((output - exact).square().sum()) / n_draws
    assert float(off.square().sum()) < 2.5 * single / n_draws


@pytest.mark.parametrize(
    ("directions", "freedom", "confidence", "wanted"),
    [
        *((1, 5, 0.95, 2.571), (1, 10, 0.95, 2.228), (1, 300, 0.95, 1.968), (1, 30, 0.99, 2.750)),  # Student's
        *((4, 300, 0.95, 1.550), (8, 30, 0.95, 1.505), (30, 300, 0.95, 1.220), (8, 10, 0.5, 0.991)),
    ],
)
def test_longest_is_the_root_of_an_f_quantile(directions, freedom, confidence, wanted):
    given = (torch.tensor(float(number), dtype=torch.float64) for number in (directions, freedom))
    assert float(longest_error(*given, confidence)) == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize(("share", "single"), [(0.5, 0.5), (0.7, 0.7), (0.9, 0.75), (0.95, 0.8), (0.99, 0.96)])
def test_single_bars_hold_less_often_than_all_together(share, single):
    assert of_single_query(share) == pytest.approx(single)


def test_few_terms_and_few_directions_make_wide_bars():
    several = torch.tensor([1.0, 1.5, 2.0, 3.0, 5.0, 30.0], dtype=torch.float64)
    by_terms = longest_error(torch.full_like(several, 8.0), several, 0.95)
    assert (by_terms[:-1] > by_terms[1:]).all()
    assert 15 < by_terms[0] < 16  # the truth is 15.5
    by_directions = longest_error(several, torch.full_like(several, 100.0), 0.95)
    assert (by_directions[:-1] > by_directions[1:]).all()
    assert 636 < float(longest_error(torch.ones(1), torch.ones(1), 0.999)) < 800  # the truth is 636.6


def spread_of(terms, output):
    """The moments of known terms `[n, Dv]`."""
    squares = terms.square().sum(1)
    overlap = (terms @ terms.t()).square().sum()
    unused = torch.zeros(1)
    moments = (squares.sum()[None], squares.square().sum()[None], overlap[None])
    return Estimate(output, unused, *moments, unused, unused.bool())


def test_error_limit_of_known_terms():
    output = torch.tensor([[3.0, 4.0]])
    along_one = torch.tensor([[0.1, 0.0]]).expand(50, 2)
    spread = spread_of(along_one, output)
    assert float(estimated_error(spread)) == pytest.approx(math.sqrt(0.5) / 5)
    # Student's with 100 degrees of freedom: squares of equal terms vary less than those of normal ones
    assert float(error_limit(spread, 0.95)) == pytest.approx(1.984 * math.sqrt(0.5) / 5, rel=0.02)
    along_two = torch.cat((along_one[:25], along_one[:25].flip(1)))
    assert float(error_limit(spread_of(along_two, output), 0.95)) < 0.9 * float(error_limit(spread, 0.95))
    nothing = spread_of(torch.zeros(1, 2), output)
    assert float(error_limit(nothing, 0.95)) == float(estimated_error(nothing)) == 0
    unknown = spread._replace(variance=torch.tensor([torch.inf]), fourth=torch.tensor([torch.inf]))
    assert float(error_limit(unknown, 0.95)) == torch.inf
