"""Graphs fed from transformers' own models, against their eager attention maps."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    PreTrainedModel,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dlmkern.graph import AttentionGraph
from dlmkern.models import tiny, transformers_graph
from dlmkern.models.transformers_graph import feeding, supports_graph
from tests.models.support import ids

pytestmark = pytest.mark.usefixtures("no_grad")
SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
}


def bert(implementation: str = "sdpa", **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = BertConfig(**{**SIZES, "initializer_range": 0.5, **changes})
    config._attn_implementation = implementation
    return BertForMaskedLM(config).eval()


def llama(implementation: str = "sdpa", **changes: Any) -> PreTrainedModel:
    """Grouped heads and an unusual scale; causal unless told otherwise."""
    torch.manual_seed(0)
    config = LlamaConfig(**{**SIZES, "num_key_value_heads": 2, "initializer_range": 0.5, **changes})
    config._attn_implementation = implementation
    model = LlamaForCausalLM(config).eval()
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.2
    return model


def modernbert(implementation: str = "sdpa") -> PreTrainedModel:
    """Every second layer sees a window of 9 positions."""
    torch.manual_seed(0)
    config = ModernBertConfig(
        **{
            **SIZES,
            "pad_token_id": 0,
            "cls_token_id": 1,
            "sep_token_id": 2,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        global_attn_every_n_layers=2,
        local_attention=8,
    )
    config._attn_implementation = implementation
    return ModernBertForMaskedLM(config).eval()


def expected_scores(
    model: Callable[..., PreTrainedModel], positions: Tensor, *layers: int, **options: Any
) -> Tensor:
    """From the maps of the same weights with eager attention."""
    attentions = model("eager")(**options, output_attentions=True).attentions
    mean = torch.stack([attentions[layer] for layer in layers]).mean((0, 2))
    place = positions.clamp(min=0)
    scores = mean[torch.arange(len(place))[:, None, None], place[:, :, None], place[:, None, :]]
    real = positions >= 0
    return scores.where(real[:, :, None] & real[:, None, :], 0.0)


def assert_close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-6)


POSITIONS = torch.tensor([[4, 2, -1, 6], [3, 0, 5, 4]])


def test_a_bidirectional_encoder() -> None:
    model, graph = bert(), AttentionGraph(POSITIONS)
    assert supports_graph(model)
    plain = model(ids(2, 9)).logits
    with feeding(model, graph):
        logits = model(ids(2, 9)).logits
    assert torch.equal(logits, plain)
    assert_close(graph.scores(), expected_scores(bert, POSITIONS, 2, 3, input_ids=ids(2, 9)))


@pytest.mark.parametrize(
    "mask",
    [
        [[1, 1, 1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1, 1]],
        [[0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 1, 1, 1, 1, 0]],
    ],
    ids=["right", "anywhere"],
)
def test_padding(mask: list[list[int]]) -> None:
    model, graph = bert(), AttentionGraph(POSITIONS)
    options = {"input_ids": ids(2, 9), "attention_mask": torch.tensor(mask)}
    plain = model(**options).logits
    with feeding(model, graph):
        assert torch.equal(model(**options).logits, plain)
    real = options["attention_mask"].gather(1, POSITIONS.clamp(min=0)).bool()
    expected = expected_scores(bert, POSITIONS.where(real, -1), 2, 3, **options)
    assert_close(graph.scores(), expected)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_masks_of_four_dimensions(dtype: torch.dtype) -> None:
    """One mask for all rows, of the kinds that SDPA takes."""
    seen = torch.arange(9) < 7
    mask = seen.expand(1, 1, 9, 9)
    if dtype != torch.bool:
        mask = torch.where(mask, 0.0, torch.finfo(dtype).min)
    model, graph = bert(), AttentionGraph(POSITIONS)
    with feeding(model, graph):
        model(ids(2, 9), attention_mask=mask)
    padding = seen.long().repeat(2, 1)
    assert_close(
        graph.scores(), expected_scores(bert, POSITIONS, 2, 3, input_ids=ids(2, 9), attention_mask=padding)
    )


@pytest.mark.parametrize("masked", [False, True])
def test_grouped_heads(masked: bool) -> None:
    """A decoder that was made bidirectional, by its settings or by a mask."""
    model, graph = llama(is_causal=masked), AttentionGraph(POSITIONS, [0, 3])
    for layer in model.model.layers:
        layer.self_attn.is_causal = masked
    with feeding(model, graph):
        model(ids(2, 9), attention_mask=torch.ones(2, 1, 9, 9, dtype=torch.bool) if masked else None)
    options = {"input_ids": ids(2, 9), "attention_mask": torch.zeros(2, 1, 9, 9)}
    assert_close(graph.scores(), expected_scores(llama, POSITIONS, 0, 3, **options))


@pytest.mark.parametrize("mask", [None, [[1] * 9, [0] * 2 + [1] * 7]])
def test_causal_attention(mask: list[list[int]] | None) -> None:
    model = llama()
    options = {} if mask is None else {"attention_mask": torch.tensor(mask)}
    plain = model(ids(2, 9), **options).logits
    with (
        pytest.raises(ValueError, match=r"LlamaForCausalLM has causal attention: .* bidirectional attention"),
        feeding(model, AttentionGraph(POSITIONS)),
    ):
        model(ids(2, 9), **options)
    assert torch.equal(model(ids(2, 9), **options).logits, plain)


def test_causal_attention_of_an_encoder() -> None:
    model = bert(is_decoder=True)
    with (
        pytest.raises(ValueError, match="BertForMaskedLM has causal attention"),
        feeding(model, AttentionGraph(POSITIONS)),
    ):
        model(ids(2, 9), use_cache=False)


def test_local_attention() -> None:
    """Refused only in the layers that the graph is of, and only where the window is shorter than the row."""
    model, long = modernbert(), ids(2, 20)
    for padding in (None, torch.arange(20) < torch.tensor([[20], [17]])):
        graph = AttentionGraph(POSITIONS, [0, 2])
        with feeding(model, graph):
            model(long, attention_mask=padding)
        expected = expected_scores(modernbert, POSITIONS, 0, 2, input_ids=long, attention_mask=padding)
        assert_close(graph.scores(), expected)
        with (
            pytest.raises(ValueError, match="ModernBertForMaskedLM had a window of 5 positions in layer 3"),
            feeding(model, AttentionGraph(POSITIONS, [3])),
        ):
            model(long, attention_mask=padding)
    short = AttentionGraph(POSITIONS[:, :2].clamp(max=3))
    with feeding(model, short):
        model(long[:, :4])
    assert_close(short.scores(), expected_scores(modernbert, short.positions, 2, 3, input_ids=long[:, :4]))


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.full((2, 1, 9, 9), -0.5), "a bias of the attention in layer 2"),
        (
            torch.arange(9).roll(4).expand(9, 9).triu().expand(2, 1, 9, 9) > 0,
            "that some queries or heads see",
        ),
        (torch.arange(36).view(1, 4, 1, 9).expand(2, 4, 9, 9) > 3, "that some queries or heads see"),
    ],
)
def test_masks_that_a_graph_cannot_represent(mask: Tensor, message: str) -> None:
    model = bert()
    for _ in range(2):  # also after a pass that was fine
        with (
            pytest.raises(ValueError, match=f"BertForMaskedLM had .*{message}"),
            feeding(model, AttentionGraph(POSITIONS)),
        ):
            model(ids(2, 9), attention_mask=mask)
        with feeding(model, AttentionGraph(POSITIONS)):
            model(ids(2, 9), attention_mask=torch.arange(9).expand(2, 9) < 8)


def test_a_position_bias() -> None:
    """An argument of attention functions, beside the mask."""
    model = bert()
    with (
        pytest.raises(ValueError, match="BertForMaskedLM had a bias of the attention in layer 2"),
        feeding(model, AttentionGraph(POSITIONS)),
    ):
        model(ids(2, 9), position_bias=torch.zeros(1, 1, 9, 9))


@pytest.mark.parametrize("name", ["softcap", "s_aux"])
def test_what_sdpa_leaves_out_does_not_count(name: str) -> None:
    model, graph = bert(), AttentionGraph(POSITIONS)
    with feeding(model, graph):
        logits = model(ids(2, 9), **{name: torch.ones(4)}).logits
    assert torch.equal(logits, model(ids(2, 9)).logits)
    assert_close(graph.scores(), expected_scores(bert, POSITIONS, 2, 3, input_ids=ids(2, 9)))


def test_the_setting_is_restored() -> None:
    model = bert()
    with feeding(model, AttentionGraph(POSITIONS)):
        assert model.config._attn_implementation != "sdpa"
        again = feeding(model, AttentionGraph(POSITIONS))
        with pytest.raises(ValueError, match="BertForMaskedLM feeds another attention graph already"):
            again.__enter__()
        model(ids(2, 9))
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(KeyError), feeding(model, AttentionGraph(POSITIONS)):
        raise KeyError
    assert model.config._attn_implementation == "sdpa"
    assert transformers_graph._feed.get() is None


def test_other_models_are_left_alone() -> None:
    """In the same context another model runs, and feeds nothing."""
    model, other, graph = bert(), bert(), AttentionGraph(POSITIONS)
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
    with feeding(model, graph):
        other(ids(2, 5))
        model(ids(2, 9))
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is plain
    assert_close(graph.scores(), expected_scores(bert, POSITIONS, 2, 3, input_ids=ids(2, 9)))


@pytest.mark.parametrize(("passes", "what"), [(0, "attention in 0 of 4 layers"), (2, "more attention than")])
def test_one_pass(passes: int, what: str) -> None:
    model = bert()

    def run() -> None:
        with feeding(model, AttentionGraph(POSITIONS)):
            for _ in range(passes):
                model(ids(2, 9))

    with pytest.raises(ValueError, match=f"BertForMaskedLM had {what}"):
        run()


def test_models_of_another_shape() -> None:
    """A second stack of layers, or attention that goes another way."""
    bart = BartForConditionalGeneration(
        BartConfig(
            vocab_size=50,
            d_model=8,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
        )
    )
    for model, message in (
        (bart, "BartForConditionalGeneration had more attention than its 2 layers have; .* no second stack"),
        (tiny(), "LLaDAModelLM had attention in 0 of 4 layers through transformers' interface"),
    ):
        with pytest.raises(ValueError, match=message), feeding(model, AttentionGraph(POSITIONS)):
            model(ids(2, 9) % 18)


def test_models_that_feed_nothing() -> None:
    class Own(PreTrainedModel):
        config_class = BertConfig

        @classmethod
        def _can_set_attn_implementation(cls) -> bool:
            return False

    for model, reason in (
        (bert("eager"), "attn_implementation is 'eager', not \"sdpa\""),
        (Own(BertConfig()), "does not go through transformers' attention interface"),
        (torch.nn.Linear(2, 2), "not a PreTrainedModel"),
        (print, "not a PreTrainedModel"),
    ):
        assert not supports_graph(model)
        with (
            pytest.raises(
                ValueError, match=f"{type(model).__name__} cannot feed an attention graph: .*{reason}"
            ),
            feeding(model, AttentionGraph(POSITIONS)),  # type: ignore[arg-type]
        ):
            pass
    with (
        pytest.raises(TypeError, match="graph must be an AttentionGraph, got Tensor"),
        feeding(bert(), POSITIONS),  # type: ignore[arg-type]
    ):
        pass


def add_maps(maps: Any, model: object) -> None:
    AttentionGraph(POSITIONS.clamp(max=0)).add_maps(maps, maps[0].shape[-1], model)


def test_attention_maps_are_checked_once_for_each_model() -> None:
    model, causal = bert("eager"), llama("eager")
    maps = model(ids(2, 9), output_attentions=True).attentions
    triangles = causal(ids(2, 9), output_attentions=True).attentions
    add_maps([attention[..., :1, :1] for attention in triangles], causal)  # says nothing
    for _ in range(2):
        with pytest.raises(ValueError, match="LlamaForCausalLM has causal attention"):
            add_maps(triangles, causal)
    add_maps(maps, model)
    add_maps(triangles, model)  # known by now
    with pytest.raises(ValueError, match="causal attention"):
        add_maps([maps[0], triangles[1]], causal)


def test_attention_maps_of_models_that_cannot_be_hashed_or_referenced() -> None:
    maps = bert("eager")(ids(2, 9), output_attentions=True).attentions

    class Unhashable(list[int]):
        pass

    for model, times in ((Unhashable(), 1), ((), 2)):
        looks = []

        class Map(Tensor):
            def triu(self, *args: Any, looks: list[int] = looks) -> Tensor:
                looks.append(1)
                return super().triu(*args)

        for _ in range(2):
            add_maps([maps[0].as_subclass(Map)], model)
        assert len(looks) == times


def test_threads_take_turns() -> None:
    """The setting that feeds a graph is the configuration's, which two models may share."""
    first = bert()
    second = type(first)(first.config).eval()
    models = [first, first, second]
    inputs = [ids(2, 9).roll(row, 1) for row in range(3)]
    expected = []
    for model, tokens in zip(models, inputs, strict=True):
        graph = AttentionGraph(POSITIONS)
        with feeding(model, graph):
            model(tokens)
        expected.append(graph.scores())

    def run(row: int) -> None:
        for _ in range(20):
            assert supports_graph(models[row])
            graph = AttentionGraph(POSITIONS)
            with feeding(models[row], graph):
                models[row](inputs[row])
            assert torch.equal(graph.scores(), expected[row])

    with ThreadPoolExecutor(3) as pool:
        for future in [pool.submit(run, row) for row in range(3)]:
            future.result()
    assert first.config._attn_implementation == "sdpa"
