"""DepCap beside two baselines on the embedded model, and one of its answers step by step.

The task is `dlmkern.models.chains4`: fill in four chains of digits, x and y in turn, so that every y is the
sum of its neighbours modulo 3 and every digit that the prompt shows stays. No prompt was seen in training.
"""

import torch
from rich.console import Console

from dlmkern import decoders, generate_stream, models
from dlmkern.models import chains4
from dlmkern.report import compare, comparison_table, steps_table

COUNT = 50
DECODERS = {
    "one token per step": decoders.vanilla(),
    "confidence threshold 0.9": decoders.threshold(),
    "DepCap": decoders.depcap(),
}


def main() -> None:
    torch.set_num_threads(1)  # for a model this small, a second thread costs more than it brings
    console = Console(width=None if Console().is_terminal else 130, highlight=False)
    model = models.tiny()
    prompts = chains4.prompts(COUNT, seed=0)

    console.print(f"[bold]{COUNT} unseen prompts, {chains4.ANSWER_LENGTH} tokens each[/]")
    results = compare(
        model,
        prompts.tolist(),
        DECODERS,
        chains4.ANSWER_LENGTH,
        valid=lambda prompt, answer: chains4.valid(torch.tensor(prompt), torch.tensor(answer)),
    )
    console.print(comparison_table(results))

    console.print("\n[bold]One answer by DepCap, forward by forward[/]")
    console.print(f"The prompt, where x and y are to be filled in:  {chains4.text(prompts[0])}\n")
    stream = generate_stream(model, prompts[:1], "depcap", chains4.ANSWER_LENGTH)
    console.print(
        steps_table(stream, chains4.ANSWER_LENGTH, lambda token: chains4.text(torch.tensor([token])))
    )


if __name__ == "__main__":
    main()
