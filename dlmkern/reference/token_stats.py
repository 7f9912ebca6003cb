import torch
from torch import Tensor

from dlmkern.reference.rows import float64_rows, row_chunks, row_softmax


def token_stats(
    logits: Tensor,
    prev_logits: Tensor | None,
    prev_rows: Tensor | None,
    banned_token: int,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, n, _ = logits.shape
    token = torch.empty((batch, n), dtype=torch.int64, device=logits.device)
    confidence, logsumexp, entropy = (
        torch.empty((batch, n), dtype=out_dtype, device=logits.device) for _ in range(3)
    )
    kl = torch.empty((batch, n) if prev_logits is not None else 0, dtype=out_dtype, device=logits.device)
    for rows in row_chunks(logits):
        p = row_softmax(float64_rows(logits[rows], banned_token))
        token[rows] = p.token
        confidence[rows] = p.confidence.to(out_dtype)
        logsumexp[rows] = p.logsumexp.to(out_dtype)
        # 0 log 0 = 0
        entropy[rows] = torch.where(p.log_prob == -torch.inf, 0.0, p.prob * -p.log_prob).sum(-1).to(out_dtype)
        if prev_logits is not None:
            q = row_softmax(float64_rows(previous_rows(prev_logits, prev_rows, rows), banned_token))
            # p = 0 adds 0; q = 0 < p gives +inf even where p underflows, since zero means a logit of -inf
            terms = torch.where(p.log_prob == -torch.inf, 0.0, p.prob * (p.log_prob - q.log_prob))
            zero_in_q = (q.log_prob == -torch.inf) & (p.log_prob > -torch.inf)
            terms = torch.where(zero_in_q, torch.inf, terms)
            kl[rows] = terms.sum(-1).to(out_dtype)
    return token, confidence, logsumexp, entropy, kl


def previous_rows(prev_logits: Tensor, prev_rows: Tensor | None, rows: tuple[slice, slice]) -> Tensor:
    """The rows of ``prev_logits`` that belong to the chunk ``rows``; NaN where there is none."""
    if prev_rows is None:
        return prev_logits[rows]
    index = prev_rows[rows]
    m, vocab = prev_logits.shape[1:]
    if m == 0:
        return prev_logits.new_full((*index.shape, vocab), torch.nan)
    exists = (index >= 0) & (index < m)
    sequence = torch.arange(prev_logits.shape[0], device=index.device)[rows[0], None]
    found = prev_logits[sequence, index.clamp(0, m - 1)]
    return torch.where(exists[..., None], found, torch.nan)
