"""The methods by name. The defaults are those of their papers; what COVER's leaves open is as docs/cover.md
found it best."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from dlmkern.decoders.blocks import BlockSchedule, DepGABlocks, FixedBlocks, WholeSequence
from dlmkern.decoders.cache import Cache
from dlmkern.decoders.decoder import Decoder
from dlmkern.decoders.revise import WINO, Saber
from dlmkern.decoders.revise_cover import COVER
from dlmkern.decoders.unmask import CAP, Factor, MeanThreshold, OnePerStep, Threshold, WideThreshold
from dlmkern.decoders.unmask_dapd import DAPD
from dlmkern.decoders.unmask_dream import DreamSchedule


def vanilla(
    block_length: int | None = 32,
    steps: int | None = None,
    cache: str | Cache | None = None,
    *,
    remasking: str = "low_confidence",
    cfg_scale: float = 0.0,
    compat: str | None = None,
) -> Decoder:
    """LLaDA (arXiv:2502.09992); `block_length=None`: one block. See `OnePerStep`, `Decoder`."""
    return Decoder(
        _blocks(block_length),
        OnePerStep(steps, remasking),
        cache=cache,
        cfg_scale=cfg_scale,
        compat=compat,
    )


def threshold(
    tau: float = 0.9,
    block_length: int | None = 32,
    cache: str | Cache | None = None,
    *,
    compat: str | None = None,
) -> Decoder:
    """Fast-dLLM's threshold (arXiv:2505.22618). `block_length=None`: one block; see `Threshold`."""
    return Decoder(_blocks(block_length), Threshold(tau), cache=cache, compat=compat)


def factor(
    factor: float = 1.0,
    block_length: int | None = 32,
    cache: str | Cache | None = None,
    *,
    compat: str | None = None,
) -> Decoder:
    """Fast-dLLM's factor (arXiv:2505.22618). `block_length=None`: one block; see `Factor`."""
    return Decoder(_blocks(block_length), Factor(factor, compat), cache=cache, compat=compat)


def dream(
    alg: str = "entropy",
    steps: int | None = None,
    block_length: int | None = None,
    cache: str | Cache | None = None,
    *,
    eps: float = 1e-3,
    alg_temp: float | None = None,
    tau: float = 0.9,
    compat: str | None = None,
) -> Decoder:
    """Dream (arXiv:2508.15487); `block_length=None`: one block. See `DreamSchedule`.

    With `compat="official"`, blocks and any `alg` but "confidence_threshold", positions are ranked by entropy
    whatever `alg` says, as in Fast-dLLM's code.
    """
    in_blocks = block_length is not None
    if compat == "official" and in_blocks and alg != "confidence_threshold":
        alg = "entropy"
    rule = DreamSchedule(alg, steps, eps, alg_temp, tau, None if in_blocks else compat)
    return Decoder(_blocks(block_length), rule, cache=cache, compat=compat)


def depcap(
    lam: float = 1.2,
    l_min: int = 8,
    l_max: int = 128,
    tau_low: float = 0.8,
    tau_high: float = 0.95,
    gamma: float = -16.0,
    kl: str = "exact",
    topk: int = 64,
    cache: str | Cache | None = None,
    *,
    strict: bool = False,
    padding: str = "zero",
    compat: str | None = None,
) -> Decoder:
    """DepCap (arXiv:2604.15750): adaptive blocks and conflict-aware commits; see `DepGABlocks` and `CAP`."""
    return Decoder(
        DepGABlocks(lam, l_min, l_max, kl, topk, padding),
        CAP(tau_low, tau_high, gamma, strict),
        cache=cache,
        compat=compat,
    )


def dapd(
    variant: str = "staged",
    tau_min: float = 0.01,
    tau_max: float = 0.15,
    block_length: int | None = None,
    cache: str | Cache | None = None,
    *,
    layers: float | Collection[int] = 0.3,
    certain: float = 1.0,
    late: float = 0.9,
    late_from: float = 0.5,
    late_graph: bool = True,
    symmetric: bool = False,
    delayed_token_id: int | None = None,
    compat: str | None = None,
) -> Decoder:
    """DAPD (arXiv:2603.12996); `block_length=None`: one block. See `DAPD`.

    `PRESETS` holds the published settings of some tasks too, such as "dapd-llada-gsm8k".
    """
    rule = DAPD(
        variant=variant,
        tau_min=tau_min,
        tau_max=tau_max,
        layers=layers,
        certain=certain,
        late=late,
        late_from=late_from,
        late_graph=late_graph,
        symmetric=symmetric,
        delayed_token_id=delayed_token_id,
        compat=compat,
    )
    return Decoder(_blocks(block_length), rule, cache=cache, compat=compat)


