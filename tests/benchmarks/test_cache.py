"""The benchmark of the caches counts right, and its parts add up."""

import json
import time
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import dlmkern
from benchmarks import cache, cache_quality
from benchmarks.cache import PARTS, QUICK, Stopwatch
from dlmkern import decoders, models
from dlmkern.models import chains4


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_operations_are_those_of_the_model() -> None:
    model = cache.make_model(QUICK)
    kept = model.new_cache(1, QUICK.length)
    whole = torch.zeros((1, QUICK.length), dtype=torch.int64)
    block = torch.arange(QUICK.prompt, QUICK.prompt + cache.BLOCK_LENGTH).unsqueeze(0)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        with counter:
            model(whole, positions=block, cache=kept)
        assert counter.get_total_flops() == cache.operations(QUICK, QUICK.length)
        with counter:
            model(block, cache=kept, position_ids=block)
        assert counter.get_total_flops() == cache.operations(QUICK, cache.BLOCK_LENGTH)


def test_what_each_cache_computes() -> None:
    passes = cache.decode(cache.make_model(QUICK), QUICK)
    computed = {name: [one.computed for one in some] for name, some in passes.items()}
    assert computed == {
        "none": [128] * 8,
        "prefix": [128, 64, 64, 64, 128, 32, 32, 32],
        "dual": [128, 32, 32, 32] * 2,
    }
    for name, some in passes.items():
        for one in some:
            assert one.seconds["model"] > 0
            assert one.seconds["selection"] > 0
            assert (one.seconds["cache write"] > 0) == (name != "none")


def test_time_counts_once() -> None:
    watch = Stopwatch()
    inner = watch.timed("cache write", lambda: time.sleep(0.02))

    def both() -> None:
        time.sleep(0.01)
        inner()

    began = time.perf_counter()
    one = watch.time(watch.timed("rest", both))
    assert one.total <= time.perf_counter() - began
    assert one.seconds["rest"] >= 0.01
    assert one.seconds["cache write"] >= 0.02
    assert one.seconds["selection"] == 0


def test_rows_go_to_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    assert cache.main(["--quick", "--threads", "1", "--json", str(file)]) == 0
    document = json.loads(file.read_text())
    assert [(row["cache"], row["whole_passes"], row["other_passes"]) for row in document["speed"]] == [
        ("none", 8, 0),
        ("prefix", 2, 6),
        ("dual", 2, 6),
    ]
    assert document["speed"][0]["speedup"] == 1
    for row in document["shares"]:
        assert set(row["shares"]) == set(PARTS)
        assert all(0 <= share < 1 for share in row["shares"].values())
    assert len(document["cost"]) == 3 * len(cache.QUICK_LENGTHS)
    out = capsys.readouterr().out
    assert out.count("\n| ---") == 3
    assert "goal: 3%" in out


def test_positions_of_the_quality_tables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a cache each pass computes all; rows out of phase or of different widths change no count."""
    monkeypatch.setattr(cache_quality, "BLOCK_LENGTHS", (10,))
    rows = cache_quality.run(prompts=3)
    length = chains4.PROMPT_LENGTH + chains4.ANSWER_LENGTH
    whole = [row for row in rows if row.variant in ("none", "paper", "official", "refresh=1")]
    assert len(whole) == 6 + 4 + 2
    for row in whole:
        assert row.positions == pytest.approx(length * row.nfe)
    model = models.tiny()
    solo = cache_quality.Positions(model)
    for prompt in chains4.prompts(3, seed=0):
        dlmkern.generate(model, prompt[None], decoders.depcap(l_min=10, cache="prefix"), 40)
    (row,) = (row for row in rows if (row.rule, row.variant) == ("DepCap", "prefix"))
    assert row.positions == pytest.approx(solo.count / 3)
    assert capsys.readouterr().out.count("\n| ---") == 3
