"""What is timed: one generator of cases an op."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

import dlmkern
from benchmarks import eager

VOCABULARY = 126464  # LLaDA's


@dataclass(frozen=True)
class Case:
    op: str
    detail: str
    run: Callable[[], Any]  # through the public function; the backend is the caller's choice
    eager: Callable[..., Any]
    inputs: tuple[Any, ...]  # of `eager`
    compiles: bool = False  # whether torch.compile takes `eager` whole
    reads: list[Tensor] = field(default_factory=list)  # what any implementation has to read from end to end
    outcome: Callable[[], Any] | None = (
        None  # what to compare where `run` writes in place and returns nothing
    )

    def result(self) -> Any:
        """What both sides have to agree on."""
        return (self.outcome or self.run)()


def random_logits(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Standard normal logits: every token of the vocabulary matters."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(n, VOCABULARY, generator=generator, device=device).to(dtype)


def peaked_logits(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Logits with one likely token a row, now and then the same one in two rows, as trained models give."""
    logits = random_logits(n, torch.float32, device)
    generator = torch.Generator().manual_seed(1)
    token = torch.randint(4 * n, (n, 1), generator=generator).to(device)
    height = math.log(VOCABULARY) + torch.empty(n, 1).uniform_(-2, 13, generator=generator)
    return logits.scatter_(1, token, height.to(device)).to(dtype)


LOGITS = {"random": random_logits, "peaked": peaked_logits}


def token_stats(device: torch.device, quick: bool) -> Iterator[Case]:
    n = 32 if quick else 128
    for dtype in (torch.float32, torch.bfloat16):
        for kind, make in LOGITS.items():
            logits = make(n, dtype, device)
            noise = torch.randn(logits.shape, generator=torch.Generator(device).manual_seed(2), device=device)
            prev = (logits.float() + 0.5 * noise).to(dtype)
            detail = f"{kind} [{n}, {VOCABULARY}] {str(dtype).removeprefix('torch.')}"
            yield Case(
                "token_stats",
                f"with KL, {detail}",
                partial(dlmkern.token_stats, logits, prev),
                eager.stats_with_kl,
                (logits, prev),
                compiles=True,
                reads=[logits, prev],
            )
            yield Case(
                "token_stats",
                detail,
                partial(dlmkern.token_stats, logits),
                eager.stats,
                (logits,),
                compiles=True,
                reads=[logits],
            )


def _conflict_free(
    logits: Tensor, token: Tensor, logsumexp: Tensor, gamma: float, confidence: Tensor
) -> Tensor:
    conflict = dlmkern.conflict_matrix(logits, token, logsumexp)
    return dlmkern.independent_set(conflict > gamma, confidence)


def conflict_free(device: torch.device, quick: bool) -> Iterator[Case]:
    gamma = -2 * math.log(VOCABULARY) - 0.4  # a third of the pairs of random rows are in conflict
    for n in (32,) if quick else (32, 64, 128):
        logits = random_logits(n, torch.float32, device)
        stats = dlmkern.token_stats(logits)

        inputs = (logits, stats.token, stats.logsumexp, gamma)
        yield Case(
            "conflict_matrix + independent_set",
            f"n = {n}",
            partial(_conflict_free, *inputs, stats.confidence),
            eager.conflict_free,
            inputs,
        )


def cap_select(device: torch.device, quick: bool) -> Iterator[Case]:
    for n in (32,) if quick else (32, 128):
        logits = peaked_logits(n, torch.float32, device)
        yield Case(
            "cap_select",
            f"from logits, peaked [{n}, {VOCABULARY}] float32",
            partial(dlmkern.cap_select, logits=logits),
            eager.cap_select,
            (logits, 0.8, 0.95, -16.0),
            reads=[logits],
        )


def topk_snapshot(device: torch.device, quick: bool) -> Iterator[Case]:
    n = 16 if quick else 128
    logits = random_logits(n, torch.float32, device)
    yield Case(
        "topk_snapshot",
        f"k = 64, random [{n}, {VOCABULARY}] float32",
        partial(dlmkern.topk_snapshot, logits),
        eager.topk_snapshot,
        (logits, 64),
        reads=[logits],
    )


def topk_kl(device: torch.device, quick: bool) -> Iterator[Case]:
    curr, prev = (dlmkern.topk_snapshot(make(128, torch.float32, device)) for make in LOGITS.values())
    yield Case(
        "topk_kl",
        "k = 64, n = 128",
        partial(dlmkern.topk_kl, curr, prev),
        eager.topk_kl,
        (curr.ids, curr.logp, *prev),
        compiles=True,
    )


def depga_block(device: torch.device, quick: bool) -> Iterator[Case]:
    kl, entropy = torch.rand(2, 128, generator=torch.Generator(device).manual_seed(0), device=device)
    yield Case(
        "depga_block",
        "W = 128",
        partial(dlmkern.depga_block, kl, entropy, 128),
        eager.depga_block,
        (kl, entropy, 1.2, 8, 128),
    )


