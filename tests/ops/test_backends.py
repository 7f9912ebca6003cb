"""The choice of a backend, its errors, and what an import costs."""

import os
import subprocess
import sys
import threading

import pytest
import torch

import dlmkern
from dlmkern.backends import registry, table


def served_by(device: str = "cpu", dtype: torch.dtype = torch.float32, op: str = "token_stats") -> str:
    module = registry.resolve(op, torch.device(device), dtype).__module__
    return {"dlmkern.backends.native": "native"}.get(module, module.split(".")[1])


NOT_COMPILED = ("block_attention",)


def test_auto_takes_the_compiled_kernels() -> None:
    for op in registry.OPS:
        expected = "reference" if op in NOT_COMPILED else "native"
        with dlmkern.use_backend("auto"):
            assert served_by(op=op) == expected
            assert served_by(op=op, dtype=torch.float64) == expected


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


def test_a_named_backend_fails_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DLMKERN_EMULATED_MODULE", raising=False)
    registry._resolve.cache_clear()
    x = torch.zeros(2, 3)
    for name, message in (
        ("cuda", "token_stats: backend 'cuda' is not available: the tensors are on 'cpu'"),
        ("triton", "token_stats: backend 'triton' is not available: .*INTERPRET=1"),
    ):
        with dlmkern.use_backend(name), pytest.raises(dlmkern.BackendUnavailableError, match=message):
            dlmkern.token_stats(x)
    with dlmkern.use_backend("triton"), pytest.raises(dlmkern.BackendUnavailableError, match="not float64"):
        dlmkern.token_stats(x.double())
    registry._resolve.cache_clear()
    with dlmkern.use_backend("cpu"), pytest.raises(dlmkern.BackendUnavailableError, match="are on 'cuda'"):
        registry.resolve("token_stats", torch.device("cuda"), torch.float32)
    with (
        pytest.raises(ValueError, match=r"use_backend: expected one of auto, reference, cpu.* got 'gpu'"),
        dlmkern.use_backend("gpu"),
    ):
        dlmkern.token_stats(x)


def test_an_unknown_default_is_refused_at_its_first_use() -> None:
    with pytest.raises(ValueError, match=r"DLMKERN_BACKEND: expected one of auto, reference.* got 'fast'"):
        registry._resolve("fast", "topk_kl", "cpu", torch.int64)


def test_table_has_a_reason_for_every_gap() -> None:
    found = table()
    assert list(found) == list(registry.OPS)
    for op, row in found.items():
        assert list(row) == list(registry.BACKENDS)
        assert row["reference"] == "yes"
        assert row["cpu"] == ("it has no such kernel" if op in NOT_COMPILED else "yes")
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


def test_import_is_light_and_the_environment_sets_the_default() -> None:
    script = (
        "import sys, time, torch\n"
        "before, modules = time.process_time(), set(sys.modules)\n"
        "import dlmkern\n"
        "seconds = time.process_time() - before\n"
        "heavy = {'transformers', 'triton', 'safetensors', 'jax'} & (set(sys.modules) - modules)\n"
        "from dlmkern.backends import registry\n"
        "backend = registry.resolve('topk_kl', torch.device('cpu'), torch.int64).__module__\n"
        "print(len(heavy), torch.cuda.is_initialized(), backend, seconds)\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("DLMKERN_", "TRITON_"))}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment | {"DLMKERN_BACKEND": "reference"},
        capture_output=True,
        text=True,
        check=False,
    )
    heavy, initialised, backend, seconds = done.stdout.split()
    assert heavy == "0", done.stderr
    assert initialised == "False"
    assert backend == "dlmkern.reference.topk_kl"
    assert float(seconds) < 0.3


def test_every_public_name_exists() -> None:
    for name in dlmkern.__all__:
        assert getattr(dlmkern, name) is not None
        assert name in dir(dlmkern)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        dlmkern.nothing  # noqa: B018
