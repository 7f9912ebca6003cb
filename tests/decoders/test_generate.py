"""What holds for every decoder, prompt and setting."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import dlmkern
from dlmkern import decoders as d
from dlmkern import generation
from dlmkern.decoders import Reason
from tests.decoders.support import MASK, VOCAB, HashModel, block_lengths, constant_model, same

EOS = 3


@st.composite
def decoders(draw: st.DrawFn, gen_length: int) -> d.Decoder:
    l_min = draw(st.integers(1, 6))
    depga = d.DepGABlocks(
        lam=draw(st.sampled_from([0.0, 0.5, 1.2])),
        l_min=l_min,
        l_max=l_min + draw(st.integers(0, 8)),
        kl=draw(st.sampled_from(["exact", "topk"])),
        topk=draw(st.integers(1, 12)),
        padding=draw(st.sampled_from(["zero", "reflect"])),
    )
    fixed = d.FixedBlocks(draw(st.integers(1, 12)))
    blocks = draw(st.sampled_from([depga, fixed, d.WholeSequence()]))
    tau_low = draw(st.floats(0, 1))
    count = blocks.count(gen_length)
    steps = None if count is None else draw(st.none() | st.integers(count, gen_length))
    unmask = draw(
        st.sampled_from(
            [
                d.OnePerStep(steps, draw(st.sampled_from(["low_confidence", "random"]))),
                d.Threshold(draw(st.floats(0, 1))),
                d.CAP(tau_low, draw(st.floats(tau_low, 1.2)), draw(st.floats(-30, 0)), draw(st.booleans())),
            ]
        )
    )
    return d.Decoder(
        blocks,
        unmask,
        cfg_scale=draw(st.sampled_from([0.0, 0.0, 1.5])),
        compat=draw(st.sampled_from([None, "official"])),
    )


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    gen_length = draw(st.integers(1, 24))
    token = st.integers(0, VOCAB - 1).filter(lambda token: token != MASK)
    prompts = draw(st.lists(st.lists(token, max_size=5), min_size=1, max_size=4))
    return {
        "input_ids": prompts,
        "decoder": draw(decoders(gen_length)),
        "gen_length": gen_length,
        "temperature": draw(st.sampled_from([0.0, 0.7])),
        "seed": draw(st.lists(st.integers(-5, 5), min_size=len(prompts), max_size=len(prompts))),
        "stop_at_eos": draw(st.booleans()),
        "mask_token_id": MASK,
        "eos_token_id": EOS,
        "vocab_size": draw(st.sampled_from([None, VOCAB])),
    }


MODEL = HashModel(VOCAB + 3)


@settings(max_examples=60, deadline=None)
@given(requests())
def test_invariants(request: dict[str, Any]) -> None:
    stream = dlmkern.generate_stream(MODEL, **request)
    steps = list(stream)
    out = stream.result()
    gen_length, eos = request["gen_length"], request["stop_at_eos"]
    allowed = torch.arange(VOCAB if request["vocab_size"] else VOCAB + 3)
    assert torch.isin(out.tokens, allowed).all()
    assert (out.tokens != MASK).all()
    for row, prompt in enumerate(request["input_ids"]):
        tokens, reasons = out.tokens[row].tolist(), [Reason(r) for r in out.reason[row].tolist()]
        assert out.sequences[row].tolist() == prompt + tokens
        step_map, nfe = out.step_map[row].tolist(), int(out.nfe[row])
        lengths = out.block_lengths[row]
        after_eos = reasons.count(Reason.AFTER_EOS)
        if after_eos == 0:
            assert set(step_map) == set(range(nfe)), "every forward pass has fixed something"
        assert max(step_map) == nfe - 1
        assert sum(lengths) == gen_length or (eos and sum(lengths) < gen_length)
        expected = request["decoder"].blocks
        if isinstance(expected, d.FixedBlocks) and not after_eos:
            assert lengths == block_lengths(gen_length, expected.block_length)
        for tokenless, reason in zip(out.confidence[row].isnan().tolist(), reasons, strict=True):
            assert tokenless == (reason is Reason.AFTER_EOS)
        if after_eos:
            assert eos
            first = tokens.index(EOS)
            assert reasons[first + 1 :] == [Reason.AFTER_EOS] * (gen_length - first - 1)
            assert tokens[first:] == [EOS] * (gen_length - first)
            assert set(step_map[first + 1 :]) <= {nfe - 1}
        # The blocks follow one another, in space and in time.
        kept = [i for i, reason in enumerate(reasons) if reason is not Reason.AFTER_EOS]
        start, begun = 0, 0
        for length in lengths:
            inside = [step_map[i] for i in kept if start <= i < start + length]
            assert all(begun <= step for step in inside)
            begun = max(inside, default=begun) + 1
            start += length
        # The stream tells the same story.
        story = [(step.forward, r) for step in steps for r in step.rows if r.row == row]
        assert [forward for forward, _ in story] == list(range(nfe))
        told = dict.fromkeys(range(gen_length), (MASK, Reason.FORCED, -1))
        for forward, part in story:
            assert part.block_start + part.block_length <= gen_length
            for position, token, reason in zip(part.positions, part.tokens, part.reasons, strict=True):
                assert told[position][0] == MASK or reason is Reason.AFTER_EOS, "a committed token stays"
                inside_block = part.block_start <= position < part.block_start + part.block_length
                assert inside_block or reason is Reason.AFTER_EOS
                told[position] = (token, reason, forward)
        assert [told[i] for i in range(gen_length)] == list(zip(tokens, reasons, step_map, strict=True))


@settings(max_examples=40, deadline=None)
@given(requests())
def test_batched_and_alone(request: dict[str, Any]) -> None:
    """A row of a batch is decoded exactly as alone, whatever its neighbours are."""
    batch = dlmkern.generate(MODEL, **request)
    for row, (prompt, seed) in enumerate(zip(request["input_ids"], request["seed"], strict=True)):
        alone = dlmkern.generate(MODEL, **{**request, "input_ids": [prompt], "seed": seed})
        assert same(alone, batch, 0, row)
        assert torch.equal(alone.confidence[0].nan_to_num(-1), batch.confidence[row].nan_to_num(-1))


class Windowed(torch.nn.Module):
    """`HashModel` behind the interface of the models of this package."""

    def forward(
        self, input_ids: Tensor, *, lengths: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        assert positions is not None
        rows = []
        for row, ids in enumerate(input_ids):
            length = input_ids.shape[1] if lengths is None else int(lengths[row])
            rows.append(MODEL(ids[None, :length])[0, positions[row]])
        return torch.stack(rows)


@settings(max_examples=25, deadline=None)
@given(requests())
def test_models_that_compute_windows(request: dict[str, Any]) -> None:
    """Padding, `lengths` and `positions` give what groups of equal length and slices give."""
    a = dlmkern.generate(MODEL, **request)
    b = dlmkern.generate(Windowed(), **request)
    assert all(same(a, b, row, row) for row in range(len(request["input_ids"])))


def test_reasons() -> None:
    """Each token says which test it has passed."""
    logits = torch.full((1, 5, 8), -torch.inf)
    # Positions 1 and 2 predict the same token, so they conflict. The others share no token but 5 and 6.
    for position, (token, confidence) in enumerate([(0, 0.97), (1, 0.85), (1, 0.9), (3, 0.4), (4, 0.96)]):
        logits[0, position, token] = math.log(confidence)
        logits[0, position, 5:7] = math.log((1 - confidence) / 2)

    def reasons(decoder: d.Decoder) -> list[Reason]:
        out = dlmkern.generate(constant_model(logits), [[]], decoder, 5, mask_token_id=7, vocab_size=8)
        return [Reason(reason) for reason in out.reason[0].tolist()]

    scheduled, threshold, high, free, forced = list(Reason)[:5]
    assert reasons(d.vanilla(5)) == [scheduled] * 5
    assert reasons(d.threshold(0.9, 5)) == [threshold, forced, threshold, forced, threshold]
    assert reasons(d.depcap(l_min=5, l_max=5)) == [high, free, free, forced, high]
    out = dlmkern.generate(
        constant_model(logits), [[]], d.depcap(l_min=5, l_max=5), 5, mask_token_id=7, vocab_size=8
    )
    assert out.step_map[0].tolist() == [0, 1, 0, 2, 0]


def test_steps_are_split_evenly() -> None:
    """LLaDA's schedule: steps over blocks, masks over the steps of a block, what is left over first."""

    def commits(gen_length: int, block_length: int, steps: int) -> list[int]:
        out = dlmkern.generate(
            HashModel(),
            [[1]],
            d.vanilla(block_length, steps),
            gen_length,
            mask_token_id=MASK,
            vocab_size=VOCAB,
        )
        return torch.bincount(out.step_map[0]).tolist()

    assert commits(16, 8, 6) == [3, 3, 2, 3, 3, 2]
    assert commits(16, 8, 2) == [8, 8]
    assert commits(16, 8, 16) == [1] * 16
    assert commits(16, 8, 5) == [3, 3, 2, 4, 4]
    assert commits(20, 8, 18) == [2, 2, 1, 1, 1, 1] * 2 + [1] * 4
    assert commits(20, 8, 20) == [2] + [1] * 6 + [2] + [1] * 6 + [1] * 4


