"""The two studies of decoders run, and count right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import kl_forms, quality
from dlmkern import decoders as d


def test_quality(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    two = [("one", "a", d.vanilla(None)), ("all", "b", d.vanilla(None, 1))]
    monkeypatch.setattr(quality, "candidates", lambda: two)
    assert quality.main(["--prompts", "2", "--threads", "1", "--device", "cpu", "--out", str(tmp_path)]) == 0
    points = json.loads((tmp_path / "quality.json").read_text())["points"]
    assert [point["nfe"] for point in points] == [40, 1]
    assert points[0]["valid"] > points[1]["valid"]
    assert (tmp_path / "quality.png").stat().st_size > 10_000
    assert "40.0" in capsys.readouterr().out


def test_every_candidate_is_valid() -> None:
    candidates = list(quality.candidates())
    assert len({(curve, setting) for curve, setting, _ in candidates}) == len(candidates)
    assert all(isinstance(decoder, d.Decoder) for _, _, decoder in candidates)


def test_front() -> None:
    def point(nfe: float, valid: float) -> quality.Point:
        return quality.Point("", "", nfe, valid, 0.0, 0.0)

    points = [point(3, 0.5), point(1, 0.2), point(2, 0.1), point(3, 0.6), point(4, 0.6)]
    assert quality.front(points) == [points[1], points[3]]


def test_kl_forms() -> None:
    """A sum over all tokens differs nowhere; one over the best token does."""
    cases = [case for case in kl_forms.tiny_cases(2) if case.settings == {"lam": 0.3, "l_min": 2}]
    assert [case.topk for case in cases] == [64, 4, 2]
    crude = kl_forms.Case("crude", cases[0].model, cases[0].prompts, 40, {"lam": 0.3, "l_min": 2}, 1)
    counts = kl_forms.compare([cases[0], crude])
    for compat in ("official", None):
        same = counts[cases[0].group, compat]
        assert (same.answers, same.blocks, same.tokens) == (2, 0, 0)
        assert same.nfe_exact == same.nfe_topk > 0
        assert counts["crude", compat].blocks > 0
    group = next(kl_forms.random_model_cases(3))
    assert len(group.prompts) == 3
