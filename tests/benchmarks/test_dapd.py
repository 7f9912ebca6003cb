"""The DAPD studies run, and say what they should."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import dapd, dapd_overhead, quality
from dlmkern import decoders as d


def test_studies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A pass a token and all at once, whose numbers are known."""
    pytest.importorskip("matplotlib")

    def rules(length: int | None) -> dict[str, d.Decoder]:
        return {"one": d.vanilla(length), "all": d.threshold(0.0, length)}

    monkeypatch.setattr(
        dapd, "curve_candidates", lambda: [("curve", name, rule) for name, rule in rules(None).items()]
    )
    monkeypatch.setattr(dapd, "BLOCK_LENGTHS", {"blocks, 4 chains": (20, 40), "blocks, 8 chains": (80,)})
    monkeypatch.setattr(dapd, "block_decoders", rules)
    monkeypatch.setattr(
        dapd, "run_parts", lambda prompts: [quality.Point("all", str(k), 1, 0, 0, 10) for k in (1, 2)]
    )
    assert dapd.main(["--prompts", "2", "--threads", "1", "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "dapd.json").read_text())
    assert [point["nfe"] for point in record["curve"]][:2] == [40, 1]
    # With the true graph: every hub of a chain, then what hangs on it, then what is sure.
    assert record["curve"][2]["curve"] == "DAPD staged, true graph"
    assert 2 <= record["curve"][2]["nfe"] <= 5
    assert [(point["curve"], point["setting"], point["nfe"]) for point in record["blocks, 4 chains"]] == [
        ("one", "20", 40), ("all", "20", 2), ("one", "40", 40), ("all", "40", 1),
    ]  # fmt: skip
    assert [point["nfe"] for point in record["blocks, 8 chains"]] == [80, 1]
    assert [point["setting"] for point in record["parts"]] == ["1", "2"]
    assert (tmp_path / "dapd.png").stat().st_size > 10_000
    out = capsys.readouterr().out
    assert "| decoder | 20 | 40 |" in out
    assert "| all | 2.0, " in out


def test_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dapd, "part_decoders", lambda length: {"one": d.vanilla(None)})
    points = dapd.run_parts(1)
    assert [(point.setting, point.nfe) for point in points] == [(str(n), 10.0 * n) for n in range(1, 9)]
    assert points[0].chains == 1


def test_every_candidate_is_a_decoder() -> None:
    names = [
        (curve, setting)
        for curve, setting, decoder in dapd.curve_candidates()
        if isinstance(decoder, d.Decoder)
    ]
    assert len(set(names)) == len(list(dapd.curve_candidates()))
    for decoder in (*dapd.block_decoders(40).values(), *dapd.part_decoders(40).values()):
        assert isinstance(decoder, d.Decoder)


def test_overhead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both decoders commit one token a pass, so that they can be compared pass by pass."""
    file = tmp_path / "overhead.json"
    assert dapd_overhead.main(["--quick", "--threads", "1", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(row["block_length"], row["masks"]) for row in rows[:5]] == [
        (32, "32 to 25"), (32, "24 to 17"), (32, "16 to 9"), (32, "8 to 1"), (32, "all"),
    ]  # fmt: skip
    assert all(row["threshold"] > 0 < row["dapd"] for row in rows)
    assert "| overhead |" in capsys.readouterr().out
