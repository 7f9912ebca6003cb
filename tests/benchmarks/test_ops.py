"""The benchmarks time the same computation on both sides, and give no ratio where results differ."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dlmkern
from benchmarks import __main__ as bench
from benchmarks import cases
from dlmkern.backends.registry import OPS

CPU = torch.device("cpu")
QUICK = ("--quick", "--device", "cpu", "--threads", "1")


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "VOCABULARY", 512)
    monkeypatch.setattr(cases, "GRAPHS", ((64, torch.float32), (64, torch.bfloat16)))
    monkeypatch.setattr(cases, "COVERED", ((64, 8, torch.float32), (64, 32, torch.bfloat16)))


@pytest.fixture(autouse=True)
def no_emulator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As other tests of this process may have left it: the rows count the backends that there are."""
    monkeypatch.delenv("DLMKERN_EMULATED_MODULE", raising=False)
    bench.registry._resolve.cache_clear()
    yield
    bench.registry._resolve.cache_clear()


def test_every_op_has_a_case() -> None:
    assert {op for case in cases.cases(CPU, True, []) for op in case.op.split(" + ")} == set(OPS)


def test_cases_can_be_chosen() -> None:
    chosen = [case.op for case in cases.cases(CPU, True, ["independent_set", "topk_kl"])]
    assert chosen == ["conflict_matrix + independent_set", "topk_kl"]


def as_eager_returns_it(op: str, result: Any) -> Any:
    """What the eager form returns, from what the op returns."""
    if op in ("block_attention", "cover_attention"):
        return (result.out,)
    if op == "token_stats":
        with_kl = (result.token, result.confidence, result.entropy, result.kl)
        return with_kl[:2] if result.kl is None else with_kl
    return result.item() if op == "depga_block" else result


def test_both_sides_compute_the_same() -> None:
    for case in cases.cases(CPU, False, []):
        with dlmkern.use_backend("reference"):
            result = as_eager_returns_it(case.op, case.result())
        inputs = case.inputs
        if case.op == "attention_graph":  # torch rounds scores to the dtype of the inputs, the op does not
            inputs = tuple(x.float() if x.is_floating_point() else x for x in inputs)
        other = case.eager(*inputs)
        same = result == other if isinstance(other, int) else bench.agree(tuple(result), tuple(other))
        assert same, f"{case.op}, {case.detail}"


def test_a_case_is_not_trivial() -> None:
    for case in cases.cases(CPU, False, ["independent_set", "cap_select"]):
        selected = case.run()
        assert 1 < selected.sum() < selected.numel(), f"{case.op}, {case.detail}"


def test_rows_go_to_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    assert (
        bench.main(["--quick", "--device", "cpu", "--threads", "1", "--json", str(file), "token_stats"]) == 0
    )
    document = json.loads(file.read_text())
    assert document["environment"]["torch"] == torch.__version__
    assert len(document["rows"]) == 8
    for row in document["rows"]:
        assert row["match"]
        assert row["ms"] > 0
        assert row["eager_ratio"] == pytest.approx(row["eager_ms"] / row["ms"])
        assert row["gb_per_s"] > 0
        assert row["read_share"] > 0
        assert row["compile_ratio"] is None
    assert capsys.readouterr().out.count("token_stats") == 8


def test_no_ratio_for_a_wrong_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = dlmkern.depga_block

    def wrong_outside_the_reference(*arguments: Any) -> torch.Tensor:
        on_reference = bench.registry.resolve("depga_block", CPU, torch.float32).__module__.startswith(
            "dlmkern.reference"
        )
        return right(*arguments) + (0 if on_reference else 1)

    monkeypatch.setattr(dlmkern, "depga_block", wrong_outside_the_reference)
    file = tmp_path / "rows.json"
    assert bench.main([*QUICK, "--json", str(file), "depga_block"]) == 1
    (row,) = json.loads(file.read_text())["rows"]
    assert not row["match"]
    assert row["eager_ratio"] is None
    assert "NO" in capsys.readouterr().out
