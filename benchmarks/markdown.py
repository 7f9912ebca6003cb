"""Tables that can be pasted into a page."""

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """A table in Markdown; the first `left` columns are aligned to the left, the others to the right."""
    rule = ["---" if column < left else "--:" for column in range(len(header))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *rows))
