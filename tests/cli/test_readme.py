"""README.md tells the truth: its table is up to date and its Python runs."""

import re
from pathlib import Path

import pytest

from docs import op_table

TEXT = op_table.README.read_text()


def test_the_table_of_ops_is_up_to_date() -> None:
    assert op_table.BEGIN in TEXT
    assert op_table.updated(TEXT) == TEXT, "run make readme"


def test_the_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", TEXT):
        assert (op_table.ROOT / target).exists(), target


def test_the_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL):
        exec(compile(block, str(Path("README.md")), "exec"), names)
    assert "forward passes for 40 tokens" in capsys.readouterr().out
    assert type(names["selected"]).__module__ == "numpy"