def test_random_remasking() -> None:
    """Its order is random, depends on the seed, and its tokens are the likeliest ones."""

    def orders(seeds: list[int]) -> Tensor:
        out = dlmkern.generate(
            constant_model((torch.eye(12) * 20).expand(len(seeds), 12, 12)),
            [[]] * len(seeds),
            d.vanilla(12, remasking="random"),
            12,
            seed=seeds,
            mask_token_id=MASK,
            vocab_size=12,
        )
        assert (out.tokens[:, :MASK] == torch.arange(MASK)).all()
        return out.step_map

    many = orders(list(range(200)))
    assert torch.equal(orders([7])[0], many[7])
    assert len(many.unique(dim=0)) == 200
    assert abs(many.double().mean(0) - 5.5).max() < 5 * (143 / 12 / 200) ** 0.5


def test_guidance() -> None:
    """The logits move away from those without the prompt; one forward pass of twice the rows."""
    calls: list[Tensor] = []

    def model(ids: Tensor) -> Tensor:
        calls.append(ids)
        return HashModel()(ids)

    scale = 1.5
    decoder = d.vanilla(4, cfg_scale=scale)
    out = dlmkern.generate(model, [[1, 2], [5, 6]], decoder, 4, mask_token_id=MASK, vocab_size=VOCAB)
    assert out.nfe.tolist() == [4, 4]
    assert [len(ids) for ids in calls] == [4] * 4
    assert calls[0][2:].eq(MASK).all()
    assert calls[1][2:, :2].eq(MASK).all()
    assert calls[1][2:, 2:].eq(calls[1][:2, 2:]).all()
    conditional, unconditional = HashModel()(calls[0])[:, 2:].chunk(2)
    logits = unconditional + (scale + 1) * (conditional - unconditional)
    logits[..., MASK] = -torch.inf
    best = logits.softmax(-1).amax(-1)
    first = out.step_map.argmin(-1)
    assert first.tolist() == best.argmax(-1).tolist()
    assert torch.allclose(out.confidence.gather(1, first[:, None])[:, 0], best.amax(-1))


