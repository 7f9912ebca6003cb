"""Which code runs an op: the reference, the compiled CPU or CUDA kernels, or Triton."""

from dlmkern.backends.registry import BackendUnavailableError, table, use_backend

__all__ = ["BackendUnavailableError", "table", "use_backend"]
