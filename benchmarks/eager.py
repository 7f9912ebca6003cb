"""What one writes in plain torch without this project: the other side of every ratio."""

import torch
from torch import Tensor


def stats_with_kl(logits: Tensor, prev_logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Token, confidence, entropy and KL(current || previous) of every position."""
    log_p = torch.log_softmax(logits.float(), dim=-1)
    log_q = torch.log_softmax(prev_logits.float(), dim=-1)
    p = log_p.exp()
    confidence, token = p.max(dim=-1)
    return token, confidence, -(p * log_p).sum(-1), (p * (log_p - log_q)).sum(-1)


def stats(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Token and confidence of every position."""
    confidence, token = torch.softmax(logits.float(), dim=-1).max(dim=-1)
    return token, confidence


def greedy(conflict: Tensor, priority: Tensor, eligible: Tensor, selected: Tensor) -> Tensor:
    """Greedy maximal independent set by falling priority: conflict [n, n], the others [n]."""
    selected = selected.clone()
    for i in priority.argsort(descending=True).tolist():
        if eligible[i] and not selected[i] and not (conflict[i] & selected).any():
            selected[i] = True
    return selected


def conflict_free(logits: Tensor, token: Tensor, logsumexp: Tensor, gamma: float) -> Tensor:
    """Positions without a conflict above `gamma`, the likeliest first: logits [n, V], the others [n]."""
    log_prob = logits[:, token] - logsumexp[:, None]
    eligible = torch.ones_like(token, dtype=torch.bool)
    conflict = (log_prob + log_prob.T > gamma).fill_diagonal_(False)
    return greedy(conflict, log_prob.diagonal(), eligible, torch.zeros_like(eligible))


def cap_select(logits: Tensor, tau_low: float, tau_high: float, gamma: float) -> Tensor:
    """CAP-Decoding's commit step: logits [n, V]."""
    log_prob = torch.log_softmax(logits.float(), dim=-1)
    confidence, token = log_prob.exp().max(dim=-1)
    log_prob = log_prob[:, token]
    conflict = (log_prob + log_prob.T > gamma).fill_diagonal_(False)
    selected = greedy(conflict, confidence, confidence >= tau_low, confidence >= tau_high)
    selected[confidence.argmax()] = True
    return selected


def threshold_select(logits: Tensor, tau: float) -> tuple[Tensor, Tensor, Tensor]:
    """Selected positions, tokens and confidences by the threshold rule: logits [n, V]."""
    confidence, token = torch.softmax(logits.double(), dim=-1).max(dim=-1)
    selected = confidence >= tau
    selected[confidence.argmax()] = True
    return selected, token, confidence


def factor_select(logits: Tensor, factor: float) -> tuple[Tensor, Tensor, Tensor]:
    """The same by the factor rule, rank by rank."""
    confidence, token = torch.softmax(logits.double(), dim=-1).max(dim=-1)
    ordered, order = confidence.sort(descending=True)
    count = 1
    while count < len(order) and (count + 2) * (1 - ordered[count]) < factor:
        count += 1
    selected = torch.zeros_like(confidence, dtype=torch.bool)
    selected[order[:count]] = True
    return selected, token, confidence


def dapd_select(scores: Tensor, confidence: Tensor, tau: float) -> Tensor:
    """DAPD's commit step, scanned in Python like the official one: scores [M, M], confidence [M]."""
    tie = ((scores + scores.T) / 2).fill_diagonal_(0)
    relative = (tie / tie.amax(-1, keepdim=True).clamp(min=1e-8)).tolist()
    degree = tie.sum(-1)
    key = degree / (degree.max() + 1e-8) * (confidence / (confidence.max() + 1e-8))
    taken: list[int] = []
    for i in key.argsort(descending=True).tolist():
        if all(relative[i][j] <= tau for j in taken):
            taken.append(i)
    selected = torch.zeros_like(confidence, dtype=torch.bool)
    selected[taken] = True
    return selected


def cover_seeds(uncertainty: Tensor, influence: Tensor, drift: Tensor) -> tuple[Tensor, Tensor]:
    """COVER's seeds, and the scores that they are chosen by: all [n]."""
    u, g, d = (x.double() / x.max() for x in (uncertainty, influence, drift))
    score = u * g * (1 - d)
    count = int((score.sum() / score.max()).sqrt().ceil())
    seeds = torch.zeros_like(score, dtype=torch.bool)
    seeds[score.topk(count).indices] = True
    return seeds, score


def cover_verify(
    token: Tensor,
    predicted: Tensor,
    confidence: Tensor,
    seeds: Tensor,
    remasks: Tensor,
    tau_replace: float,
    max_remasks: int,
) -> Tensor:
    """COVER's verdicts: 0 to leave alone, 1 to keep, 2 to replace, 3 to mask again."""
    doubted = torch.where(remasks < max_remasks, 3, 1)
    verdict = torch.where(confidence >= tau_replace, 2, doubted)
    return torch.where(seeds, torch.where(predicted == token, 1, verdict), 0)


def kv_block_write(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Rows into their places, [B, H, n, d] into [B, H, L, d]; with a rotary table, turned and with drift."""
    sequence = torch.arange(len(positions), device=positions.device)[:, None]
    drift: list[Tensor] = []
    if cos is not None and sin is not None:
        x = k.float()
        first, second = x.chunk(2, dim=-1)
        turned = x * cos[positions][:, None] + torch.cat((-second, first), -1) * sin[positions][:, None]
        k = turned.to(k.dtype)
        for cache, rows in ((k_cache, k), (v_cache, v)):
            old = cache[sequence, :, positions].flatten(2).float()
            new = rows.transpose(1, 2).flatten(2).float()
            drift.append(torch.cosine_similarity(old, new, dim=-1))
            drift.append((new - old).norm(dim=-1) / old.norm(dim=-1))
    k_cache[sequence, :, positions] = k.transpose(1, 2)
    v_cache[sequence, :, positions] = v.transpose(1, 2)
    return k_cache, v_cache, *drift


def block_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor]:
    """Attention with grouped heads; torch's does not return the log-sum-exp."""
    return (torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True),)


def cover_attention(
    q: Tensor, k: Tensor, v: Tensor, k_cached: Tensor, v_cached: Tensor, seeds: Tensor
) -> tuple[Tensor]:
    """COVER's attention of one sequence: torch's, and once more for the seeds, whose columns differ."""
    keys, values = (torch.where(seeds[..., None], old, new) for old, new in ((k_cached, k), (v_cached, v)))
    out = torch.nn.functional.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
    rows = seeds[0].nonzero().flatten()
    own = torch.eye(len(rows), dtype=torch.bool, device=q.device)
    others = torch.arange(keys.shape[2], device=q.device) != rows[:, None]
    out[:, :, rows] = torch.nn.functional.scaled_dot_product_attention(
        q[:, :, rows],
        torch.cat((keys, k[:, :, rows]), dim=2),
        torch.cat((values, v[:, :, rows]), dim=2),
        attn_mask=torch.cat((others, own), dim=1),
        enable_gqa=True,
    )
    return (out,)


def diagonal_correction(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cached: Tensor,
    v_cached: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """The same from attention over a cache, by the formula of the paper: one sequence."""
    rows = seeds[0].nonzero().flatten()

    def each_head(x: Tensor, index: Tensor) -> Tensor:
        return x[:, :, index].repeat_interleave(q.shape[1] // x.shape[1], dim=1)

    def weight(keys: Tensor, index: Tensor) -> Tensor:
        score: Tensor = (q[:, :, rows] * each_head(keys, index)).sum(-1) / q.shape[-1] ** 0.5
        return (score - lse[:, :, rows]).exp().unsqueeze(-1)

    places = positions[0, rows]
    a, b = weight(k_cached, places), weight(k, rows)
    r = 1 - a + b
    shared = out[:, :, rows] - a * each_head(v_cached, places) + b * each_head(v, rows)
    out, lse = out.clone(), lse.clone()
    out[:, :, rows] = shared / r
    lse[:, :, rows] += r.log().squeeze(-1)
    return out, lse


def attention_graph(q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
    """The mean over heads of the whole attention map, and of it the positions' rows and columns."""
    heads = q.shape[1] // k.shape[1]
    scores = (q @ k.repeat_interleave(heads, dim=1).mT).float() / q.shape[-1] ** 0.5
    weights = torch.softmax(scores, dim=-1).mean(dim=1)
    sequence = torch.arange(len(q), device=q.device)[:, None, None]
    return weights[sequence, positions[:, :, None], positions[:, None, :]]


def topk_snapshot(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The k likeliest tokens, their log-probabilities, and what is left, spread evenly."""
    log_prob = torch.log_softmax(logits.double(), dim=-1)
    logp, ids = log_prob.topk(k, dim=-1)
    tail = 1 - logp.exp().sum(-1).clamp(max=1 - 1e-12)
    return ids, logp, (tail / (logits.shape[-1] - k)).log()


def topk_kl(ids: Tensor, logp: Tensor, prev_ids: Tensor, prev_logp: Tensor, prev_floor: Tensor) -> Tensor:
    """KL of the current top tokens against the previous snapshot."""
    same = ids[..., :, None] == prev_ids[..., None, :]
    log_q = torch.where(same.any(-1), (same * prev_logp[..., None, :]).sum(-1), prev_floor[..., None])
    return (logp.exp() * (logp - log_q)).sum(-1)


def depga_block(kl: Tensor, entropy: Tensor, lam: float, l_min: int, l_max: int) -> int:
    """Length of the next block: kl and entropy [W], with at least W positions left."""

    def normalised(x: Tensor) -> Tensor:
        x = torch.nn.functional.avg_pool1d(x[None], 3, 1, padding=1)[0]
        q1, q3 = (x.kthvalue(int(q * (len(x) - 1)) + 1).values for q in (0.25, 0.75))
        return (x - x.median()) / (q3 - q1).abs().clamp(min=1e-15)

    score = normalised(kl.double()) - lam * normalised(entropy.double())
    negative = (score < 0).nonzero()
    length = int(negative[0]) if len(negative) else len(score)
    return min(max(length, l_min), l_max)
