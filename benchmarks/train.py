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

from benchmarks import chains, mrf9, study
from dlmkern import models
from dlmkern.models import LLaDAConfig, LLaDAModelLM, chains4
from dlmkern.models.masked_lm import MaskedLM
from examples.train_tiny import FIELDS, random_mask, save, train


@dataclass(frozen=True)
class Task:
    start: Callable[[], MaskedLM]
    loss: Callable[[MaskedLM, torch.Generator], Tensor]
    steps: int
    learning_rate: float


def new_model() -> MaskedLM:
    return LLaDAModelLM(LLaDAConfig(**FIELDS))


def predictions(
    model: MaskedLM, prompts: Tensor, answers: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits and true tokens where answers are masked, and the mask, whose ratios are spread over (0, 1)."""
    rows, length = answers.shape
    masked = random_mask(length, generator, rows)
    state = answers.masked_fill(masked, chains4.MASK)
    logits = model(torch.cat((prompts, state), dim=1)).logits[:, -length:]
    return logits[masked], answers[masked], masked


def mrf9_loss(model: MaskedLM, generator: torch.Generator) -> Tensor:
    logits, tokens, _ = predictions(model, *mrf9.problems(128, generator), generator)
    return cross_entropy(logits, tokens)


def chains8_batch(generator: torch.Generator) -> list[tuple[Tensor, Tensor]]:
    """16 problems of eight chains and 16 of fewer, none of them held out for tests."""
    groups = []
    for count in (chains.MOST_CHAINS, int(torch.randint(1, chains.MOST_CHAINS, (), generator=generator))):
        prompts, answers = chains.problems(32, count, generator)
        seen = ~chains.held_out(prompts)
        groups.append((prompts[seen][:16], answers[seen][:16]))
    return groups


def chains8_loss(model: MaskedLM, generator: torch.Generator) -> Tensor:
    """Clues count more: attention easily takes one slot of the prompt for another that is 40 tokens away."""
    losses, clues = [], []
    for prompts, answers in chains8_batch(generator):
        logits, tokens, masked = predictions(model, prompts, answers, generator)
        losses.append(cross_entropy(logits, tokens, reduction="none"))
        clues.append((prompts[:, 1 : 1 + answers.shape[1]] < chains4.PAD)[masked])
    loss, clue = torch.cat(losses), torch.cat(clues)
    return loss.mean() + 2 * loss[clue].mean()


TASKS = {
    "mrf9": Task(new_model, mrf9_loss, steps=1500, learning_rate=3e-3),
    "chains8": Task(models.tiny, chains8_loss, steps=1000, learning_rate=2e-3),
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train", description=__doc__)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--steps", type=study.count, help="default: 1500 for mrf9, 1000 for chains8")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    task: Task = TASKS[options.task]
    steps = task.steps if options.steps is None else options.steps

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    model = task.start().train()

    def losses() -> Iterator[Tensor]:
        while True:
            yield task.loss(model, generator)

    train(model, losses(), steps, task.learning_rate, options.task)
    save(model, options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
