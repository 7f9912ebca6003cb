"""Calls the compiled kernels: allocates outputs and hands raw pointers, sizes and strides to the C API.

One class serves both libraries of kernels; they differ in their prefix and in the stream and scratch memory
that the CUDA functions take.
"""

import importlib
import importlib.util
import math
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from dlmkern import reference
from dlmkern.attention import attention_with_lse

View = tuple[int, int, tuple[int, ...], tuple[int, ...]]

DTYPE_CODE = {
    torch.float64: 0,
    torch.float32: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.int64: 4,
    torch.bool: 5,
}
ALIGNMENT = 256  # of the scratch memory, in bytes
# For each thread, cover_attention puts so much of the keys together at once. Copies of all would take as much
# memory again, which is new to the process in every call.
HEADS_BYTES = 2 << 20


def view(tensor: Tensor) -> View:
    return tensor.data_ptr(), DTYPE_CODE[tensor.dtype], tensor.shape, tensor.stride()


def optional_view(tensor: Tensor | None) -> View | None:
    return None if tensor is None else view(tensor)


class Kernels:
    """The ops of one compiled library; every method takes the arguments of the torch op of its name."""

    def __init__(self, module: ModuleType, prefix: str) -> None:
        self.module = module
        self.prefix = prefix

    def call(self, op: str, tensor: Tensor, sizes: tuple[int, ...] | None, *args: Any) -> None:
        """Runs the kernel on the device of `tensor`; its scratch memory depends on `sizes`, None for none."""
        getattr(self.module, self.prefix + op)(*args)

    def token_stats(
        self,
        logits: Tensor,
        prev_logits: Tensor | None,
        prev_rows: Tensor | None,
        banned_token: int,
        out_dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        rows = logits.shape[:2]
        token = torch.empty(rows, dtype=torch.int64, device=logits.device)
        confidence = torch.empty(rows, dtype=out_dtype, device=logits.device)
        logsumexp = torch.empty(rows, dtype=out_dtype, device=logits.device)
        entropy = torch.empty(rows, dtype=out_dtype, device=logits.device)
        kl = torch.empty(0 if prev_logits is None else rows, dtype=out_dtype, device=logits.device)
        self.call(
            "token_stats",
            logits,
            tuple(logits.shape),
            view(logits),
            optional_view(prev_logits),
            optional_view(prev_rows),
            banned_token,
            view(token),
            view(confidence),
            view(logsumexp),
            view(entropy),
            None if prev_logits is None else view(kl),
        )
        return token, confidence, logsumexp, entropy, kl

    def conflict_matrix(self, logits: Tensor, token: Tensor, logsumexp: Tensor) -> Tensor:
        batch, n, _ = logits.shape
        conflict = torch.empty((batch, n, n), dtype=torch.float32, device=logits.device)
        self.call(
            "conflict_matrix",
            logits,
            tuple(logits.shape),
            view(logits),
            view(token),
            view(logsumexp),
            view(conflict),
        )
        return conflict

    def independent_set(
        self, conflict: Tensor, priority: Tensor, eligible: Tensor | None, preselected: Tensor | None
    ) -> Tensor:
        batch, n = priority.shape
        selected = torch.empty((batch, n), dtype=torch.bool, device=priority.device)
        self.call(
            "independent_set",
            priority,
            (batch, n, 1),
            view(conflict),
            view(priority),
            optional_view(eligible),
            optional_view(preselected),
            view(selected),
        )
        return selected

    def cap_select(
        self,
        input: Tensor,  # noqa: A002
        token: Tensor,
        logsumexp: Tensor | None,
        mask: Tensor | None,
        tau_low: Tensor,
        tau_high: Tensor,
        gamma: Tensor,
        strict: bool,
    ) -> tuple[Tensor, Tensor]:
        rows = input.shape[:2]
        selected = torch.empty(rows, dtype=torch.bool, device=input.device)
        confidence = torch.empty(rows, dtype=torch.float64, device=input.device)
        self.call(
            "cap_select",
            input,
            tuple(input.shape),
            view(input),
            view(token),
            optional_view(logsumexp),
            optional_view(mask),
            view(tau_low),
            view(tau_high),
            view(gamma),
            strict,
            view(selected),
            view(confidence),
        )
        return selected, confidence

    def topk_snapshot(self, logits: Tensor, k: int, banned_token: int) -> tuple[Tensor, Tensor, Tensor]:
        batch, n, _ = logits.shape
        ids = torch.empty((batch, n, k), dtype=torch.int64, device=logits.device)
        logp = torch.empty((batch, n, k), dtype=torch.float64, device=logits.device)
        floor = torch.empty((batch, n), dtype=torch.float64, device=logits.device)
        self.call(
            "topk_snapshot",
            logits,
            tuple(logits.shape),
            view(logits),
            banned_token,
            view(ids),
            view(logp),
            view(floor),
        )
        return ids, logp, floor

    def topk_kl(
        self, ids: Tensor, logp: Tensor, prev_ids: Tensor, prev_logp: Tensor, prev_floor: Tensor
    ) -> Tensor:
        kl = torch.empty(ids.shape[:2], dtype=torch.float64, device=ids.device)
        self.call(
            "topk_kl",
            ids,
            None,
            view(ids),
            view(logp),
            view(prev_ids),
            view(prev_logp),
            view(prev_floor),
            view(kl),
        )
        return kl

    def depga_block(
        self,
        kl: Tensor,
        entropy: Tensor,
        remaining: Tensor,
        lam: Tensor,
        l_min: Tensor,
        l_max: Tensor,
        reflect: bool,
    ) -> Tensor:
        length = torch.empty(kl.shape[:1], dtype=torch.int64, device=kl.device)
        self.call(
            "depga_block",
            kl,
            tuple(kl.shape),
            view(kl),
            view(entropy),
            view(remaining),
            view(lam),
            view(l_min),
            view(l_max),
            reflect,
            view(length),
        )
        return length

    def confidence_select(
        self, confidence: Tensor, mask: Tensor | None, parameter: Tensor, rule: int
    ) -> Tensor:
        selected = torch.empty(confidence.shape, dtype=torch.bool, device=confidence.device)
        self.call(
            "confidence_select",
            confidence,
            None,
            view(confidence),
            optional_view(mask),
            view(parameter),
            rule,
            view(selected),
        )
        return selected

    def dapd_select(
        self,
        scores: Tensor,
        confidence: Tensor,
        valid: Tensor | None,
        tau: Tensor,
        certain: Tensor,
        late: Tensor,
        symmetric: bool,
    ) -> Tensor:
        selected = torch.empty(confidence.shape, dtype=torch.bool, device=confidence.device)
        self.call(
            "dapd_select",
            scores,
            tuple(confidence.shape),
            view(scores),
            view(confidence),
            optional_view(valid),
            view(tau),
            view(certain),
            view(late),
            symmetric,
            view(selected),
        )
        return selected

    def cover_seeds(
        self,
        uncertainty: Tensor,
        influence: Tensor | None,
        drift: Tensor | None,
        eligible: Tensor | None,
        most: Tensor,
        additive: bool,
        above_mean: bool,
    ) -> tuple[Tensor, Tensor]:
        shape, device = uncertainty.shape, uncertainty.device
        seeds = torch.empty(shape, dtype=torch.bool, device=device)
        score = torch.empty(shape, dtype=torch.float64, device=device)
        self.call(
            "cover_seeds",
            uncertainty,
            None,
            view(uncertainty),
            optional_view(influence),
            optional_view(drift),
            optional_view(eligible),
            view(most),
            additive,
            above_mean,
            view(seeds),
            view(score),
        )
        return seeds, score

    def cover_verify(
        self,
        confidence: Tensor,
        token: Tensor,
        predicted: Tensor,
        seeds: Tensor,
        remasks: Tensor,
        tau_replace: float,
        max_remasks: int,
    ) -> Tensor:
        verdict = torch.empty(token.shape, dtype=torch.int64, device=token.device)
        self.call(
            "cover_verify",
            token,
            None,
            view(confidence),
            view(token),
            view(predicted),
            view(seeds),
            view(remasks),
            tau_replace,
            max_remasks,
            view(verdict),
        )
        return verdict

    def kv_block_write(
        self,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        drift: bool,
    ) -> Tensor:
        moved = torch.empty(
            (4, *positions.shape) if drift else 0, dtype=torch.float32, device=positions.device
        )
        self.call(
            "kv_block_write",
            k_cache,
            None,
            view(k_cache),
            view(v_cache),
            view(k),
            view(v),
            view(positions),
            optional_view(cos),
            optional_view(sin),
            view(moved) if drift else None,
        )
        return moved

    def attention_graph(
        self,
        q: Tensor,
        k: Tensor,
        positions: Tensor,
        rows: Tensor | None,
        lengths: Tensor | None,
        lse: Tensor | None,
        scale: float,
        out: Tensor,
    ) -> None:
        self.call(
            "attention_graph",
            q,
            None,
            view(q),
            view(k),
            view(positions),
            optional_view(rows),
            optional_view(lengths),
            optional_view(lse),
            scale,
            view(out),
        )

    def diagonal_correction(
        self,
        out: Tensor,
        lse: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_cached: Tensor,
        v_cached: Tensor,
        seeds: Tensor,
        lengths: Tensor | None,
        positions: Tensor | None,
        shift: int,
        scale: float,
        recompute_below: float,
    ) -> None:
        self.call(
            "diagonal_correction",
            q,
            None,
            view(out),
            view(lse),
            view(q),
            view(k),
            view(v),
            view(k_cached),
            view(v_cached),
            view(seeds),
            optional_view(lengths),
            optional_view(positions),
            shift,
            scale,
            recompute_below,
        )


class CpuKernels(Kernels):
    def cover_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_cached: Tensor,
        v_cached: Tensor,
        seeds: Tensor,
        lengths: Tensor | None,
        shift: int,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """torch's attention over the keys that all queries see, some heads at a time; then the rows that
        predict a seed anew, as differences would lose digits. The reference's where torch's hands out no
        log-sum-exp."""
        arguments = (q, k, v, k_cached, v_cached, seeds, lengths, shift, scale)
        if q.numel() == 0:
            return reference.cover_attention(*arguments)
        beyond = None
        if lengths is not None and bool((lengths < k.shape[2]).any()):
            beyond = torch.arange(k.shape[2]) >= lengths[:, None]
        key_mask = None if beyond is None else ~beyond[:, None, None, :]
        rows = seeds.nonzero(as_tuple=True)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = torch.empty(q.shape[:3], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
        heads = max(1, HEADS_BYTES * torch.get_num_threads() // k[:, :1].nbytes)
        group = q.shape[1] // k.shape[1]
        for some_q, some_out, some_lse, some_k, some_v, some_k_cached, some_v_cached in zip(
            *(x.split(heads * group, dim=1) for x in (q, out, lse)),
            *(x.split(heads, dim=1) for x in (k, v, k_cached, v_cached)),
            strict=True,
        ):
            keys = _seen_by_all(some_k, some_k_cached, rows, beyond)
            values = _seen_by_all(some_v, some_v_cached, rows, beyond)
            attended, sums = attention_with_lse(some_q, keys, values, key_mask, scale)
            if sums is None:
                return reference.cover_attention(*arguments)
            some_out.copy_(attended)
            some_lse.copy_(sums)
        if beyond is not None:
            nothing = beyond[:, 0]
            out[nothing], lse[nothing] = 0.0, -torch.inf
        self.diagonal_correction(
            out, lse, q, k, v, k_cached, v_cached, seeds, lengths, None, shift, scale, math.inf
        )
        return out, lse


def _seen_by_all(fresh: Tensor, cached: Tensor, rows: tuple[Tensor, ...], beyond: Tensor | None) -> Tensor:
    """Keys or values `[B, H, L, d]`, of seeds (`rows`) from the cache, and zeros `beyond` the lengths."""
    batch, place = rows
    if beyond is None and len(place) == 0:
        return fresh
    seen = fresh.clone()
    seen[batch, :, place] = cached[batch, :, place]
    if beyond is not None:
        seen.masked_fill_(beyond[:, None, :, None], 0.0)  # a NaN would spread whatever its weight
    return seen


class CudaKernels(Kernels):
    def call(self, op: str, tensor: Tensor, sizes: tuple[int, ...] | None, *args: Any) -> None:
        if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
            with torch.cuda.device(tensor.device):
                self.launch(op, tensor, sizes, *args)
        else:
            self.launch(op, tensor, sizes, *args)

    def launch(self, op: str, tensor: Tensor, sizes: tuple[int, ...] | None, *args: Any) -> None:
        stream = torch.cuda.current_stream().cuda_stream if tensor.is_cuda else 0
        function: Callable[..., None] = getattr(self.module, self.prefix + op)
        if sizes is None:
            function(*args, stream)
            return
        size = getattr(self.module, f"{self.prefix}{op}_workspace")(*sizes)
        workspace = torch.empty(size + ALIGNMENT if size else 0, dtype=torch.uint8, device=tensor.device)
        aligned = -(-workspace.data_ptr() // ALIGNMENT) * ALIGNMENT
        function(*args, aligned, size, stream)


def load(backend: str, op: str, device: str) -> Callable[..., Any]:
    """The compiled kernel of `op` for tensors on `device`; ImportError says why there is none."""
    emulated = os.environ.get("DLMKERN_EMULATED_MODULE")
    if backend == "cuda" and device == "cpu" and emulated:
        kernels: Kernels = CudaKernels(_emulated(emulated), "cuda_")
    elif device != backend:
        raise ImportError(f"the tensors are on {device!r}")
    elif backend == "cpu":
        kernels = CpuKernels(_compiled(), "cpu_")
    else:
        kernels = CudaKernels(_compiled(), "cuda_")
        if not kernels.module.has_cuda():
            raise ImportError("this build of dlmkern has no CUDA kernels")
    built_on = "diagonal_correction" if op == "cover_attention" else op
    if not (hasattr(kernels, op) and hasattr(kernels.module, kernels.prefix + built_on)):
        raise ImportError("it has no such kernel")
    return getattr(kernels, op)  # type: ignore[no-any-return]


def _compiled() -> ModuleType:
    return importlib.import_module("dlmkern._C")


def _emulated(path: str) -> ModuleType:
    """The CUDA kernels compiled for the host, which tests use on machines without a GPU."""
    name = "dlmkern_emulated"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"DLMKERN_EMULATED_MODULE={path} is not an extension module")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]
