"""Random tokens that do not depend on batching: counter-based noise and inverse-CDF sampling."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dlmkern import ops

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number: 2^64 over the golden ratio
_MIX1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX2 = -7723592293110705685  # 0x94D049BB133111EB

TOKEN_STREAM = 0
REMASKING_STREAM = 1
SEED_STREAM = 2

_CHUNK = 16384
_POSITIONS = 8


def uniform(seed: Tensor, position: Tensor, step: Tensor, stream: int) -> Tensor:
    """Uniform random numbers in `[0, 1)`, a function of the arguments alone.

    SplitMix64's finalizer (Steele, Lea and Flood, 2014) is applied to the seed and mixed with one argument
    after the other.

    Args:
        seed, position, step: int64, broadcast together.
        stream: tells apart numbers of the same seed, position and step that serve different ends.

    Returns:
        float64 of the broadcast shape, multiples of 2^-53.
    """
    key = _mix(seed + _GOLDEN)
    key = _mix(key + position * _GOLDEN)
    key = _mix(key + step * _GOLDEN + stream)
    return _shift(key, 11).to(torch.float64) * 2.0**-53


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 30)) * _MIX1
    z = (z ^ _shift(z, 27)) * _MIX2
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros; torch's own shift copies the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def sample(
    logits: Tensor, best: Tensor, banned_token: int | None, temperature: float, noise: Tensor
) -> Tensor:
    """Draw each position's token from `softmax(logits / temperature)` by inverting its distribution function.

    That is the distribution of LLaDA's Gumbel-argmax, with one random number a position in place of `V`. The
    vocabulary is walked in chunks of 16384 tokens, so that nothing of the size of the logits is allocated.

    Args:
        logits: `[B, n, V]`.
        best: int64 `[B, n]`: the token with the largest allowed logit; -1 where there is no distribution.
        banned_token: a token that is never drawn, or None.
        temperature: above 0.
        noise: float64 `[B, n]` in `[0, 1)`.

    Returns:
        int64 `[B, n]`; -1 where `best` is.
    """
    vocabulary = logits.shape[-1]
    top = logits.gather(-1, best.clamp(min=0).unsqueeze(-1)).to(torch.float64)

    def weights(x: Tensor, token: Tensor) -> Tensor:
        w = ((x.to(torch.float64) - top) / temperature).exp()
        allowed = token < vocabulary
        return w * (allowed if banned_token is None else allowed & (token != banned_token))

    tokens = torch.arange(vocabulary, device=logits.device)
    chunks = torch.stack(
        [
            weights(logits[..., start : start + _CHUNK], tokens[start : start + _CHUNK]).sum(-1)
            for start in range(0, vocabulary, _CHUNK)
        ],
        dim=-1,
    )
    chunk, rest = _invert(chunks, noise * chunks.sum(-1))
    token = chunk.unsqueeze(-1) * _CHUNK + tokens[:_CHUNK]
    inside, _ = _invert(weights(logits.gather(-1, token.clamp(max=vocabulary - 1)), token), rest)
    # At a low temperature it may have no weight beside a token that is not drawn, and then none has.
    return torch.where((best < 0) | (top.squeeze(-1) == -torch.inf), best, chunk * _CHUNK + inside)


def probability_of(token: Tensor, logits: Tensor, stats: ops.TokenStats) -> Tensor:
    """`p(token)`, float64 `[B, n]`, from the logits `[B, n, V]` and their float64 statistics."""
    if token is stats.token:
        return stats.confidence
    x = logits.gather(-1, token.clamp(min=0).unsqueeze(-1)).squeeze(-1).to(torch.float64)
    # The best token's own number resolves probabilities near one better.
    return torch.where(token == stats.token, stats.confidence, (x - stats.logsumexp).exp())


def score_of(
    statistic: str, token: Tensor, logits: Tensor, stats: ops.TokenStats, banned_token: int | None
) -> Tensor:
    """A `Score` of the logits' distribution, float64 `[B, n]`; `token` is the one to commit."""
    if statistic == "confidence":
        return probability_of(token, logits, stats)
    if statistic == "negative entropy":
        return -stats.entropy
    allowed = logits.shape[-1] - (banned_token is not None)
    best = ops.topk_snapshot(logits, min(2, allowed), banned_token=banned_token).logp.exp()
    return best[..., 0] - best[..., 1:].sum(-1)