def confidence_select(device: torch.device, quick: bool) -> Iterator[Case]:
    for n in (32,) if quick else (1, 8, 32):
        logits = peaked_logits(n, torch.float32, device)
        for rule, plain in (("threshold", eager.threshold_select), ("factor", eager.factor_select)):
            yield Case(
                "confidence_select",
                f"{rule}, from logits, peaked [{n}, {VOCABULARY}] float32",
                partial(dlmkern.confidence_select, logits, rule=rule),
                plain,
                (logits, {"threshold": 0.9, "factor": 1.0}[rule]),
                reads=[logits],
            )


def dapd_select(device: torch.device, quick: bool) -> Iterator[Case]:
    for many in (64,) if quick else (64, 256, 1024):
        generator = torch.Generator(device).manual_seed(0)
        scores = torch.randn(many, many, generator=generator, device=device).mul(3).softmax(-1)
        confidence = torch.rand(many, generator=generator, device=device)
        yield Case(
            "dapd_select",
            f"M = {many}, float32",
            partial(dlmkern.dapd_select, scores, confidence, None, 0.05),
            eager.dapd_select,
            (scores, confidence, 0.05),
            reads=[scores],
        )


def cover_seeds(device: torch.device, quick: bool) -> Iterator[Case]:
    for n in (256,) if quick else (256, 1024, 4096):
        parts = torch.rand(3, n, generator=torch.Generator(device).manual_seed(0), device=device)
        yield Case(
            "cover_seeds", f"n = {n}", partial(dlmkern.cover_seeds, *parts), eager.cover_seeds, (*parts,)
        )


def cover_verify(device: torch.device, quick: bool) -> Iterator[Case]:
    n = 1024
    generator = torch.Generator(device).manual_seed(0)
    confidence = torch.rand(n, generator=generator, device=device)
    token, predicted, remasks = torch.randint(3, (3, n), generator=generator, device=device)
    inputs = (token, predicted, confidence, token == 0, remasks)
    yield Case(
        "cover_verify",
        f"n = {n}",
        partial(dlmkern.cover_verify, *inputs),
        eager.cover_verify,
        (*inputs, 0.9, 1),
        compiles=True,
    )


def kv_block_write(device: torch.device, quick: bool) -> Iterator[Case]:
    n, length = 32, 1024
    for heads, size, dtype in ((8, 64, torch.float32), (32, 128, torch.bfloat16)):
        generator = torch.Generator(device).manual_seed(0)
        k_cache, v_cache, k, v = (
            torch.randn(1, rows, heads, size, generator=generator, device=device).to(dtype).transpose(1, 2)
            for rows in (length, length, n, n)
        )
        positions = torch.arange(512, 512 + n, device=device)[None]
        angles = torch.rand(length, size, generator=generator, device=device)
        rope = angles.cos(), angles.sin()
        for detail, options in (("", {}), (", rope and drift", {"rope": rope, "drift": True})):
            write = partial(
                dlmkern.kv_block_write,
                k=k,
                v=v,
                positions=positions,
                **options,  # type: ignore[arg-type]
            )

            def outcome(
                write: Callable[..., Any] = write, caches: tuple[Tensor, Tensor] = (k_cache, v_cache)
            ) -> tuple[Tensor, ...]:
                k_cache, v_cache = caches[0].clone(), caches[1].clone()
                drift = write(k_cache, v_cache)
                return k_cache, v_cache, *(drift or ())

            yield Case(
                "kv_block_write",
                f"n = {n}, {heads} heads of {size}, {str(dtype).removeprefix('torch.')}{detail}",
                partial(write, k_cache.clone(), v_cache.clone()),
                eager.kv_block_write,
                (k_cache.clone(), v_cache.clone(), k, v, positions, *(rope if options else ())),
                outcome=outcome,
            )


def block_attention(device: torch.device, quick: bool) -> Iterator[Case]:
    n, size = 32, 128
    for length in (512,) if quick else (512, 4096):
        generator = torch.Generator(device).manual_seed(0)
        q, k, v = (
            torch.randn(1, heads, rows, size, generator=generator, device=device)
            for heads, rows in ((32, n), (8, length), (8, length))
        )
        yield Case(
            "block_attention",
            f"n = {n}, L = {length}, 32 query and 8 key heads of {size}, float32",
            partial(dlmkern.block_attention, q, k, v),
            eager.block_attention,
            (q, k, v),
            reads=[k, v],
        )


