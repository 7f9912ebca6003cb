"""Writes the table of ops in README.md, from the files that there are: ``python docs/op_table.py``."""

import inspect
import re
from pathlib import Path

import dlmkern
from dlmkern.backends.registry import OPS

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
BEGIN, END = "<!-- ops: written by docs/op_table.py -->\n", "<!-- end of ops -->"
LAYERS = {
    "reference": "dlmkern/reference/{}.py",
    "cpu": "csrc/cpu/{}.cpp",
    "cuda": "csrc/cuda/{}.cu",
    "triton": "triton_kernels/{}.py",
}
# Made of torch's attention and another op, without a kernel of its own.
COMPOSED = {("cover_attention", "cpu"): "dlmkern/backends/native.py"}


def table() -> str:
    lines = [f"| op | | {' | '.join(LAYERS)} |", "|---|---|" + ":-:|" * len(LAYERS)]
    for op in OPS:
        sentence = (inspect.getdoc(getattr(dlmkern, op)) or "").split("\n\n")[0].replace("\n", " ")
        cells = [f"[`{op}`](dlmkern/ops/{op}.py)", sentence.replace("|", "\\|")]
        for layer, place in LAYERS.items():
            file = COMPOSED.get((op, layer), place.format(op))
            cells.append(f"[yes]({file})" if (ROOT / file).exists() else "no")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def updated(text: str) -> str:
    """README's text with the table as it should be."""
    pattern = re.escape(BEGIN) + ".*?" + re.escape(END)
    return re.sub(pattern, lambda _: BEGIN + table() + END, text, flags=re.DOTALL)


if __name__ == "__main__":
    README.write_text(updated(README.read_text()))
