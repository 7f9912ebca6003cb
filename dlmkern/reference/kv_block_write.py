import torch
from torch import Tensor


def kv_block_write(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    drift: bool,
) -> Tensor:
    length = k_cache.shape[2]
    written = (positions >= 0) & (positions < length)
    if cos is not None and sin is not None and length > 0:
        row = torch.where(written, positions, 0)
        k = rotate(k, cos[row].unsqueeze(1), sin[row].unsqueeze(1))
    results = [write(cache, new, positions, written, drift) for cache, new in ((k_cache, k), (v_cache, v))]
    return torch.cat(results) if drift else k_cache.new_empty(0, dtype=torch.float32)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns ``[B, H, n, d]`` by tables ``[B, 1, n, d]``, in their dtype: element i pairs with i + d/2."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def write(cache: Tensor, new: Tensor, positions: Tensor, written: Tensor, drift: bool) -> Tensor:
    """Writes the rows and returns their cosine and distance to what they replace, ``[2, B, n]``."""
    heads, length, size = cache.shape[1:]
    n = positions.shape[1]
    if n == 0 or length == 0:
        return cache.new_full((2, *positions.shape), torch.nan, dtype=torch.float32)
    # No shape may depend on what is skipped, so a skipped row does again what the first row that is written
    # does; where there is none, the first place of the cache is written with what it holds.
    source = torch.where(written, torch.arange(n, device=written.device), written.long().argmax(1)[:, None])
    some = written.any(dim=1, keepdim=True)
    place = torch.where(some, positions.gather(1, source), 0)

    def elements(index: Tensor) -> Tensor:
        return index[:, None, :, None].expand(-1, heads, -1, size)

    old = cache.gather(2, elements(place))
    new = torch.where(some[:, None, :, None], new.gather(2, elements(source)), old)
    cache.scatter_(2, elements(place), new)
    if not drift:
        return old
    before, after = old.double(), new.double()
    norm, new_norm = (x.square().sum((1, 3)).sqrt() for x in (before, after))
    cosine = (before * after).sum((1, 3)) / (norm * new_norm)
    distance = (after - before).square().sum((1, 3)).sqrt() / norm
    return torch.where(written, torch.stack((cosine, distance)), torch.nan).float()