def test_finished_rows_leave() -> None:
    """Forward passes get smaller as rows finish, and a row's count stops with it."""
    sizes = []

    def model(ids: Tensor) -> Tensor:
        sizes.append(len(ids))
        logits = torch.zeros(*ids.shape, VOCAB)
        logits[..., 0] = torch.where(ids[:, :1] == 1, 20.0, 1.0)
        return logits

    out = dlmkern.generate(model, [[1], [2]], d.threshold(0.9, 8), 16, mask_token_id=MASK, vocab_size=VOCAB)
    assert out.nfe.tolist() == [2, 16]
    assert sizes == [2] * 2 + [1] * 14


def test_stop_at_eos() -> None:
    """Nothing is decoded after the first end-of-sequence token with all before it committed."""
    logits = torch.zeros(1, 8, VOCAB)
    best = [0, 1, EOS, 2, 4, EOS, 5, 6]
    for position, token in enumerate(best):
        # Position 5, the later end, and position 3 are committed before the answer is complete up to position
        # 2.
        logits[0, position, token] = {5: 10.0, 3: 9.0}.get(position, 5.0 - 0.1 * position)
    out = dlmkern.generate(
        constant_model(logits),
        [[]],
        d.vanilla(None),
        8,
        stop_at_eos=True,
        mask_token_id=MASK,
        vocab_size=VOCAB,
        eos_token_id=EOS,
    )
    assert out.tokens[0].tolist() == [0, 1] + [EOS] * 6
    assert out.nfe.tolist() == [5]
    assert out.step_map[0].tolist() == [2, 3, 4] + [4] * 5
    assert out.reason[0].tolist() == [Reason.SCHEDULED] * 3 + [Reason.AFTER_EOS] * 5
    full = dlmkern.generate(
        constant_model(logits), [[]], d.vanilla(None), 8, mask_token_id=MASK, vocab_size=VOCAB
    )
    assert full.tokens[0].tolist() == best
    assert full.nfe.tolist() == [8]


