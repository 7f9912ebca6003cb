"""The study of valid answers runs, and counts right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import quality
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
