"""Counter-based noise and sampling."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dlmkern import generate
from dlmkern.decoders import Reason, sampling, vanilla
from tests.decoders.support import MASK, VOCAB, HashModel, constant_model


def seeds(n: int) -> Tensor:
    return torch.arange(n).unsqueeze(1)


def test_mix_is_splitmix64() -> None:
    """The generator's first outputs from seed 0, as published with it."""
    state = torch.tensor([sampling._GOLDEN]) * torch.arange(1, 4)
    assert [x % 2**64 for x in sampling._mix(state).tolist()] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


@pytest.mark.parametrize("varies", ["seed", "position", "step", "stream"])
def test_uniform(varies: str) -> None:
    """Uniform, and neighbours are independent, whichever argument counts up."""
    n = 40_000
    count = torch.arange(n)
    zero = torch.zeros_like(count)
    arguments = {name: count if name == varies else zero for name in ("seed", "position", "step")}
    if varies == "stream":
        u = torch.cat([sampling.uniform(zero[:1], zero[:1], zero[:1], stream) for stream in range(2000)])
    else:
        u = sampling.uniform(*arguments.values(), 0)
    assert u.dtype == torch.float64
    assert u.min() >= 0
    assert u.max() < 1
    bound = 5 / len(u) ** 0.5
    assert abs(u.mean() - 0.5) < bound * 0.2887
    assert abs(torch.corrcoef(torch.stack((u[1:], u[:-1])))[0, 1]) < bound
    counts = torch.histc(u, 20, 0, 1)
    chi2 = ((counts - len(u) / 20) ** 2 / (len(u) / 20)).sum()
    assert chi2 < 51  # 19 degrees of freedom: p = 1e-4


def test_uniform_depends_on_every_argument() -> None:
    a = torch.tensor([3])
    base = sampling.uniform(a, a, a, 0)
    for other in ((a + 1, a, a, 0), (a, a + 1, a, 0), (a, a, a + 1, 0), (a, a, a, 1)):
        assert sampling.uniform(*other) != base


@pytest.mark.parametrize("chunk", [4096, 3, 1])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_sample_has_the_softmax_distribution(
    monkeypatch: pytest.MonkeyPatch, chunk: int, temperature: float
) -> None:
    monkeypatch.setattr(sampling, "_CHUNK", chunk)
    n = 20_000
    row = torch.tensor([1.0, -torch.inf, 2.0, 0.5, 3.0, 1.5, -1.0])
    banned = 4
    allowed = row.clone()
    allowed[banned] = -torch.inf
    logits = row.expand(n, 1, -1)
    noise = sampling.uniform(seeds(n), torch.zeros(1, 1).long(), torch.zeros(1, 1).long(), 0)
    token = sampling.sample(logits, torch.full((n, 1), 2), banned, temperature, noise)
    expected = (allowed.double() / temperature).softmax(-1)
    counts = torch.bincount(token.flatten(), minlength=7).double()
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    chi2 = ((counts - n * expected) ** 2 / (n * expected))[possible].sum()
    assert chi2 < 23.5  # 4 degrees of freedom: p = 1e-4


def test_sample_inverts_the_distribution_function() -> None:
    """Noise between two values of the distribution function gives the token between them."""
    logits = torch.tensor([0.25, 0.5, 0.25]).log().view(1, 1, 3)
    for noise, token in ((0.0, 0), (0.2499, 0), (0.2501, 1), (0.7499, 1), (0.7501, 2), (1 - 2.0**-53, 2)):
        drawn = sampling.sample(logits, torch.ones(1, 1).long(), None, 1.0, torch.tensor([[noise]]).double())
        assert drawn.item() == token


def test_sample_of_a_row_without_distribution() -> None:
    logits = torch.full((1, 1, 3), torch.nan)
    assert sampling.sample(logits, torch.tensor([[-1]]), None, 1.0, torch.zeros(1, 1).double()).item() == -1


def test_confidence_keeps_its_meaning() -> None:
    """It is the probability at temperature 1 of the token that was drawn."""
    row = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0])
    model = constant_model(row.expand(64, 8, 5))
    out = generate(
        model, [[]] * 64, vanilla(), 8, temperature=3.0, seed=list(range(64)), mask_token_id=4, vocab_size=5
    )
    assert out.tokens.unique().tolist() == [0, 1, 2, 3]
    expected = row[:4].double().softmax(-1)[out.tokens]
    assert torch.allclose(out.confidence, expected, rtol=1e-12)


def test_low_temperature_is_the_best_token() -> None:
    model = HashModel()
    greedy = generate(model, [[1, 2]], vanilla(8), 16, mask_token_id=MASK, vocab_size=VOCAB)
    cold = generate(
        model, [[1, 2]], vanilla(8), 16, temperature=1e-4, seed=5, mask_token_id=MASK, vocab_size=VOCAB
    )
    assert greedy.tokens.tolist() == cold.tokens.tolist()


def test_seeds() -> None:
    def tokens(prompts: list[list[int]], seed: int | list[int] | None) -> list[list[int]]:
        out = generate(HashModel(), prompts, "threshold", 24, 1.5, seed, mask_token_id=MASK, vocab_size=VOCAB)
        answer: list[list[int]] = out.tokens.tolist()
        return answer

    assert tokens([[1], [1]], [3, 4]) == [tokens([[1]], 3)[0], tokens([[1]], 4)[0]]
    assert tokens([[1], [1]], 3)[0] == tokens([[1], [1]], 3)[1]
    assert tokens([[1]], 3) != tokens([[1]], 4)
    torch.manual_seed(0)
    first = tokens([[1], [1]], None)
    assert first[0] != first[1]
    assert first != tokens([[1], [1]], None)
    torch.manual_seed(0)
    assert first == tokens([[1], [1]], None)


def test_thresholds_at_high_temperature() -> None:
    """An unlikely token that was drawn does not pass for a sure one."""
    row = torch.tensor([9.0, 0.0, 0.0, 0.0, 0.0])
    model = constant_model(row.expand(32, 8, 5))
    out = generate(
        model,
        [[]] * 32,
        "threshold",
        8,
        temperature=20.0,
        seed=list(range(32)),
        mask_token_id=4,
        vocab_size=5,
    )
    sure = out.reason == Reason.THRESHOLD
    assert (out.tokens[sure] == 0).all()
    assert (out.tokens != 0).any()
