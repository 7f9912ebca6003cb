"""`make gpu-check` without a GPU: the dry run, and that no stage can spoil the rest."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks import gpu_check
from benchmarks.gpu_check import Stage

MACHINE = {"gpu": "Test GPU"}


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_dry_run_passes_and_leaves_its_results(tmp_path: Path) -> None:
    assert gpu_check.main(["--dry-run", "--out", str(tmp_path)]) == 0
    document = json.loads((tmp_path / "check.json").read_text())
    assert [stage["status"] for stage in document["stages"]] == ["ok"] * 4
    assert {row["op"] for row in document["rows"]} == {"conflict_matrix + independent_set", "depga_block"}
    table = (tmp_path / "check.md").read_text()
    assert "| tests | ok |" in table
    assert "| depga_block |" in table


def test_a_stage_that_fails_hangs_or_is_missing_does_not_stop_the_others(tmp_path: Path) -> None:
    child = tmp_path / "child"
    hang = f"""
import subprocess, sys, time
process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open({str(child)!r}, "w").write(str(process.pid))
print("waiting", flush=True)
time.sleep(60)
"""
    work = [
        Stage("fails", 20, python("print('oh no'); raise SystemExit(3)")),
        Stage("hangs", 3, python(hang)),
        Stage("is missing", 20, ["no-such-program"]),
        Stage("works", 20, python("print('fine | so far')")),
    ]
    outcomes = gpu_check.check(tmp_path, MACHINE, work, seconds=60, say=lambda line: None)
    assert [outcome.status for outcome in outcomes] == ["failed", "timed out", "skipped", "ok"]
    assert [outcome.summary for outcome in outcomes] == [
        "oh no",
        "waiting",
        "no-such-program is not installed",
        "fine | so far",
    ]
    assert outcomes[1].seconds < 10
    assert not is_running(int(child.read_text())), "what a stage has started outlived it"
    assert len(json.loads((tmp_path / "check.json").read_text())["stages"]) == 4
    assert "| works | ok | 0 | fine \\| so far |" in (tmp_path / "check.md").read_text()


def is_running(process: int) -> bool:
    for _ in range(20):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return False
        # An orphan stays in the table until it is collected.
        if "State:\tZ" in Path(f"/proc/{process}/status").read_text():
            return False
        time.sleep(0.1)
    return True


def test_the_whole_keeps_to_its_time(tmp_path: Path) -> None:
    began = time.monotonic()
    work = [Stage(str(i), 30, python("import time; time.sleep(30)")) for i in range(3)]
    outcomes = gpu_check.check(tmp_path, MACHINE, work, seconds=2, say=lambda line: None)
    assert time.monotonic() - began < 6
    assert [outcome.status for outcome in outcomes] == ["timed out", "skipped", "skipped"]
    assert outcomes[2].summary == "no time was left"


def test_results_are_written_while_it_runs(tmp_path: Path) -> None:
    script = f"import json; print(len(json.load(open({str(tmp_path / 'check.json')!r}))['stages']))"
    work = [Stage(str(i), 20, python(script)) for i in range(3)]
    outcomes = gpu_check.check(tmp_path, MACHINE, work, seconds=60, say=lambda line: None)
    assert [outcome.summary for outcome in outcomes] == ["0", "1", "2"]


@pytest.mark.skipif(gpu_check.torch.cuda.is_available(), reason="a missing GPU is the point")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        gpu_check.main([])
    assert "sees no GPU" in capsys.readouterr().err
