"""What people are shown: the comparison and the steps hold the same facts as the output."""

from io import StringIO

from rich.console import Console
from rich.table import Table

import dlmkern
from dlmkern import decoders, models
from dlmkern.models import chains4
from dlmkern.report import STYLES, compare, comparison_table, steps_table

PROMPTS = chains4.prompts(4, seed=3)


def lines(table: Table) -> list[str]:
    file = StringIO()
    Console(file=file, width=200).print(table)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_comparison() -> None:
    model = models.tiny()
    named = {"mine": decoders.depcap()}
    (result,) = compare(model, PROMPTS.tolist(), named, 40, valid=lambda _, answer: answer[0] == 0)
    expected = dlmkern.generate(model, PROMPTS, decoders.depcap(), 40)
    assert result.tokens.tolist() == expected.tokens.tolist()
    assert result.answers == 4
    assert result.valid == int((expected.tokens[:, 0] == 0).sum())
    assert result.nfe == expected.nfe.double().mean()
    assert result.tokens_per_forward == 40 / result.nfe
    cells = lines(comparison_table([result]))[1].split()
    assert cells[:5] == ["mine", str(result.valid), "of", "4", f"{result.nfe:.1f}"]


def test_steps_show_when_each_token_was_committed_and_why() -> None:
    model = models.tiny()
    output = dlmkern.generate(model, PROMPTS[:1], "depcap", 40)
    stream = dlmkern.generate_stream(model, PROMPTS[:1], "depcap", 40)
    header, *steps = lines(steps_table(stream, 40, lambda token: chr(ord("a") + token)))
    assert header.split()[:3] == ["forward", "block", "answer"]
    assert len(steps) == output.nfe[0]
    tokens, step_map = output.tokens[0].tolist(), output.step_map[0].tolist()
    for forward, line in enumerate(steps):
        number, block, answer, reasons = line.split(maxsplit=3)
        assert int(number) == forward
        shown = answer.replace("[", "").replace("]", "")
        known = [chr(ord("a") + t) if s <= forward else "_" for t, s in zip(tokens, step_map, strict=True)]
        assert shown == "".join(known)
        first, last = map(int, block.split("-"))
        assert answer.index("[") == first
        assert answer.index("]") == last + 2
        for position in (p for p, s in enumerate(step_map) if s == forward):
            name = decoders.Reason(output.reason[0, position].item()).name.lower().replace("_", " ")
            group = next(part for part in reasons.split(", ") if part.startswith(name))
            assert str(position) in group.split()


def test_every_reason_can_be_shown() -> None:
    assert set(STYLES) == set(decoders.Reason)
