"""Faults of the official code of LLaDA and DepCap, on the smallest inputs that show them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import dlmkern
from dlmkern import decoders as d
from dlmkern.decoders import Reason
from tests.decoders.support import DATA, MASK, VOCAB, HashModel, constant_model


def peaked(rows: list[list[int]], vocab: int, height: float) -> Tensor:
    """Logits `[B, 3, vocab]`: position `i` of row `b` has its peak at token `i` if `i` is in `rows[b]`."""
    logits = torch.zeros(len(rows), 3, vocab)
    for row, positions in enumerate(rows):
        for position in positions:
            logits[row, position, position] = height
    return logits


def test_rows_do_not_share_candidates() -> None:
    """Official: the first row also commits position 2, at confidence 1/8, as the second is sure of it."""
    out = dlmkern.generate(
        constant_model(peaked([[0], [0, 2]], 8, 9.0)),
        [[], []],
        d.depcap(l_min=3, l_max=3, gamma=10.0),
        3,
        mask_token_id=8,
        vocab_size=8,
    )
    assert out.step_map.tolist() == [[0, 1, 2], [0, 1, 0]]
    assert Reason(int(out.reason[0, 2])) is Reason.FORCED


def test_two_rows_of_two_end() -> None:
    """Official: the greedy selection can hang with two rows of two positions."""
    for gamma in (-30.0, -16.0, 0.0):
        out = dlmkern.generate(
            constant_model(peaked([[0, 1], [1]], 8, 3.0)[:, :2]),
            [[], []],
            d.depcap(l_min=2, l_max=2, tau_low=0.1, tau_high=0.9, gamma=gamma),
            2,
            mask_token_id=8,
            vocab_size=8,
        )
        assert (out.nfe <= 2).all()


def test_high_tier_can_be_checked() -> None:
    """Official and published: two sure positions with the same token are committed at once; strict: not."""
    logits = torch.zeros(1, 2, 32)
    logits[..., 5] = 12.0

    def nfe(strict: bool) -> list[int]:
        out = dlmkern.generate(
            constant_model(logits), [[]], d.depcap(strict=strict), 2, mask_token_id=32, vocab_size=32
        )
        counts: list[int] = out.nfe.tolist()
        return counts

    assert nfe(strict=False) == [1]
    assert nfe(strict=True) == [2]


def test_a_mask_in_the_prompt_is_refused() -> None:
    """Official: it is overwritten."""
    with pytest.raises(ValueError, match="row 0: the prompt holds the mask token 9 at position 1"):
        dlmkern.generate(HashModel(), [[1, MASK, 2]], "depcap", 4, mask_token_id=MASK, vocab_size=VOCAB)


def test_a_small_vocabulary() -> None:
    """Official: a vocabulary below 64 crashes. Here the sum over all tokens is the exact divergence."""
    model = HashModel()
    outs = [
        dlmkern.generate(
            model, [[1]], d.depcap(l_min=2, l_max=8, kl=kl), 24, mask_token_id=MASK, vocab_size=VOCAB
        )
        for kl in ("topk", "exact")
    ]
    assert outs[0].tokens.tolist() == outs[1].tokens.tolist()
    assert outs[0].block_lengths == outs[1].block_lengths


@pytest.mark.parametrize("decoder", ["vanilla", "threshold", "depcap"])
def test_the_mask_as_the_best_token(decoder: str) -> None:
    """Official: decoding never ends."""
    logits = torch.zeros(1, 4, 8)
    logits[..., 7] = 9.0
    out = dlmkern.generate(constant_model(logits), [[]], decoder, 4, mask_token_id=7, vocab_size=8)
    assert out.tokens.tolist() == [[0, 0, 0, 0]]
    assert out.nfe.tolist() == [4]


def test_the_divergence_is_not_negative() -> None:
    """Official: without a term for the tail it falls to -1e-3; the exact one, the default, does not."""
    generator = torch.Generator().manual_seed(0)
    current = torch.randn(200, 100, generator=generator)
    previous = current.clone()
    previous[:, 50:] += 0.1 * torch.randn(200, 50, generator=generator)
    truncated = dlmkern.topk_kl(dlmkern.topk_snapshot(current, 8), dlmkern.topk_snapshot(previous, 8))
    exact, _ = dlmkern.kl_entropy(current, previous, out_dtype=torch.float64)
    assert truncated.min() < 0
    assert exact.min() >= 0
    assert d.DepGABlocks().kl == "exact"


@pytest.mark.parametrize("kl", ["topk", "exact"])
def test_padded_vocabulary_rows_change_nothing(kl: str) -> None:
    """Official: they shift the floor of the truncated divergence and take a share of the probabilities."""

    class Padded(HashModel):
        def __call__(self, ids: Tensor) -> Tensor:
            logits = super().__call__(ids)
            return torch.cat((logits, logits[..., :3] + 4), -1)

    decoder = d.depcap(l_min=2, l_max=8, tau_low=0.3, tau_high=0.6, kl=kl, topk=4)
    plain, padded = (
        dlmkern.generate(model, [[1]], decoder, 40, mask_token_id=MASK, vocab_size=VOCAB)
        for model in (HashModel(), Padded())
    )
    assert plain.step_map.tolist() == padded.step_map.tolist()
    assert plain.block_lengths == padded.block_lengths
    assert torch.equal(plain.confidence, padded.confidence)


@pytest.mark.parametrize("l_max", [1, 2])
@pytest.mark.parametrize("lam", [0.0, 1.2])
def test_windows_of_one_and_two_positions(l_max: int, lam: float) -> None:
    """Official: a spread of zero is divided by. The lengths stay within their bounds."""
    decoder = d.depcap(lam=lam, l_min=1, l_max=l_max)
    out = dlmkern.generate(HashModel(), [[1], [2, 3]], decoder, 9, mask_token_id=MASK, vocab_size=VOCAB)
    assert all(1 <= length <= l_max for lengths in out.block_lengths for length in lengths)


def test_padding_is_not_seen() -> None:
    """Official (LLaDA): attention ignores the mask, so a batch changes how a shorter prompt is decoded."""
    model = dlmkern.load_model(DATA / "models" / "llada_seed0", dtype="float64")
    short, long = [17, 4], [5, 6, 7, 8, 9, 10, 11, 12]
    alone = dlmkern.generate(model, [short], d.threshold(0.6, 8), 16)
    batch = dlmkern.generate(model, [short, long], d.threshold(0.6, 8), 16)
    assert alone.sequences[0].tolist() == batch.sequences[0].tolist()
    assert alone.step_map[0].tolist() == batch.step_map[0].tolist()


def test_steps_that_do_not_divide_leave_no_mask() -> None:
    """Official: an assertion fails unless blocks divide the answer and steps divide over the blocks."""
    for steps in range(4, 15):
        out = dlmkern.generate(
            HashModel(), [[1]], d.vanilla(4, steps), 14, mask_token_id=MASK, vocab_size=VOCAB
        )
        assert (out.tokens != MASK).all()
        assert out.nfe <= steps
