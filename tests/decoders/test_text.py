"""Text prompts."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedTokenizerFast

import dlmkern
from dlmkern.generation import GenerationOutput
from tests.decoders.support import HashModel, same

tokenizers = pytest.importorskip("tokenizers")

WORDS = ["<unk>", "<s>", "</s>", "<user>", "<assistant>", "one", "two", "three", "<mask>"]
TEMPLATE = (
    "{% for message in messages %}<s> <user> {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """Words by spaces; `<s>` is put before a text, but not before a chat, whose template does that."""
    core = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    core.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", WORDS.index("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", mask_token="<mask>", chat_template=TEMPLATE
    )


def prompts(output: GenerationOutput) -> list[list[str]]:
    return [[WORDS[token] for token in row[:-4]] for row in output.sequences]


def generate(
    text: str | list[str], tokenizer: PreTrainedTokenizerFast, chat_template: bool
) -> GenerationOutput:
    return dlmkern.generate(
        HashModel(len(WORDS)),
        text,
        "threshold",
        4,
        mask_token_id=WORDS.index("<mask>"),
        tokenizer=tokenizer,
        chat_template=chat_template,
    )


def test_text(tokenizer: PreTrainedTokenizerFast) -> None:
    assert prompts(generate("one two", tokenizer, False)) == [["<s>", "one", "two"]]
    both = generate(["one two", "three"], tokenizer, False)
    assert prompts(both) == [["<s>", "one", "two"], ["<s>", "three"]]
    assert same(both, generate("three", tokenizer, False), 1, 0)


def test_chat_template(tokenizer: PreTrainedTokenizerFast) -> None:
    out = generate(["one", "two three"], tokenizer, True)
    assert prompts(out) == [
        ["<s>", "<user>", "one", "<assistant>"],
        ["<s>", "<user>", "two", "three", "<assistant>"],
    ]


def test_a_mask_in_a_text(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="row 0: the prompt holds the mask token 8 at position 2"):
        generate("one <mask>", tokenizer, False)


def test_tokens_are_int64(tokenizer: PreTrainedTokenizerFast) -> None:
    assert generate("one", tokenizer, False).sequences[0].dtype == torch.int64
