"""Block lengths of DepCap's official code, recorded on small logits, against the ops that make them."""

import torch

import dlmkern
from dlmkern.reference.depga_block import normalise, smooth
from tests.ops.support import assert_close, depcap_cases

OP = "topk_snapshot"


def test_official_influence_and_entropy(backend: str, device: torch.device) -> None:
    for case, data in depcap_cases(device):
        k = min(case["K"], case["V"])
        prev, curr = (dlmkern.topk_snapshot(data[name], k) for name in ("prev_logits", "curr_logits"))
        # the official floor is log(1 - (1 - 1e-12)) where nothing is left, 2.2e-5 off log(1e-12)
        assert_close(prev.floor, data["prev_logp_floor"].cpu().numpy(), 3e-5)
        assert_close(dlmkern.topk_kl(curr, prev), data["I"].cpu().numpy(), 2e-6)
        entropy = dlmkern.token_stats(data["curr_logits"], out_dtype=torch.float64).entropy
        assert_close(entropy, data["H"].cpu().numpy(), 2e-6)


def test_official_block_lengths(backend: str, device: torch.device) -> None:
    """From the logits on; where S is exactly 0, float noise decides its sign and only limits are certain."""
    undecided = 0
    ends = set()
    for case, data in depcap_cases(device):
        k = min(case["K"], case["V"])
        prev, curr = (dlmkern.topk_snapshot(data[name], k) for name in ("prev_logits", "curr_logits"))
        kl = dlmkern.topk_kl(curr, prev)
        entropy = dlmkern.token_stats(data["curr_logits"], out_dtype=torch.float64).entropy
        limits = {"lam": case["lambda_u"], "l_min": case["L_min"], "l_max": case["L_max"]}
        length = dlmkern.depga_block(kl, entropy, case["remaining"], **limits).item()
        if case["min_abs_S_upto_boundary"] == 0:
            undecided += 1
            least = min(case["L_min"], case["remaining"])
            assert least <= length <= min(case["L_max"], case["remaining"])
            continue
        assert length == case["L"], case
        raw = dlmkern.depga_block(kl, entropy, case["remaining"], case["lambda_u"], 1, case["L_max"]).item()
        assert raw == max(1, case["raw_boundary"]), case
        ends.add(case["kind"])
    print(f"{25 - undecided} block lengths exact, {undecided} left to float noise")
    assert undecided == 4
    assert ends == {"S", "clip_low"}


def test_recorded_signals_give_the_recorded_lengths(backend: str, device: torch.device) -> None:
    """From the recorded influence and entropy nothing is left to noise: all 25 are exact."""
    for case, data in depcap_cases(device):
        limits = {"lam": case["lambda_u"], "l_min": case["L_min"], "l_max": case["L_max"]}
        length = dlmkern.depga_block(data["I"], data["H"], case["remaining"], **limits).item()
        assert length == case["L"], case


def test_reference_intermediates(device: torch.device) -> None:
    for case, data in depcap_cases(device):
        width = torch.tensor([[case["W"]]], device=device)
        inside = torch.ones((1, case["W"]), dtype=torch.bool, device=device)
        normal = {}
        for name in ("I", "H"):
            smoothed = smooth(data[name][None], inside, reflect=False)
            assert_close(smoothed[0], data[f"{name}_smooth"].cpu().numpy(), 1e-15)
            normal[name] = normalise(data[f"{name}_smooth"][None], width)[0]
            assert_close(normal[name], data[f"{name}_norm"].cpu().numpy(), 1e-12, relative=1e-12)
        score = normal["I"] - case["lambda_u"] * normal["H"]
        assert_close(score, data["S"].cpu().numpy(), 1e-12, relative=1e-12)
