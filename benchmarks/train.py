"""Train the models of the DAPD studies: `python -m benchmarks.train TASK FOLDER`, with TASK mrf9 or chains8.

Both are built like the embedded model (`examples/train_tiny.py`) and trained by plain masked diffusion only.
chains8 starts from the embedded model, which knows the chains: it has to learn that prompts are longer.
The same seed on the same machine gives the same bytes. On one core mrf9 takes a minute, chains8 ten.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks import chains, mrf9
from dlmkern import models
from dlmkern.models import LLaDAConfig, LLaDAModelLM, chains4
from dlmkern.models.masked_lm import MaskedLM
from examples.train_tiny import FIELDS, random_mask, save, train

Problems = tuple[Tensor, Tensor]  # prompts [B, m], answers [B, n]


@dataclass(frozen=True)
class Task:
    start: Callable[[], MaskedLM]
    batch: Callable[[torch.Generator], list[Problems]]
    steps: int
    learning_rate: float


def new_model() -> MaskedLM:
    return LLaDAModelLM(LLaDAConfig(**FIELDS))


def mrf9_batch(generator: torch.Generator) -> list[Problems]:
    return [mrf9.problems(128, generator)]


def chains8_batch(generator: torch.Generator) -> list[Problems]:
    """16 problems of 1 to 4 chains and 16 of 8 to 5, so that all batches are as large; none is held out."""
    few = int(torch.randint(1, 5, (), generator=generator))
    groups = []
    for count in (few, 9 - few):
        prompts, answers = chains.problems(32, count, generator)
        seen = ~chains.held_out(prompts)
        groups.append((prompts[seen][:16], answers[seen][:16]))
    return groups


TASKS = {
    "mrf9": Task(new_model, mrf9_batch, steps=1500, learning_rate=3e-3),
    "chains8": Task(models.tiny, chains8_batch, steps=1500, learning_rate=1.5e-3),
}


def loss(model: MaskedLM, groups: list[Problems], generator: torch.Generator) -> Tensor:
    """Mean cross entropy over the masked tokens of all groups, each with mask ratios spread over (0, 1)."""
    logits, tokens = [], []
    for prompts, answers in groups:
        rows, length = answers.shape
        masked = random_mask(length, generator, rows)
        state = answers.masked_fill(masked, chains4.MASK)
        logits.append(model(torch.cat((prompts, state), dim=1)).logits[:, -length:][masked])
        tokens.append(answers[masked])
    return cross_entropy(torch.cat(logits), torch.cat(tokens))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train", description=__doc__)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--steps", type=int, help="default: 1500")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    task: Task = TASKS[options.task]
    steps = task.steps if options.steps is None else options.steps
    if steps < 1:
        parser.error(f"--steps: expected at least 1, got {steps}")

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    model = task.start().train()

    def losses() -> Iterator[Tensor]:
        while True:
            yield loss(model, task.batch(generator), generator)

    train(model, losses(), steps, task.learning_rate, options.task)
    save(model, options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
