"""One forward pass: the logits of each row's window of positions, whatever the model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Model = Callable[..., Any]


class Forward:
    """Runs a model on rows of different lengths.

    A model whose forward takes `lengths` and `positions`, as those of `dlmkern.models` do, gets all rows in
    one call and computes no other logits than those wanted. Any other callable `ids [B, L] -> logits [B, L,
    V]` (a tensor, or an object with the attribute `logits`) cannot be told about padding: rows of the same
    length share a call.

    Args:
        model: the model.
        mask_token_id: the mask, for guidance.
        vocab_size: the least number of logits that the model must return, or None.
        cfg_scale: see `Decoder`.
    """

    def __init__(self, model: Model, mask_token_id: int, vocab_size: int | None, cfg_scale: float) -> None:
        self.model = model
        self.mask_token_id = mask_token_id
        self.vocab_size = vocab_size
        self.cfg_scale = cfg_scale
        self.takes_windows = _takes_windows(model)

    def __call__(
        self,
        ids: Tensor,
        positions: Tensor,
        prompt_length: Tensor,
        end: Tensor,
        starts: Sequence[int],
        lengths: Sequence[int],
    ) -> Tensor:
        """Logits `[B, W, V]` at `positions`.

        Args:
            ids: int64 `[B, L]`.
            positions: int64 `[B, W]`, in each row `start, start + 1, ...`, then its last position repeated.
            prompt_length, end: int64 `[B]`: where the prompts end, and the rows.
            starts, lengths: `positions[:, 0]` and `end`, on the host.

        Raises:
            TypeError, ValueError: what the model returned is not logits of the right shape.
        """
        # A copy that is contiguous, and with which the model may do what it wants.
        ids = ids.clone(memory_format=torch.contiguous_format)
        if self.cfg_scale == 0:
            return self._windows(ids, positions, end, starts, lengths)
        shown = torch.arange(ids.shape[1], device=ids.device) < prompt_length.unsqueeze(1)
        both = torch.cat((ids, torch.where(shown, self.mask_token_id, ids)))
        logits = self._windows(
            both, positions.repeat(2, 1), end.repeat(2), [*starts, *starts], [*lengths, *lengths]
        )
        conditional, unconditional = logits.chunk(2)
        return torch.lerp(unconditional, conditional, self.cfg_scale + 1)

    def _windows(
        self, ids: Tensor, positions: Tensor, end: Tensor, starts: Sequence[int], lengths: Sequence[int]
    ) -> Tensor:
        if self.takes_windows:
            padded = min(lengths) < max(lengths)
            output = self.model(ids, lengths=end if padded else None, positions=positions)
            return self._check(output, positions.shape, ids.device)
        if min(lengths) == max(lengths):
            return self._window_of_equals(ids, positions, starts)
        windows: Tensor | None = None
        for length in sorted(set(lengths)):
            rows = [row for row, other in enumerate(lengths) if other == length]
            index = torch.tensor(rows, device=ids.device)
            part = self._window_of_equals(
                ids[index, :length], positions[index], [starts[row] for row in rows]
            )
            if windows is None:
                windows = part.new_empty((len(lengths), *part.shape[1:]))
            windows[index] = part
        assert windows is not None
        return windows

    def _window_of_equals(self, ids: Tensor, positions: Tensor, starts: Sequence[int]) -> Tensor:
        """Windows of rows of the same length: a view if they are at the same place and end in the row."""
        logits = self._check(self.model(ids), ids.shape, ids.device)
        width = positions.shape[1]
        if min(starts) == max(starts) and starts[0] + width <= ids.shape[1]:
            return logits[:, starts[0] : starts[0] + width]
        rows = torch.arange(ids.shape[0], device=ids.device).unsqueeze(1)
        return logits[rows, positions]

    def _check(self, output: Any, shape: torch.Size, device: torch.device) -> Tensor:
        logits = getattr(output, "logits", output)
        if not isinstance(logits, Tensor) or not logits.is_floating_point():
            got = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
            raise TypeError(f"model must return floating-point logits, got {got}")
        if logits.layout is not torch.strided or logits.device != device:
            raise ValueError(
                f"model must return dense logits on {device}, got layout {logits.layout} on {logits.device}"
            )
        if logits.dim() != 3 or logits.shape[:2] != shape:
            raise ValueError(
                f"model must return logits of shape [{shape[0]}, {shape[1]}, V], got {list(logits.shape)}"
            )
        least = self.vocab_size or 1
        if logits.shape[-1] < least:
            raise ValueError(
                f"model returned {logits.shape[-1]} logits a position, fewer than vocab_size = {least}"
            )
        return logits


def _takes_windows(model: Model) -> bool:
    try:
        parameters = inspect.signature(model.forward if isinstance(model, nn.Module) else model).parameters
    except (TypeError, ValueError):  # builtins without a signature
        return False
    return {"lengths", "positions"} <= parameters.keys()
