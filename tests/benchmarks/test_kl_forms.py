"""The comparison of the two forms of KL counts right."""

from __future__ import annotations

from benchmarks import kl_forms


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