def test_an_end_in_the_prompt_does_not_count() -> None:
    out = dlmkern.generate(
        constant_model(torch.eye(VOCAB)[[0, 0, 1, 2, 4, 5]].unsqueeze(0) * 9),
        [[EOS, 1]],
        d.vanilla(4),
        4,
        stop_at_eos=True,
        mask_token_id=MASK,
        vocab_size=VOCAB,
        eos_token_id=EOS,
    )
    assert out.tokens[0].tolist() == [1, 2, 4, 5]


def test_last_block_is_shorter() -> None:
    for decoder in (d.vanilla(8), d.threshold(0.9, 8), d.depcap(l_min=8, l_max=8)):
        out = dlmkern.generate(HashModel(), [[1]], decoder, 19, mask_token_id=MASK, vocab_size=VOCAB)
        assert out.block_lengths == [[8, 8, 3]]


def test_the_models_output_is_left_alone() -> None:
    """A callable may return the same buffer again, and may write into its input."""
    buffer = HashModel()(torch.ones(1, 17, dtype=torch.int64))
    kept = buffer.clone()

    def model(ids: Tensor) -> Tensor:
        ids.zero_()
        return buffer

    out = dlmkern.generate(
        model, [[1]], d.depcap(l_min=2, l_max=6), 16, mask_token_id=MASK, vocab_size=VOCAB - 1
    )
    assert torch.equal(buffer, kept)
    assert out.sequences[0][0] == 1


def test_the_loop_reads_the_device_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    for name in (
        "tolist",
        "item",
        "nonzero",
        "cpu",
        "numpy",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
    ):
        original = getattr(Tensor, name)

        def read(
            self: Tensor, *args: Any, _name: str = name, _original: Any = original, **kwargs: Any
        ) -> Any:
            reads.append(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(Tensor, name, read)
    # What the ops check of tensors on the CPU needs no reading of a device.
    monkeypatch.setattr("dlmkern.ops._check.host_values", lambda value, batch: [])
    stream = dlmkern.generate_stream(
        HashModel(), [[1], [2, 3]], d.depcap(l_min=2, l_max=6), 12, mask_token_id=MASK, vocab_size=VOCAB
    )
    loop = stream._loop
    while loop.rows:
        reads.clear()
        loop.advance()
        assert reads == ["tolist"]


def test_streams_can_be_left_early() -> None:
    stream = dlmkern.generate_stream(HashModel(), [[1]], "vanilla", 6, mask_token_id=MASK, vocab_size=VOCAB)
    first = next(stream)
    assert first.forward == 0
    assert len(first.rows[0].positions) == 1
    out = stream.result()
    assert list(stream) == []
    assert out.nfe.tolist() == [6]
    whole = dlmkern.generate(HashModel(), [[1]], "vanilla", 6, mask_token_id=MASK, vocab_size=VOCAB)
    assert same(out, whole, 0, 0)


def test_a_bare_callable_runs_where_its_prompts_are() -> None:
    elsewhere = torch.empty((1, 1), dtype=torch.int64, device="meta")
    assert generation._device(HashModel(), elsewhere).type == "meta"
    assert generation._device(HashModel(), [elsewhere[0], elsewhere[0]]).type == "meta"
    assert generation._device(HashModel(), [[1, 2]]).type == "cpu"
    assert generation._device(HashModel(), ["text"]).type == "cpu"
