"""A guard around torch.from_dlpack, which aborts the process on negative strides.

The structures are those of the DLPack standard, https://dmlc.github.io/dlpack/latest/c_api.html.
"""

import ctypes
from typing import Any

from torch import Tensor
from torch.utils.dlpack import from_dlpack


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype_code", ctypes.c_uint8),
        ("dtype_bits", ctypes.c_uint8),
        ("dtype_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    )


_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.argtypes, _is_valid.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_int
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.argtypes, _pointer.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p


_READ_ONLY, _COPIED = 1, 2  # flags


def to_tensor(array: Any, shared: bool = False) -> Tensor:
    """``torch.from_dlpack(array)``, or ValueError if a stride is negative.

    With `shared`, also ValueError unless the array says that its own memory is handed out and may be written.
    """
    return from_dlpack(_Checked(array, shared))


class _Checked:
    def __init__(self, array: Any, shared: bool) -> None:
        self.array = array
        self.shared = shared

    def __dlpack__(self, **arguments: Any) -> Any:
        capsule = self.array.__dlpack__(**arguments)
        if _is_valid(capsule, b"dltensor_versioned"):
            address = _pointer(capsule, b"dltensor_versioned")
            managed = _DLManagedTensorVersioned.from_address(address)
            tensor = managed.tensor
            if self.shared and managed.flags & (_READ_ONLY | _COPIED):
                raise ValueError("it is a copy" if managed.flags & _COPIED else "it is read-only")
        elif _is_valid(capsule, b"dltensor") and self.shared:
            raise ValueError("its __dlpack__ is of a version that cannot say whether it may be written")
        elif _is_valid(capsule, b"dltensor"):
            tensor = _DLTensor.from_address(
                _pointer(capsule, b"dltensor")
            )  # the managed tensor's first field
        else:
            raise TypeError("its __dlpack__ gave no DLPack capsule")
        if tensor.strides and any(tensor.strides[i] < 0 for i in range(tensor.ndim)):
            raise ValueError("its strides are negative; pass a copy")
        return capsule

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()
