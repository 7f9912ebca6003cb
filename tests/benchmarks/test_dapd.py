"""The DAPD studies run, and say what they should."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import dapd, dapd_overhead
from dlmkern import decoders as d


def test_studies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A pass a token and all at once, whose numbers are known."""
    pytest.importorskip("matplotlib")
    rules = {"one": lambda n: d.vanilla(n), "all": lambda n: d.threshold(0.0, n)}
    monkeypatch.setattr(
        dapd, "curve_candidates", lambda: [("curve", name, rules[name](None)) for name in rules]
    )
    monkeypatch.setattr(dapd, "BLOCK_LENGTHS", {"blocks, 4 chains": (20, 40), "blocks, 8 chains": (80,)})
    monkeypatch.setattr(dapd, "block_rules", lambda: rules)
    monkeypatch.setattr(
        dapd, "part_decoders", lambda: {"all": rules["all"], "one": lambda n: d.vanilla(None)}
    )
    monkeypatch.setattr(
        dapd, "run_parts", lambda prompts: [dapd.Row("parts", "all", k, 1, 0, 0) for k in (1, 2)]
    )
    assert dapd.main(["--prompts", "2", "--threads", "1", "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "dapd.json").read_text())
    assert [point["nfe"] for point in record["curve"]] == [40, 1]
    nfe = {(row["study"], row["decoder"], row["setting"]): row["nfe"] for row in record["rows"]}
    assert nfe["blocks, 4 chains", "one", 20] == nfe["blocks, 4 chains", "one", 40] == 40
    assert nfe["blocks, 4 chains", "all", 20] == 2
    assert nfe["blocks, 8 chains", "all", 80] == 1
    assert (tmp_path / "dapd.png").stat().st_size > 10_000
    assert "| one | 40.0, " in capsys.readouterr().out


def test_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dapd, "part_decoders", lambda: {"one": lambda n: d.vanilla(None)})
    rows = dapd.run_parts(1)
    assert [(row.setting, row.nfe) for row in rows] == [(count, 10.0 * count) for count in range(1, 9)]
    assert rows[0].chains == 1


def test_every_candidate_is_a_decoder() -> None:
    names = [
        (curve, setting)
        for curve, setting, decoder in dapd.curve_candidates()
        if isinstance(decoder, d.Decoder)
    ]
    assert len(set(names)) == len(list(dapd.curve_candidates()))
    for make in (*dapd.block_rules().values(), *dapd.part_decoders().values()):
        assert isinstance(make(40), d.Decoder)


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
