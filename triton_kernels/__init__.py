"""Triton kernels, one file an op; import them as ``dlmkern.triton_kernels``.

Each file has a ``plan``, the outputs and the kernel launches that fill them, and a function named as the op,
which runs its plan. ``TRITON_INTERPRET=1``, set before the first import, runs the kernels on CPU tensors.

There is no ``topk_snapshot``, ``topk_kl`` or ``depga_block`` here: a top-64 scan and a sort of at most 128
numbers do not pay in Triton.
"""