def wino(
    block_length: int | None = 128,
    tau_draft: float = 0.6,
    tau_back: float = 0.9,
    cache: str | Cache | None = None,
    *,
    compat: str | None = None,
) -> Decoder:
    """WINO (arXiv:2507.18578); `block_length=None`: one block. See `WideThreshold` and `WINO`."""
    return Decoder(
        _blocks(block_length), WideThreshold(tau_draft), WINO(tau_back), cache=cache, compat=compat
    )


def saber(
    block_length: int | None = None,
    n: int = 2,
    cache: str | Cache | None = None,
    *,
    compat: str | None = None,
) -> Decoder:
    """Saber (arXiv:2510.18165); `block_length=None`: one block. See `MeanThreshold` and `Saber`.

    Blocks grow (see `FixedBlocks`): tokens of earlier ones are taken back too.
    """
    blocks = WholeSequence() if block_length is None else FixedBlocks(block_length, growing=True)
    return Decoder(blocks, MeanThreshold(n, compat), Saber(n), cache=cache, compat=compat)


def cover(
    tau_draft: float = 0.7,
    tau_replace: float = 0.9999,
    block_length: int | None = 32,
    cache: str | Cache | None = None,
    *,
    draft_most: int | None = None,
    max_remasks: int = 2,
    cooldown: int = 1,
    most: int | None = None,
    combine: str = "product",
    suspects: str = "mean",
    seeds_by: str = "stability",
    layers: float | Collection[int] = 1.0,
    verify: str = "override",
    override_layers: float = 1.0,
    recheck: bool = False,
) -> Decoder:
    """COVER (arXiv:2602.06161); `block_length=None`: one block.

    `Threshold(tau_draft, draft_most)` drafts; see `COVER` for the other arguments.
    """
    rule = COVER(
        tau_replace=tau_replace,
        max_remasks=max_remasks,
        cooldown=cooldown,
        most=most,
        combine=combine,
        suspects=suspects,
        seeds_by=seeds_by,
        layers=layers,
        verify=verify,
        override_layers=override_layers,
        recheck=recheck,
    )
    return Decoder(_blocks(block_length), Threshold(tau_draft, draft_most), rule, cache=cache)


# Of DAPD's official scripts, for answers of 256 tokens. A task without a suffix has the settings of the best
# accuracy; for Dream they are the same for all tasks.
_DAPD_TASKS: dict[str, tuple[str, float, float, int | None]] = {
    "llada-gsm8k": ("direct", 0.005, 0.05, 64),
    "llada-gsm8k-staged": ("staged", 0.01, 0.05, None),
    "llada-humaneval": ("direct", 0.01, 0.05, 64),
    "llada-humaneval-staged": ("staged", 0.01, 0.15, None),
    "llada-mbpp": ("staged", 0.01, 0.15, None),
    "llada-mbpp-direct": ("direct", 0.01, 0.02, None),
    "llada-math": ("staged", 0.01, 0.05, None),
    "dream": ("direct", 0.005, 0.01, None),
}

PRESETS: dict[str, Callable[..., Decoder]] = {
    "vanilla": vanilla,
    "threshold": threshold,
    "factor": factor,
    "dream": dream,
    "depcap": depcap,
    "dapd": dapd,
    "wino": wino,
    "saber": saber,
    "cover": cover,
    **{
        f"dapd-{task}": partial(
            dapd, variant=variant, tau_min=tau_min, tau_max=tau_max, block_length=block_length
        )
        for task, (variant, tau_min, tau_max, block_length) in _DAPD_TASKS.items()
    },
}


def find_decoder(decoder: str | Decoder) -> Decoder:
    """A decoder by the name of its preset, with the default settings; a `Decoder` is returned as it is.

    Raises:
        ValueError: unknown name; the message lists the known ones.
        TypeError: neither a name nor a `Decoder`.
    """
    if isinstance(decoder, Decoder):
        return decoder
    if not isinstance(decoder, str):
        raise TypeError(f"decoder must be a name or a Decoder, got {type(decoder).__name__}")
    if decoder not in PRESETS:
        raise ValueError(f"unknown decoder {decoder!r}, known: {', '.join(PRESETS)}")
    return PRESETS[decoder]()


def _blocks(block_length: int | None) -> BlockSchedule:
    return WholeSequence() if block_length is None else FixedBlocks(block_length)
