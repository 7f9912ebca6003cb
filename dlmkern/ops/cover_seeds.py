"""cover_seeds: the committed tokens that COVER verifies next."""

from typing import NamedTuple

import torch
from torch import Tensor

from dlmkern.ops import _arrays, _check
from dlmkern.ops._library import define

COMBINATIONS = ("product", "sum")
SUSPECTS = ("mean", "above_mean")


class CoverSeeds(NamedTuple):
    """The choice, and what it was made by."""

    seeds: Tensor  # bool [B, n]
    score: Tensor  # [B, n] float64, 0 where the position is not eligible


def _fake(
    uncertainty: Tensor,
    influence: Tensor | None,
    drift: Tensor | None,
    eligible: Tensor | None,
    most: Tensor,
    additive: bool,
    above_mean: bool,
) -> tuple[Tensor, Tensor]:
    shape = uncertainty.shape
    return uncertainty.new_empty(shape, dtype=torch.bool), uncertainty.new_empty(shape, dtype=torch.float64)


_op = define(
    "cover_seeds(Tensor uncertainty, Tensor? influence, Tensor? drift, Tensor? eligible, Tensor most,"
    " bool additive, bool above_mean) -> (Tensor seeds, Tensor score)",
    _fake,
)


def cover_seeds(
    uncertainty: Tensor,
    influence: Tensor | None = None,
    drift: Tensor | None = None,
    eligible: Tensor | None = None,
    *,
    combine: str = "product",
    suspects: str = "mean",
    most: int | Tensor | None = None,
) -> CoverSeeds:
    """Chooses the tokens to verify: uncertain, influential, and stable in the cache (COVER, arXiv 2602.06161,
    section 5).

    Each row's eligible positions of finite arguments take part. In float64, with numbers below 0 taken as 0,
    each argument is divided by its largest among them (all 0 stay 0), and the score is
    ``uncertainty * influence * (1 - drift)``. The paper's number of seeds is ``ceil(sqrt(n_t pi_t))``, where
    n_t is how many take part and pi_t, which it does not define, a share of suspects. Ties go to the lower
    index.

    Args:
        uncertainty: float ``[B, n]`` or ``[n]``: say, 1 - probability of the token.
        influence: the same shape: say, how much masked positions attend to it. None: left out of the score.
        drift: the same shape: say, how much it attends to what has just changed. None: left out.
        eligible: bool, the same shape; None for all.
        combine: ``"product"``, or ``"sum"`` for ``uncertainty + influence + (1 - drift)``.
        suspects: pi_t. ``"mean"``: mean score / largest score; ``"above_mean"``: the share of positions whose
            score exceeds the mean.
        most: at most that many seeds, a number or one a row ``[B]``, at least 0; None: no bound.

    Returns:
        CoverSeeds, of the shape of `uncertainty`. No seed has a score of 0.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    if not _arrays.all_tensors(uncertainty, influence, drift, eligible):
        return _arrays.call(
            cover_seeds,
            {"uncertainty": uncertainty, "influence": influence, "drift": drift, "eligible": eligible},
            {"most": most},
            combine=combine, suspects=suspects,
        )  # fmt: skip
    if combine not in COMBINATIONS:
        raise ValueError(f"combine: expected one of {', '.join(COMBINATIONS)}, got {combine!r}")
    if suspects not in SUSPECTS:
        raise ValueError(f"suspects: expected one of {', '.join(SUSPECTS)}, got {suspects!r}")
    u = _check.tensor("uncertainty", uncertainty, _check.FLOATS)
    if u.ndim not in (1, 2):
        raise ValueError(f"uncertainty: expected shape [n] or [B, n], got {list(u.shape)}")
    shape = u.shape
    single = u.ndim == 1

    def rows(name: str, x: Tensor | None, dtypes: _check.Dtypes) -> Tensor | None:
        if x is None:
            return None
        x = _check.companion(name, x, "uncertainty", u, shape, dtypes)
        if x.dtype not in (*_check.STATISTICS, *_check.BOOL):
            x = x.float()
        return x.unsqueeze(0) if single else x

    g, d = rows("influence", influence, _check.FLOATS), rows("drift", drift, _check.FLOATS)
    ok = rows("eligible", eligible, _check.BOOL)
    doubt = rows("uncertainty", u, _check.FLOATS)
    assert doubt is not None
    batch, n = doubt.shape
    bound = _check.per_row("most", n if most is None else most, batch, torch.int64, u.device)
    if most is not None:
        _check.in_range("most", _check.host_values(most, batch), 0, 2**63, "at least 0")
    seeds, score = _op(doubt, g, d, ok, bound, combine == "sum", suspects == "above_mean")
    return CoverSeeds(seeds.squeeze(0), score.squeeze(0)) if single else CoverSeeds(seeds, score)
