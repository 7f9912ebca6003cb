"""One commit step of DepCap's official code, recorded on small logits, against the ops that make it."""

import pytest
import torch

import dlmkern
from tests.ops.support import assert_close, assert_same, depcap_cases

OP = "cap_select"


def test_official_commits(backend: str, device: torch.device) -> None:
    removed = conflicting_high = forced = 0
    cases = depcap_cases(device)
    assert len(cases) == 25
    for case, data in cases:
        logits, mask = data["logits"], data["mask_index"].bool()
        thresholds = {name: case[name] for name in ("tau_low", "tau_high", "gamma")}
        result = dlmkern.cap_select(logits=logits, mask=mask, return_stats=True, **thresholds)
        assert_same(result.token[mask], data["x0"][mask])
        assert_close(result.confidence[mask], data["confidence"][mask].cpu().numpy(), 1e-6)
        assert_same(result.selected, data["transfer_index"].bool())

        chosen = data["cand_idx"]
        candidates = torch.zeros_like(mask)
        candidates[chosen] = True
        assert_same(mask & (result.confidence >= case["tau_low"]), candidates)
        high = result.confidence[chosen] >= case["tau_high"]
        assert_same(high, data["high"].bool())

        conflict = dlmkern.conflict_matrix(logits)[chosen][:, chosen]
        assert_close(conflict, data["D"].float().cpu().numpy(), 2e-5)
        off_diagonal = ~torch.eye(len(chosen), dtype=torch.bool, device=device)
        clash = (conflict > case["gamma"]) & off_diagonal
        assert_same(clash, data["conflict"].bool() & off_diagonal)
        greedy = dlmkern.independent_set(clash, result.confidence[chosen], preselected=high)
        assert_same(greedy, data["selected"].bool())

        assert len(chosen) == case["n_candidates"]
        assert int(result.selected.sum()) == case["n_selected"]
        removed += int((~greedy).sum())
        conflicting_high += int((clash & high[:, None] & high[None, :]).sum())
        forced += len(chosen) == 0
    print(f"{len(cases)} cases, {removed} candidates removed, {conflicting_high} conflicts in the high tier")
    assert removed == sum(case["n_removed"] for case, _ in cases) > 0
    assert conflicting_high == 2 * sum(case["high_high_conflicts"] for case, _ in cases) > 0
    assert forced > 0


def test_strict_commits_no_two_that_conflict(backend: str, device: torch.device) -> None:
    fewer = 0
    cases = depcap_cases(device, every=4 if backend == "triton" else 1)
    for case, data in cases:
        mask = data["mask_index"].bool()
        thresholds = {name: case[name] for name in ("tau_low", "tau_high", "gamma")}
        result = dlmkern.cap_select(
            logits=data["logits"], mask=mask, strict=True, return_stats=True, **thresholds
        )
        checked = result.selected & (result.confidence >= case["tau_low"])
        clash = dlmkern.conflict_matrix(data["logits"])[checked][:, checked] > case["gamma"]
        assert not clash.fill_diagonal_(False).any()
        fewer += case["n_selected"] > int(result.selected.sum())
    assert fewer == sum(case["high_high_conflicts"] > 0 for case, _ in cases) > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_commits_the_same(backend: str, device: torch.device, dtype: torch.dtype) -> None:
    """Rounding may move a confidence across a threshold: all must agree on the rounded logits."""
    for case, data in depcap_cases(device, every=4 if backend == "triton" else 1):
        rounded = data["logits"].to(dtype)
        mask = data["mask_index"].bool()
        thresholds = {name: case[name] for name in ("tau_low", "tau_high", "gamma")}
        selected = dlmkern.cap_select(logits=rounded, mask=mask, **thresholds)
        with dlmkern.use_backend("reference"):
            expected = dlmkern.cap_select(logits=rounded.double(), mask=mask, **thresholds)
        assert torch.equal(selected, expected)
