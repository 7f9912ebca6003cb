"""Random tokens that do not depend on batching: counter-based noise and inverse-CDF sampling."""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number: 2^64 over the golden ratio
_MIX1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX2 = -7723592293110705685  # 0x94D049BB133111EB

TOKEN_STREAM = 0
REMASKING_STREAM = 1

_CHUNK = 16384


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
    vocabulary is walked in chunks, so that nothing of the size of the logits is allocated.

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
    return torch.where(best < 0, best, chunk * _CHUNK + inside)


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
