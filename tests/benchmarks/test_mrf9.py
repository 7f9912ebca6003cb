"""The study of attention and dependencies measures right, and the models shown there do what is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import mrf9
from dlmkern import models
from dlmkern.models import chains4


def graph(n: int, *pairs: tuple[int, int, float]) -> Tensor:
    """A symmetric matrix `[n, n]` from `(i, j, weight)`."""
    out = torch.zeros(n, n)
    for i, j, weight in pairs:
        out[i, j] = out[j, i] = weight
    return out


PATH = graph(3, (0, 1, 1.0), (1, 2, 1.0)) > 0
ALL = torch.ones(1, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ((0.4, 0.3, 0.1), mrf9.Agreement(auc=1.0, ratio=3.5, violations=0.0)),
        # Degrees .7, .6, .5, where the one in the middle should be the largest.
        ((0.4, 0.2, 0.3), mrf9.Agreement(auc=0.5, ratio=1.0, violations=0.5)),
        ((0.4, 0.2, 0.2), mrf9.Agreement(auc=0.75, ratio=1.5, violations=0.0)),
        ((0.1, 0.1, 0.8), mrf9.Agreement(auc=0.0, ratio=0.125, violations=1.0)),
    ],
)
def test_agreement(weights: tuple[float, float, float], expected: mrf9.Agreement) -> None:
    first, second, chord = weights
    scores = graph(3, (0, 1, first), (1, 2, second), (0, 2, chord))
    scores.fill_diagonal_(9.0)  # attention to oneself does not count
    found = mrf9.agreement(scores[None], PATH, ALL)
    assert found.auc == expected.auc
    assert found.ratio == pytest.approx(expected.ratio)
    assert found.violations == expected.violations


def test_agreement_is_among_the_nodes_that_count() -> None:
    edges = graph(5, (0, 1, 1.0), (1, 2, 1.0), (3, 4, 1.0)) > 0
    scores = graph(5, (0, 1, 0.4), (1, 2, 0.2), (0, 2, 0.3), (1, 3, 50.0), (2, 4, 50.0))
    inside = torch.tensor([[True, True, True, False, False]])
    expected = mrf9.agreement(scores[None, :3, :3], PATH, ALL)
    assert mrf9.agreement(scores[None], edges, inside) == expected
    # Two nodes have one pair, so there is nothing to compare.
    one_pair = torch.tensor([[True, True, False, False, False]])
    both = mrf9.agreement(scores.expand(2, 5, 5), edges, torch.cat((inside, one_pair)))
    assert both == expected
    with pytest.raises(ValueError, match="no graph has both"):
        mrf9.agreement(scores[None], edges, one_pair)


def test_agreement_weighs_graphs_alike_but_pairs_alike_in_the_ratio() -> None:
    good = graph(3, (0, 1, 0.4), (1, 2, 0.3), (0, 2, 0.1))
    bad = graph(3, (0, 1, 0.1), (1, 2, 0.1), (0, 2, 0.8))
    found = mrf9.agreement(torch.stack((good, bad)), PATH, ALL.expand(2, 3))
    assert (found.auc, found.violations) == (0.5, 0.5)
    assert found.ratio == pytest.approx((0.9 / 4) / (0.9 / 2))


def test_threshold_is_relative_to_the_row() -> None:
    """Row maxima .4, .4, .2: the last edge is half of one row's and all of the other's."""
    scores = graph(3, (0, 1, 0.4), (1, 2, 0.2), (0, 2, 0.1))[None]
    assert mrf9.above(scores, PATH, ALL, 0.3) == (1.0, 0.5)
    assert mrf9.above(scores, PATH, ALL, 0.2) == (1.0, 1.0)
    assert mrf9.above(scores, PATH, ALL, 0.6) == (0.75, 0.0)
    # Nodes that do not count set no maximum.
    wide = graph(4, (0, 1, 0.4), (1, 2, 0.2), (0, 2, 0.1), (0, 3, 9.0))[None]
    edges = graph(4, (0, 1, 1.0), (1, 2, 1.0)) > 0
    assert mrf9.above(wide, edges, torch.tensor([[True, True, True, False]]), 0.3) == (1.0, 0.5)


def test_edges_are_the_triangles_of_the_links() -> None:
    edges = mrf9.mrf9_edges()
    assert torch.equal(edges, edges.T)
    assert not edges.diagonal().any()
    assert edges.sum(0).tolist() == [2, 4, 4, 4, 2, 2, 2, 2, 2]
    index = {name: place for place, name in enumerate(mrf9.NAMES)}
    for i in range(1, 5):
        for a, b in ((f"X{i}", f"X{i + 1}"), (f"X{i}", f"Y{i}"), (f"Y{i}", f"X{i + 1}")):
            assert edges[index[a], index[b]]


def test_edges_of_the_chains_stay_inside_a_chain() -> None:
    edges = mrf9.chains4_edges()
    blocks = edges.view(4, 10, 4, 10)
    for i in range(4):
        for j in range(4):
            assert blocks[i, :, j].sum() == (24 if i == j else 0)
    order = [0, 2, 4, 6, 8, 1, 3, 5, 7]  # X1..X5, Y1..Y4
    assert torch.equal(blocks[2, :, 2][order][:, order], mrf9.mrf9_edges())


def test_problems() -> None:
    prompts, answers = mrf9.problems(300, torch.Generator().manual_seed(0))
    assert (prompts == chains4.BOS).all()
    x, y = answers[:, :5], answers[:, 5:]
    assert torch.equal((x[:, :-1] + x[:, 1:]) % 3, y)
    assert sorted(x.unique().tolist()) == [0, 1, 2]


def test_scores_are_the_mean_over_layers_and_both_ways() -> None:
    model = models.load_model(mrf9.CHECKPOINT, dtype="float64")
    prompts, answers = mrf9.problems(2, torch.Generator().manual_seed(1))
    masked = torch.ones_like(answers, dtype=torch.bool)
    masked[1, [0, 4]] = False
    layers = [mrf9.attention_scores(model, prompts, answers, masked, [layer]) for layer in range(4)]
    last = mrf9.attention_scores(model, prompts, answers, masked, mrf9.SHARE)
    torch.testing.assert_close(last, (layers[2] + layers[3]) / 2)
    assert torch.equal(last, last.mT)
    assert (last[0] > 0).all()
    assert torch.equal(last[1] > 0, masked[1][:, None] & masked[1])


def test_attention_shows_the_dependencies() -> None:
    generator = torch.Generator().manual_seed(0)
    tasks = (
        mrf9.mrf9_task(models.load_model(mrf9.CHECKPOINT), 20, generator),
        mrf9.chains4_task(20, generator),
    )
    for task in tasks:
        masked = torch.ones_like(task.answers, dtype=torch.bool)
        scores = mrf9.attention_scores(task.model, task.prompts, task.answers, masked, mrf9.SHARE)
        found = mrf9.agreement(scores, task.edges, task.variables)
        assert found.auc > 0.95
        assert found.ratio > 4
        assert found.violations < 0.15


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    threads = torch.get_num_threads()
    assert mrf9.main(["--samples", "3", "--threads", "1", "--out", str(tmp_path)]) == 0
    torch.set_num_threads(threads)
    results = json.loads((tmp_path / "mrf9.json").read_text())
    rows = results["rows"]
    assert len(rows) == 2 * 6 * len(mrf9.MASK_RATIOS)
    first = rows[0]
    assert (first["task"], first["layers"], first["mask_ratio"]) == ("mrf9", "last 30%", 1.0)
    assert [row["tau"] for row in results["thresholds"]] == 2 * list(mrf9.TAUS)
    out = capsys.readouterr().out
    assert f"| last 30% | {first['auc']:.3f}, {first['ratio']:.2f}, {first['violations']:.3f} |" in out
    assert "| paper | 0.928, 2.20, 0.040 |" in out
    assert (tmp_path / "mrf9.png").stat().st_size > 10_000


def test_command_checks_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        mrf9.main(["--samples", "0"])
    assert "argument --samples: expected at least 1, got 0" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError, match="no such model folder"):
        mrf9.main(["--model", "nowhere"])
