"""Decoding on a GPU gives the answers of the CPU."""

import pytest
import torch

import dlmkern
from dlmkern import decoders, models
from dlmkern.models import chains4

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DECODERS = {
    "vanilla": decoders.vanilla(),
    "threshold": decoders.threshold(),
    "threshold, prefix cache": decoders.threshold(block_length=10, cache="prefix"),
    "threshold, dual cache": decoders.threshold(block_length=10, cache="dual"),
    "dual cache, refreshed": decoders.threshold(block_length=20, cache=decoders.DualCache(refresh=3)),
    "factor": decoders.factor(0.75),
    "dream": decoders.dream(block_length=20, cache="dual"),
    "depcap, dual cache": decoders.depcap(cache="dual"),
    "dapd": decoders.dapd(tau_min=0.01, tau_max=0.2),
    "dapd, dual cache": decoders.dapd("direct", block_length=20, cache="dual"),
    "depcap": decoders.depcap(),
    "depcap, top-k": decoders.depcap(kl="topk"),
}


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("named", ["auto", "cuda", "reference"])
def test_the_gpu_decodes_like_the_cpu(name: str, named: str) -> None:
    prompts = chains4.prompts(8, seed=5)
    expected = dlmkern.generate(models.tiny("float64"), prompts, DECODERS[name], 40)
    with dlmkern.use_backend(named):
        output = dlmkern.generate(models.tiny("float64", "cuda"), prompts, DECODERS[name], 40)
    for field in ("tokens", "nfe", "step_map", "reason"):
        assert torch.equal(getattr(output, field).cpu(), getattr(expected, field)), field
    assert output.block_lengths == expected.block_lengths
    torch.testing.assert_close(output.confidence.cpu(), expected.confidence, rtol=1e-6, atol=1e-9)
