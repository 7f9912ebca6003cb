"""Dream's rule: what it draws from, what it ranks by, and how many positions a step commits."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import dlmkern
from dlmkern import decoders as d
from dlmkern import ops
from dlmkern.decoders.sampling import Draw, draw, score_of
from tests.decoders.support import MASK, VOCAB, HashModel, constant_model


def direct(x: Tensor, temperature: float, top_p: float | None, top_k: int | None) -> Tensor:
    """The probabilities `[V]` that a row of logits becomes, written as the definition."""
    p = (x.double() / (temperature or 1.0)).softmax(-1)
    order = p.argsort(descending=True, stable=True)
    if top_p is not None:
        kept, total = [], 0.0
        for token in order.tolist():
            if total > top_p:
                break
            kept.append(token)
            total += float(p[token])
        p = torch.zeros_like(p).scatter(0, torch.tensor(kept), p[kept])
    if top_k is not None:
        p = p * (p >= p.sort(descending=True).values[min(top_k, len(p)) - 1])
    return p / p.sum()


@pytest.mark.parametrize("top_k", [None, 1, 3, 100])
@pytest.mark.parametrize("top_p", [None, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("temperature", [0.0, 0.4, 1.5])
def test_draw_against_the_definition(temperature: float, top_p: float | None, top_k: int | None) -> None:
    """Noise on a fine grid gives every token its probability; all statistics are those of the definition."""
    torch.manual_seed(0)
    logits = 2 * torch.randn(2, 9, 7)
    best = logits.argmax(-1)
    how = Draw(temperature, top_p, top_k, 7, None)
    grid = 200
    counts = torch.zeros(2, 9, 7)
    for step in range(grid):
        noise = torch.full((2, 9), (step + 0.5) / grid, dtype=torch.float64)
        token, confidence = draw(logits, best, None, how, noise, "confidence")
        counts.scatter_add_(-1, token.unsqueeze(-1), torch.ones(2, 9, 1))
    margin = draw(logits, best, None, how, noise, "margin")[1]
    neg_entropy = draw(logits, best, None, how, noise, "negative entropy")[1]
    for row in range(2):
        for i in range(9):
            p = direct(logits[row, i], temperature, top_p, top_k)
            if temperature == 0:
                assert counts[row, i, best[row, i]] == grid
            else:
                assert (counts[row, i] / grid - p).abs().max() < 2.1 / grid
            torch.testing.assert_close(confidence[row, i], p[token[row, i]])
            falling = p.sort(descending=True).values
            torch.testing.assert_close(margin[row, i], falling[0] - falling[1])
            torch.testing.assert_close(neg_entropy[row, i], torch.special.xlogy(p, p).sum())


def test_margin_of_one_token() -> None:
    """Nothing is second: the margin is the probability itself."""
    stats = ops.token_stats(torch.zeros(1, 2, 1), out_dtype=torch.float64)
    margin = score_of("margin", stats.token, torch.zeros(1, 2, 1), stats, None)
    assert margin.tolist() == [[1.0, 1.0]]


def test_draw_leaves_the_banned_and_the_padded_out() -> None:
    """The mask has no part in the distribution; ids from `allowed` on do, but are not drawn."""
    logits = torch.tensor([[[5.0, 1.0, 1.0, 9.0]]])
    best, how = torch.tensor([[1]]), Draw(1.0, None, None, 3, 0)
    for u in (0.0, 0.3, 0.7, 1 - 2.0**-53):
        noise = torch.full((1, 1), u, dtype=torch.float64)
        token, confidence = draw(logits, best, 0, how, noise, "confidence")
        assert token.tolist() == [[1 if u < 0.5 else 2]]
        p = torch.tensor([1.0, 1.0, 9.0], dtype=torch.float64).softmax(-1)
        torch.testing.assert_close(confidence[0, 0], p[0])


@pytest.mark.parametrize("height", [1.0, 3e38])
@pytest.mark.parametrize("temperature", [5e-324, 1e-39, 0.7, 1e39, 1.7e308])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("decoder", ["dream", "threshold"])
def test_extreme_temperatures(decoder: str, dtype: torch.dtype, temperature: float, height: float) -> None:
    """Neither the division by the temperature nor the logits themselves overflow."""
    logits = height * torch.tensor([[[0.5, 1.0, -torch.inf, -1.0]] * 3], dtype=dtype)
    for mask, best in ((0, 1), (1, 0), (3, 1)):
        for compat in (None, "official"):
            chosen = d.PRESETS[decoder](compat=compat)
            out = dlmkern.generate(
                constant_model(logits), [[]], chosen, 3, temperature, seed=1, mask_token_id=mask, top_p=0.999
            )
            assert (out.tokens != mask).all()
            assert (out.tokens != 2).all()
            if temperature < 0.5:
                assert (out.tokens == best).all()


def test_a_score_of_nan_is_reported() -> None:
    """Rather than waited for: a rule that ranks by it would never commit the position."""

    class NoScore(HashModel):
        def __call__(self, ids: Tensor) -> Tensor:
            return super().__call__(ids).index_fill(1, torch.tensor([2]), torch.nan)

    with pytest.raises(FloatingPointError, match="row 0: the logits of position 2 hold no distribution"):
        dlmkern.generate(NoScore(), [[1]], "dream", 4, mask_token_id=MASK, vocab_size=VOCAB)


def commits(out: Any) -> list[int]:
    """Tokens that each forward pass of the first row committed."""
    count = Counter(out.step_map[0].tolist())
    return [count[i] for i in range(int(out.nfe[0]))]


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 7, 12, 24, 30])
@pytest.mark.parametrize("alg", ["entropy", "maskgit_plus", "topk_margin"])
def test_schedule(alg: str, steps: int) -> None:
    """Step `i` of `S` commits `m (1 - t_{i+1} / t_i)` of `m` masks, rounded down; the last one all."""
    out = dlmkern.generate(HashModel(), [[1]], d.dream(alg, steps), 24, mask_token_id=MASK, vocab_size=VOCAB)
    times = torch.linspace(1, 1e-3, steps + 1)
    masks, expected = 24, []
    for i in range(steps):
        last = i == steps - 1
        expected.append(masks if last else int(torch.tensor(masks) * (1 - times[i + 1] / times[i])))
        masks -= expected[-1]
        if masks == 0:
            break
    assert commits(out) == expected


@pytest.mark.parametrize("block_length", [None, 5, 8])
def test_schedule_without_steps(block_length: int | None) -> None:
    """As many steps as the block has positions, which is what `steps` says where the blocks are equal."""
    arguments = {"mask_token_id": MASK, "vocab_size": VOCAB}
    out = dlmkern.generate(HashModel(), [[1]], d.dream(block_length=block_length), 24, **arguments)
    if block_length != 5:
        same = dlmkern.generate(
            HashModel(), [[1]], d.dream(steps=24, block_length=block_length), 24, **arguments
        )
        assert torch.equal(out.step_map, same.step_map)
    assert out.nfe.tolist() == [24]


def test_origin_commits_a_share_at_random() -> None:
    """Each position with the same probability, whatever its confidence; the last step all that is left."""
    out = dlmkern.generate(
        HashModel(),
        [[1]] * 200,
        d.dream("origin", 4),
        24,
        seed=range(200),
        mask_token_id=MASK,
        vocab_size=VOCAB,
    )
    share = torch.stack([(out.step_map == i).double().mean(0) for i in range(4)])
    assert (share.mean(1) - 0.25).abs().max() < 0.03  # 4800 positions
    assert (share - 0.25).abs().max() < 5 * (0.25 * 0.75 / 200) ** 0.5


def test_alg_temp_draws_in_proportion() -> None:
    """The first position that is committed is drawn from softmax(score / alg_temp)."""
    logits = torch.tensor([[0.0, 1.0], [0.0, 2.0], [0.0, 0.5], [0.0, 3.0]]).unsqueeze(0)
    temperature = 0.2
    confidence = logits[0].double().softmax(-1)[:, 1]
    expected = (confidence / temperature).softmax(-1)
    rows = 1000
    out = dlmkern.generate(
        constant_model(logits.expand(rows, -1, -1)),
        [[]] * rows,
        d.dream("maskgit_plus", 3, alg_temp=temperature),
        4,
        seed=range(rows),
        mask_token_id=5,
    )
    first = (out.step_map == 0).double()
    assert (first.sum(1) == 1).all()
    assert (first.mean(0) - expected).abs().max() < 4 * 0.5 / rows**0.5


def test_alg_temp_zero_takes_the_best() -> None:
    arguments = {"mask_token_id": MASK, "vocab_size": VOCAB}
    for alg in ("maskgit_plus", "topk_margin", "entropy"):
        plain, zero, tiny = (
            dlmkern.generate(HashModel(), [[3]], d.dream(alg, 6, alg_temp=t), 24, seed=1, **arguments)
            for t in (None, 0, 1e-12)
        )
        assert torch.equal(plain.step_map, zero.step_map)
        assert torch.equal(plain.step_map, tiny.step_map)


def test_official_cap() -> None:
    """Until step `i` at most `(i + 1) gen_length / steps` tokens, however sure; outside blocks only."""
    sure = torch.zeros(1, 12, 4)
    sure[..., 1] = 50.0
    for steps, expected in ((12, [1] * 12), (4, [3] * 4), (1, [12])):
        decoder = d.dream("confidence_threshold", steps, compat="official")
        out = dlmkern.generate(constant_model(sure), [[]], decoder, 12, mask_token_id=3)
        assert commits(out) == expected
    out = dlmkern.generate(
        constant_model(sure), [[]], d.dream("confidence_threshold", 12), 12, mask_token_id=3
    )
    assert commits(out) == [12]
