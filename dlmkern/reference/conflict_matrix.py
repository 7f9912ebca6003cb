import torch
from torch import Tensor


def conflict_matrix(logits: Tensor, token: Tensor, logsumexp: Tensor) -> Tensor:
    log_prob = gather_at_tokens(logits, token) - logsumexp.double()[..., None]
    return (log_prob + log_prob.mT).float()


def gather_at_tokens(x: Tensor, token: Tensor) -> Tensor:
    """``out[b, i, j] = x[b, i, token[b, j]]`` in float64: [B, n, V], [B, n] -> [B, n, n].

    NaN in row and column j where token j is outside the vocabulary.
    """
    n, vocab = x.shape[1:]
    known = (token >= 0) & (token < vocab)
    index = torch.where(known, token, 0)[:, None, :].expand(-1, n, -1)
    return torch.where(known[:, None, :] & known[:, :, None], x.gather(2, index).double(), torch.nan)