class Draw(NamedTuple):
    """How tokens are drawn."""

    temperature: float
    """0: the likeliest token is taken."""
    top_p: float | None
    top_k: int | None
    allowed: int
    """Tokens from this id on are never drawn."""
    banned_token: int | None
    """A token that is never drawn."""


def draw(
    logits: Tensor, best: Tensor, banned_token: int | None, how: Draw, noise: Tensor, statistic: str
) -> tuple[Tensor, Tensor]:
    """Draw tokens from a distribution that is transformed as in Dream: temperature, then top-p, then top-k.

    Top-p keeps the likeliest tokens up to the one with which their probability exceeds `top_p`, top-k the
    `top_k` likeliest and all that tie with the last. A few positions are treated at a time, so that nothing
    of the size of the logits is allocated.

    Args:
        logits: `[B, n, V]`.
        best: int64 `[B, n]`: the token with the largest logit among those that may be drawn, which top-p and
            top-k never remove; -1 where there is no distribution.
        banned_token: a token left out of the distribution, or None.
        how: see `Draw`.
        noise: float64 `[B, n]` in `[0, 1)`.
        statistic: see `score_of`.

    Returns:
        The tokens, int64 `[B, n]`, -1 where `best` is; and that score of the transformed distribution,
        float64 `[B, n]`.
    """
    tokens, scores = torch.empty_like(best), torch.empty_like(noise)
    for row in range(best.shape[0]):
        for start in range(0, best.shape[1], _POSITIONS):
            part = row, slice(start, start + _POSITIONS)
            x = _transform(logits[part], best[part], banned_token, how)
            stats = ops.token_stats(x, out_dtype=torch.float64)
            token = best[part]
            if how.temperature > 0:
                token = sample(x[..., : how.allowed], token, how.banned_token, 1.0, noise[part])
            tokens[part], scores[part] = token, score_of(statistic, token, x, stats, None)
    return tokens, scores


def _transform(logits: Tensor, best: Tensor, banned_token: int | None, how: Draw) -> Tensor:
    """Logits `[n, V]` of the distribution that is drawn from, float64, the largest of them 0."""
    x = logits.to(torch.float64)
    if banned_token is not None:
        x = x.index_fill(-1, torch.full_like(best[:1], banned_token), -torch.inf)
    # Before the division, which may overflow.
    x = x - x.amax(-1, keepdim=True)
    if how.temperature > 0:
        x = x / how.temperature
    kept = best.clamp(min=0).unsqueeze(-1)
    top = x.gather(-1, kept)
    if how.top_p is not None:
        falling, order = x.sort(dim=-1, descending=True, stable=True)
        p = falling.softmax(-1)
        removed = torch.zeros_like(x, dtype=torch.bool).scatter(-1, order, p.cumsum(-1) - p > how.top_p)
        x = x.masked_fill(removed, -torch.inf)
    if how.top_k is not None:
        least = x.topk(min(how.top_k, x.shape[-1])).values[..., -1:]
        x = x.masked_fill(x < least, -torch.inf)
    return x.scatter(-1, kept, top)


def _invert(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """First index at which the running sum of `weights [..., m]` exceeds `target`, and how far into it."""
    total = weights.cumsum(-1)
    # Rounding may put the target at or past the end; the last index of positive weight is meant then.
    target = torch.minimum(target, total[..., -1] * (1 - 2.0**-52))
    index = (total <= target.unsqueeze(-1)).sum(-1, keepdim=True)
    index = index.clamp(max=weights.shape[-1] - 1)
    before = total.gather(-1, index) - weights.gather(-1, index)
    # Rounding may also put it before the start.
    return index.squeeze(-1), (target.unsqueeze(-1) - before).clamp(min=0).squeeze(-1)