def cover_inputs(
    length: int, kv_heads: int, dtype: torch.dtype, device: torch.device, n: int | None = None
) -> tuple[Tensor, ...]:
    """What cover_attention takes, of 32 heads of 128: q, k and v of `n` rows (None for all), the cached keys
    and values, and 32 seeds. Laid out as projections are: `[B, L, H, d]`, transposed."""
    generator = torch.Generator(device).manual_seed(0)
    rows = length if n is None else n
    shapes = ((32, rows), (kv_heads, rows), (kv_heads, rows), (kv_heads, length), (kv_heads, length))
    inputs = (
        torch.randn(1, many, heads, 128, generator=generator, device=device).to(dtype).transpose(1, 2)
        for heads, many in shapes
    )
    seeds = torch.zeros(1, rows, dtype=torch.bool, device=device)
    seeds[0, torch.randperm(rows, generator=generator, device=device)[:32]] = True
    return *inputs, seeds


COVERED = (
    (256, 32, torch.float32),
    (1024, 32, torch.float32),
    (1024, 8, torch.float32),
    (1024, 8, torch.bfloat16),
    (4096, 8, torch.bfloat16),
)


def named(detail: str, kv_heads: int, dtype: torch.dtype) -> str:
    heads = "32 heads" if kv_heads == 32 else f"32 query and {kv_heads} key heads"
    return f"{detail}, {heads} of 128, {str(dtype).removeprefix('torch.')}"


def cover_attention(device: torch.device, quick: bool) -> Iterator[Case]:
    for length, kv_heads, dtype in COVERED[:1] if quick else COVERED:
        inputs = cover_inputs(length, kv_heads, dtype, device)
        yield Case(
            "cover_attention",
            named(f"32 seeds of L = {length}", kv_heads, dtype),
            partial(dlmkern.cover_attention, *inputs),
            eager.cover_attention,
            inputs,
        )


def diagonal_correction(device: torch.device, quick: bool) -> Iterator[Case]:
    n, length = 64, 1024
    for kv_heads in (32, 8):
        inputs = cover_inputs(length, kv_heads, torch.float32, device, n)
        positions = torch.arange(512, 512 + n, device=device)[None]
        q, (keys, values) = inputs[0], inputs[3:5]
        scores = q @ keys.repeat_interleave(32 // kv_heads, dim=1).mT / q.shape[-1] ** 0.5
        lse = scores.logsumexp(-1)
        out = scores.softmax(-1) @ values.repeat_interleave(32 // kv_heads, dim=1)
        yield Case(
            "diagonal_correction",
            named(f"32 seeds of n = {n}, L = {length}", kv_heads, torch.float32),
            partial(dlmkern.diagonal_correction, out, lse, *inputs, positions=positions),
            eager.diagonal_correction,
            (out, lse, *inputs, positions),
        )


GRAPHS = ((256, torch.float32), (1024, torch.float32), (1024, torch.bfloat16), (4096, torch.float32))


def attention_graph(device: torch.device, quick: bool) -> Iterator[Case]:
    heads, size = 32, 128
    for length, dtype in GRAPHS[:1] if quick else GRAPHS:
        generator = torch.Generator(device).manual_seed(0)
        q, k = (
            torch.randn(1, heads, length, size, generator=generator, device=device).to(dtype) for _ in "qk"
        )
        chosen = torch.randperm(length, generator=generator, device=device)[: length // 2]
        positions = chosen.sort().values[None]
        lse = torch.cat(
            [(q[:, h].float() @ k[:, h].float().mT / size**0.5).logsumexp(-1) for h in range(heads)]
        )[None]
        name = (
            f"M = {length // 2} of L = {length}, {heads} heads of {size}, {str(dtype).removeprefix('torch.')}"
        )
        for detail, options in (("", {}), (", lse given", {"lse": lse})):
            yield Case(
                "attention_graph",
                name + detail,
                partial(dlmkern.attention_graph, q, k, positions, **options),  # type: ignore[arg-type]
                eager.attention_graph,
                (q, k, positions),
            )


# By the ops that their cases call.
ALL = {
    ("token_stats",): token_stats,
    ("conflict_matrix", "independent_set"): conflict_free,
    ("cap_select",): cap_select,
    ("topk_snapshot",): topk_snapshot,
    ("topk_kl",): topk_kl,
    ("depga_block",): depga_block,
    ("confidence_select",): confidence_select,
    ("dapd_select",): dapd_select,
    ("cover_seeds",): cover_seeds,
    ("cover_verify",): cover_verify,
    ("kv_block_write",): kv_block_write,
    ("block_attention",): block_attention,
    ("cover_attention",): cover_attention,
    ("diagonal_correction",): diagonal_correction,
    ("attention_graph",): attention_graph,
}


def cases(device: torch.device, quick: bool, ops: list[str]) -> Iterator[Case]:
    """The cases of `ops`, or of every op if there are none; made one at a time, since some are large."""
    for called, generate in ALL.items():
        if not ops or set(ops) & set(called):
            yield from generate(device, quick)
