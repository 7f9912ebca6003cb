"""The functions of the official codes, under their names and with their arguments: replace one import.

`llada.generate` (LLaDA), `fast_dllm.generate`, `generate_with_prefix_cache`, `generate_with_dual_cache`,
`get_transfer_index`, `get_transfer_index_dynamic` (Fast-dLLM) and `dream.diffusion_generate` (Dream and
Fast-dLLM). New code has more from `dlmkern.generate`.

What the functions that generate have in common:

- Batches. Rows are decoded as if each were alone. Where `attention_mask` is 0 there is padding, to the left
  or to the right; a row is decoded without its padding, which is back in its place in the result. Without an
  `attention_mask` every token is part of the prompt.
- Models. Those of `dlmkern.models`, or any callable `ids [B, L] -> logits` (a tensor, or an object with the
  attribute `logits`), such as a model of transformers. Caches need the former.
- `compat="official"` reproduces what the official codes do otherwise than their papers where that is harmless
  (see `decoders.Decoder`). Their failures are not reproduced: no mask is ever left.
- `seed`, as in `dlmkern.generate`. None: torch's global generator decides.
"""

from dlmkern.drop_in import dream, fast_dllm, llada

__all__ = ["dream", "fast_dllm", "llada"]
