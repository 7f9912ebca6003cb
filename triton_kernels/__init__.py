"""Triton kernels, one file an op; import them as ``dlmkern.triton_kernels``.

Each file has a ``plan`` (outputs and kernel launches, nothing run yet) and a function named as the op, which runs its plan.
``TRITON_INTERPRET=1``, set before the first import, runs the same kernels on CPU tensors. There is no ``topk_snapshot``,
``topk_kl`` or ``depga_block`` here: a top-64 scan and a sort of at most 128 numbers do not pay in Triton.
"""
