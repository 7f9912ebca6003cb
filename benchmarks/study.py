"""What the commands of the studies share: their options, and the files they write."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def count(text: str) -> int:
    """The type of an option that is a number from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {number}")
    return number


def parser(name: str, description: str | None, page_plot: str | None = None) -> argparse.ArgumentParser:
    """For ``python -m benchmarks.NAME``; `page_plot` is where its page has a copy of the plot."""
    out = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    copy = f"; the page shows a copy of the plot, {page_plot}" if page_plot else ""
    out.add_argument("--threads", type=count, default=2, help="CPU threads (2)")
    out.add_argument(
        "--out",
        type=Path,
        default=Path("benchmarks/results"),
        help=f"folder for {name}.json and {name}.png (benchmarks/results){copy}",
    )
    return out


def write(folder: Path, name: str, record: dict[str, Any], plot: Callable[[Path], None]) -> None:
    """Write `record` as JSON, call `plot` with the file for the plot, and say what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    data, picture = folder / f"{name}.json", folder / f"{name}.png"
    data.write_text(json.dumps(record, indent=1) + "\n")
    plot(picture)
    print(f"\nwritten: {data}, {picture}")
