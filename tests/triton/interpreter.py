"""Makes Triton's interpreter two to three times faster."""

from typing import Any

from triton.runtime import interpreter

_patched: set[int] = set()


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A kernel's call of another function, tl.max say.

    Before each such call Triton patches the language modules that the function sees, and leaves them so: once
    for every module that calls is enough.
    """
    module = id(self.fn.__globals__)
    if module not in _patched:
        interpreter._patch_lang(self.fn)
        _patched.add(module)
    return self.rewrite()(*args, **kwargs)


def speed_up() -> None:
    interpreter.InterpretedFunction.__call__ = _call
