"""The choice of a backend, its errors, and what an import costs."""

import os
import subprocess
import sys
import threading

import pytest
import torch

import dlmkern
from dlmkern.backends import registry, table


def run_python(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("DLMKERN_", "TRITON_", "PYTEST_"))}
    return subprocess.run(
        [sys.executable, "-c", script], env=kept | environment, capture_output=True, text=True, check=False
    )


def served_by(device: str = "cpu", dtype: torch.dtype = torch.float32, op: str = "token_stats") -> str:
    module = registry.resolve(op, torch.device(device), dtype).__module__
    return {"dlmkern.backends.native": "native"}.get(module, module.split(".")[1])


def test_auto_takes_the_compiled_kernels() -> None:
    for op in registry.OPS:
        with dlmkern.use_backend("auto"):
            assert served_by(op=op) == "native"
            assert served_by(op=op, dtype=torch.float64) == "native"


def test_auto_falls_back_in_silence() -> None:
    with dlmkern.use_backend("auto"):
        assert served_by("mps") == "reference"
        if not torch.cuda.is_available():
            assert served_by("cuda") in ("reference", "triton_kernels")


def test_blocks_nest_and_end_with_exceptions() -> None:
    with dlmkern.use_backend("cpu"):
        with dlmkern.use_backend("reference"):
            assert served_by() == "reference"
        assert served_by() == "native"
        with pytest.raises(KeyError), dlmkern.use_backend("reference"):
            raise KeyError
        assert served_by() == "native"


def test_threads_choose_for_themselves() -> None:
    seen = []
    with dlmkern.use_backend("reference"):
        thread = threading.Thread(target=lambda: seen.append(served_by()))
        thread.start()
        thread.join()
        assert served_by() == "reference"
    with dlmkern.use_backend(registry.DEFAULT):
        assert seen == [served_by()]


def test_a_named_backend_fails_loudly() -> None:
    x = torch.zeros(2, 3)
    script = (
        "import torch, dlmkern\n"
        "for name in ('cuda', 'triton'):\n"
        "    with dlmkern.use_backend(name):\n"
        "        try: dlmkern.token_stats(torch.zeros(2, 3))\n"
        "        except dlmkern.BackendUnavailableError as error: print(error)\n"
    )
    lines = run_python(script).stdout.splitlines()
    assert lines[0] == "token_stats: backend 'cuda' is not available: the tensors are on 'cpu'"
    assert lines[1].startswith("token_stats: backend 'triton' is not available: ")
    with (
        dlmkern.use_backend("cpu"),
        pytest.raises(dlmkern.BackendUnavailableError, match="'cpu' is not available"),
    ):
        registry.resolve("token_stats", torch.device("cuda"), torch.float32)
    with (
        pytest.raises(ValueError, match="use_backend: expected one of auto, reference, cpu"),
        dlmkern.use_backend("gpu"),
    ):
        dlmkern.token_stats(x)


def test_the_environment_sets_the_default() -> None:
    script = (
        "import torch\n"
        "from dlmkern.backends import registry\n"
        "print(registry.resolve('topk_kl', torch.device('cpu'), torch.int64).__module__)\n"
    )
    assert run_python(script, DLMKERN_BACKEND="reference").stdout.strip() == "dlmkern.reference.topk_kl"
    first_use = "import torch, dlmkern; dlmkern.token_stats(torch.zeros(2, 3))"
    refused = run_python(first_use, DLMKERN_BACKEND="fast")
    assert "DLMKERN_BACKEND: expected one of auto, reference, cpu, cuda, triton, got 'fast'" in refused.stderr
    missing = run_python(
        "import dlmkern.ops._dlpack", DLMKERN_EMULATED_MODULE="/nowhere.so", DLMKERN_BACKEND="cuda"
    )
    assert missing.returncode == 0  # a backend is looked for when it is used


def test_table_has_a_reason_for_every_gap() -> None:
    found = table()
    assert list(found) == list(registry.OPS)
    for row in found.values():
        assert list(row) == list(registry.BACKENDS)
        assert row["reference"] == row["cpu"] == "yes"
        assert all(reason for reason in row.values())
        if not torch.cuda.is_available():
            assert row["cuda"] == "no CUDA device"


def test_compiled_code_follows_the_choice_of_the_moment() -> None:
    from dlmkern.backends import native

    calls = []
    compiled = torch.compile(lambda x: dlmkern.token_stats(x).token, fullgraph=True, backend="aot_eager")
    original = native.Kernels.call

    def counted(self: native.Kernels, op: str, *arguments: object) -> None:
        calls.append(op)
        original(self, op, *arguments)

    x = torch.zeros(2, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native.Kernels, "call", counted)
        with dlmkern.use_backend("cpu"):
            compiled(x)
        assert calls == ["token_stats"]
        with dlmkern.use_backend("reference"):
            compiled(x)
        assert calls == ["token_stats"]
        with dlmkern.use_backend("cpu"):
            compiled(x)
        assert calls == ["token_stats"] * 2


def test_import_is_light() -> None:
    script = (
        "import sys, time, torch\n"
        "before, modules = time.process_time(), set(sys.modules)\n"
        "import dlmkern\n"
        "seconds = time.process_time() - before\n"
        "heavy = {'transformers', 'triton', 'safetensors', 'jax'} & (set(sys.modules) - modules)\n"
        "print(sorted(heavy), torch.cuda.is_initialized(), seconds)\n"
    )
    done = run_python(script)
    heavy, initialised, seconds = done.stdout.rsplit(" ", 2)
    assert heavy == "[]", done.stderr
    assert initialised == "False"
    assert float(seconds) < 0.3


def test_every_public_name_exists() -> None:
    for name in dlmkern.__all__:
        assert getattr(dlmkern, name) is not None
        assert name in dir(dlmkern)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        dlmkern.nothing  # noqa: B018
