"""The studies of revocable decoding run, and count right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import cover, cover_checks
from dlmkern import decoders as d
from dlmkern import models
from dlmkern.decoders.state import State
from dlmkern.decoders.unmask import Candidates, Selection
from dlmkern.models import chains4
from dlmkern.models.chains4 import MASK, PROMPT_LENGTH


def test_studies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Eight tokens a pass: errors enough for verification to have something to do."""
    pytest.importorskip("matplotlib")
    whole, draft = d.WholeSequence(), d.Threshold(0.0, most=8)
    two = [
        ("none", "a", d.Decoder(whole, draft)),
        ("COVER", "2 a pass", d.Decoder(whole, draft, d.COVER(max_remasks=2))),
    ]
    for name in ("curve_candidates", "ablation_candidates", "draft_candidates"):
        monkeypatch.setattr(cover, name, lambda: two)
    monkeypatch.setattr(cover, "choice_candidates", lambda: [(curve, "a", rule) for curve, _, rule in two])
    monkeypatch.setattr(cover_checks, "SHARES", (1.0,))
    monkeypatch.setattr(cover_checks, "SEEDS", (2,))
    monkeypatch.setattr(cover_checks, "DRAFTS", {"eight": d.Decoder(whole, draft)})
    assert cover.main(["--prompts", "2", "--threads", "1", "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "cover.json").read_text())
    none, covered = record["curve"]
    assert none["nfe"] == 5
    assert none["revisions"] == 0
    assert none["effective"] is None
    assert covered["revisions"] >= covered["replaced"] + covered["flip_flops"]
    assert record["ablations"] == record["curve"]
    assert [row["curve"] for row in record["choices"]] == ["none", "COVER"]
    assert [(row["view"], row["stale"]) for row in record["leak"]] == [
        (view, stale)
        for stale in (False, True)
        for view in ("leave-one-out", "masked", "override, 100% of the layers")
    ]
    assert {row["layers"] for row in record["drift"]} == set(cover_checks.LAYERS)
    assert (tmp_path / "cover.png").stat().st_size > 10_000
    out = capsys.readouterr().out
    assert "| none | a | 5.0 |" in out
    assert "flip-flops" in out


class Scripted(d.RevisionRule):
    """Takes the first two positions back once each; the second then gets another token."""

    def revise(
        self, candidates: Candidates, selection: Selection, verification: d.Verification, state: State
    ) -> d.Revision:
        place = torch.arange(candidates.masked.shape[1])
        nothing = torch.zeros_like(candidates.masked)
        remask = candidates.committed & (place < 2) & (state.nfe == 1).unsqueeze(1)
        replace = candidates.committed & (place == 2) & (state.nfe == 1).unsqueeze(1)
        return d.Revision(remask, replace, nothing, nothing, ())


class Counting:
    """Predicts the number of the pass at the answer's second and third position, and 0 elsewhere."""

    def __init__(self) -> None:
        self.config = models.tiny().config
        self.passes = 0

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(*ids.shape, chains4.VOCAB_SIZE)
        token = torch.zeros_like(ids)
        token[:, PROMPT_LENGTH + 1 : PROMPT_LENGTH + 3] = self.passes
        self.passes += 1
        return logits.scatter(2, token.unsqueeze(-1), 9.0)


def test_counts() -> None:
    """A flip-flop, a remask with effect and a replacement."""
    decoder = d.Decoder(d.WholeSequence(), d.Threshold(0.0, most=20), Scripted())
    point = cover.measure("", "", decoder, Counting(), chains4.prompts(1, seed=0))
    assert (point.revisions, point.replaced, point.flip_flops) == (3, 1, 1)
    assert point.effective == pytest.approx(2 / 3)
    assert point.nfe == 3


def test_every_candidate_is_a_decoder() -> None:
    for several in (cover.curve_candidates, cover.ablation_candidates, cover.choice_candidates):
        candidates = list(several())
        assert all(isinstance(decoder, d.Decoder) for _, _, decoder in candidates)
        assert len({(curve, setting) for curve, setting, _ in candidates}) == len(candidates)


def test_every_choice_of_the_method_is_swept() -> None:
    """Whatever argument COVER has is varied, away from its default."""
    default = d.COVER()
    of_its_own = {"seeds_by", "verify"}  # the ablations
    names = set(default.__dataclass_fields__) - of_its_own
    assert names | {"block_length"} == set(cover.CHOICES)
    for name in names:
        assert getattr(default, name) not in cover.CHOICES[name]


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("wrong", [False, True])
def test_scene(stale: bool, wrong: bool) -> None:
    prompts, answers = chains4.problems(30, torch.Generator().manual_seed(3))
    full = torch.cat((prompts, answers), dim=1)
    x = cover_checks.scene(full, 4, stale, wrong, torch.Generator().manual_seed(1))
    assert (x.seeds.sum(1) == 4).all()
    assert (full[x.seeds] < 3).all()
    assert (x.now[x.seeds] < 3).all()
    assert torch.equal(x.now[x.seeds], x.before[x.seeds])  # the pass before has shown what is verified
    errors = (x.now != full) & (x.now != MASK)
    assert (errors.sum(1) == int(wrong)).all()
    assert not (errors & ~x.seeds).any()
    assert ((x.before != x.now).any() and (x.before[x.before != x.now] == MASK).all()) if stale else True
    assert stale or torch.equal(x.before, x.now)


def test_one_seed_in_the_last_layer_is_leave_one_out() -> None:
    """What is not overridden before the last layer cannot leak; what is in all layers does."""
    model = models.tiny()
    prompts, answers = chains4.problems(6, torch.Generator().manual_seed(5))
    full = torch.cat((prompts, answers), dim=1)
    x = cover_checks.scene(full, 1, False, False, torch.Generator().manual_seed(2))
    with torch.no_grad():
        truth = cover_checks.leave_one_out(model, x)
        last, every = (cover_checks.cheap(model, x, share) for share in (0.25, 1.0))
    torch.testing.assert_close(last, truth, atol=1e-5, rtol=0)
    assert (every - truth).abs().max() > 1e-3


def test_spearman() -> None:
    x = torch.tensor([1.0, 2.0, 2.0, 5.0])
    assert cover_checks.spearman(x, x.exp()) == pytest.approx(1)
    assert cover_checks.spearman(x, -x) == pytest.approx(-1)
    # Ranks 1, 2.5, 2.5, 4 against 2, 1, 3, 4.
    y = torch.tensor([0.2, 0.1, 0.3, 0.4])
    assert cover_checks.spearman(x, y) == pytest.approx(0.6324555)


def test_drift_of_a_pass() -> None:
    """Nothing moves where nothing changes; what changes is expected and moves."""
    model, prompts = models.tiny(), chains4.prompts(2, seed=0)
    shown = cover_checks.passes(model, prompts, d.threshold(0.7, None))
    assert (shown[-1] != MASK).all()
    assert ((shown[0] == MASK).sum(1) == 40).all()
    with torch.no_grad():
        expected, moved = cover_checks.step_drift(model, shown[3], shown[3], 1.0)
        assert not expected.any()
        assert not moved.any()
        expected, moved = cover_checks.step_drift(model, shown[3], shown[4], 1.0)
    assert (expected > 0).all()
    assert (moved > 0).all()
