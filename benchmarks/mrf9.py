"""Does attention show which tokens depend on each other? The synthetic experiment of the DAPD paper.

``python -m benchmarks.mrf9`` compares attention scores with the true dependencies, for the nine variables of
the paper's Markov random field and for the embedded model's chains. It prints tables, and writes them as JSON
with a plot of the graph beside it.
"""

from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import study
from benchmarks.markdown import table
from dlmkern import models
from dlmkern.models import AttentionGraph, chains4
from dlmkern.models.masked_lm import MaskedLM

CHECKPOINT = Path(__file__).parent / "checkpoints" / "mrf9"
LINKS = chains4.LINKS
LENGTH = 2 * LINKS + 1
NAMES = [f"X{i + 1}" for i in range(LINKS + 1)] + [f"Y{i + 1}" for i in range(LINKS)]
MASK_RATIOS = (1.0, 0.9, 0.7, 0.5)
SHARE = 0.3  # of the layers, the last ones: what the paper takes
LAST = f"last {SHARE:.0%}"
TAUS = (0.001, 0.01, 0.05, 0.15)


def problems(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Prompts `[count, 1]`, BOS only, and random answers `[count, 9]`: X1..X5, then Y1..Y4 (int64)."""
    x = torch.randint(3, (count, LINKS + 1), generator=generator)
    answers = torch.cat((x, (x[:, :-1] + x[:, 1:]) % 3), dim=1)
    return torch.full((count, 1), chains4.BOS), answers


def chain_edges(x: list[int], y: list[int], length: int) -> Tensor:
    """Bool `[length, length]`: X_i - X_{i+1}, X_i - Y_i and Y_i - X_{i+1}, with X at `x` and Y at `y`."""
    edges = torch.zeros(length, length, dtype=torch.bool)
    for (left, right), link in zip(pairwise(x), y, strict=True):
        for i, j in ((left, right), (left, link), (link, right)):
            edges[i, j] = edges[j, i] = True
    return edges


def mrf9_edges() -> Tensor:
    return chain_edges(list(range(LINKS + 1)), list(range(LINKS + 1, LENGTH)), LENGTH)


def chains4_edges() -> Tensor:
    """The separators have no edge."""
    edges = torch.zeros(chains4.ANSWER_LENGTH, chains4.ANSWER_LENGTH, dtype=torch.bool)
    for first in range(0, chains4.ANSWER_LENGTH, chains4.CHAIN_LENGTH):
        places = list(range(first, first + LENGTH))
        edges |= chain_edges(places[0::2], places[1::2], len(edges))
    return edges


@dataclass(frozen=True)
class Agreement:
    """How well scores tell the edges of a graph from its other pairs."""

    auc: float  # chance that an edge scores higher than another pair; a tie counts half
    ratio: float  # mean score of the edges / mean score of the other pairs
    violations: float  # share of the pairs of nodes with different degrees that are in the wrong order


PAPER = Agreement(auc=0.928, ratio=2.204, violations=0.04)


def agreement(scores: Tensor, edges: Tensor, nodes: Tensor) -> Agreement:
    """Compare graphs on some of their nodes.

    AUC and violations are means over the graphs, leaving out those that have nothing to compare; the ratio is
    that of the means over the pairs of all graphs.

    Args:
        scores: `[B, n, n]`, symmetric.
        edges: bool `[n, n]`, symmetric.
        nodes: bool `[B, n]`, which nodes count.
    """
    aucs, violations, on, off = [], [], [], []
    for score, node in zip(scores.double(), nodes, strict=True):
        true, found = edges[node][:, node], score[node][:, node].clone().fill_diagonal_(0)
        first, second = torch.triu_indices(len(true), len(true), 1)
        edge, weight = true[first, second], found[first, second]
        if not edge.any() or edge.all():
            continue
        above = weight[edge][:, None] - weight[~edge]
        aucs.append(((above > 0).double() + 0.5 * (above == 0)).mean())
        degree, sums = true.sum(1), found.sum(1)
        true_order, order = degree[first] - degree[second], sums[first] - sums[second]
        if (true_order != 0).any():
            violations.append((true_order * order < 0)[true_order != 0].double().mean())
        on.append(weight[edge])
        off.append(weight[~edge])
    if not aucs:
        raise ValueError("no graph has both an edge and a pair without one")
    return Agreement(
        auc=torch.stack(aucs).mean().item(),
        ratio=(torch.cat(on).mean() / torch.cat(off).mean()).item(),
        violations=torch.stack(violations).mean().item(),
    )


def above(scores: Tensor, edges: Tensor, nodes: Tensor, tau: float) -> tuple[float, float]:
    """Which share of the edges, and of the other pairs, DAPD would take for edges.

    These are the pairs, in either order, whose score exceeds `tau` times the largest of the first node.
    Arguments as in `agreement`.
    """
    pairs = nodes[:, :, None] & nodes[:, None, :] & ~torch.eye(len(edges), dtype=torch.bool)
    scores = scores.masked_fill(~pairs, 0.0)
    taken = scores > tau * scores.amax(-1, keepdim=True)
    return taken[pairs & edges].double().mean().item(), taken[pairs & ~edges].double().mean().item()


def attention_scores(
    model: MaskedLM, prompts: Tensor, answers: Tensor, masked: Tensor, layers: float | list[int]
) -> Tensor:
    """`[B, n, n]`: how much masked answer positions attend to each other, mean of both ways; else 0."""
    places = prompts.shape[1] + torch.arange(answers.shape[1])
    graph = AttentionGraph(torch.where(masked, places, -1), layers)
    state = answers.masked_fill(masked, model.config.mask_token_id)
    with torch.no_grad():
        model(torch.cat((prompts, state), dim=1), graph=graph)
    scores = graph.scores()
    return (scores + scores.mT) / 2


@dataclass(frozen=True)
class Task:
    """Sequences whose true dependencies are known."""

    name: str
    model: MaskedLM
    prompts: Tensor  # [B, m]
    answers: Tensor  # [B, n]
    edges: Tensor  # [n, n]
    variables: Tensor  # [B, n], the nodes of the graph if masked


def mrf9_task(model: MaskedLM, samples: int, generator: torch.Generator) -> Task:
    prompts, answers = problems(samples, generator)
    every = torch.ones_like(answers, dtype=torch.bool)
    return Task("mrf9", model, prompts, answers, mrf9_edges(), every)


def chains4_task(samples: int, generator: torch.Generator) -> Task:
    """The variables are the digits that the prompt hides; clues and separators are known."""
    prompts, answers = chains4.problems(samples, generator)
    hidden = (prompts[:, 1:] == chains4.X) | (prompts[:, 1:] == chains4.Y)
    return Task("chains4", models.tiny(), prompts, answers, chains4_edges(), hidden)


@dataclass(frozen=True)
class Row:
    """What some layers show at some share of masked tokens."""

    task: str
    layers: str
    mask_ratio: float
    auc: float
    ratio: float
    violations: float


def measure(task: Task, generator: torch.Generator) -> list[Row]:
    """All choices of layers, on the same masks: each token of an answer is masked by a chance."""
    n_layers = task.model.config.n_layers
    choices: dict[str, float | list[int]] = {LAST: SHARE, "all": 1.0}
    choices |= {f"layer {layer + 1} of {n_layers}": [layer] for layer in range(n_layers)}
    masks = [torch.rand(task.answers.shape, generator=generator) < ratio for ratio in MASK_RATIOS]
    rows = []
    for name, layers in choices.items():
        for ratio, masked in zip(MASK_RATIOS, masks, strict=True):
            scores = attention_scores(task.model, task.prompts, task.answers, masked, layers)
            found = agreement(scores, task.edges, masked & task.variables)
            rows.append(Row(task.name, name, ratio, found.auc, found.ratio, found.violations))
    return rows


@dataclass(frozen=True)
class Taken:
    """What DAPD's threshold makes of the scores of fully masked answers: shares that it takes for edges."""

    task: str
    tau: float
    edges: float
    others: float


def thresholds(task: Task) -> list[Taken]:
    masked = torch.ones_like(task.answers, dtype=torch.bool)
    scores = attention_scores(task.model, task.prompts, task.answers, masked, SHARE)
    return [Taken(task.name, tau, *above(scores, task.edges, task.variables, tau)) for tau in TAUS]


def tables(rows: list[Row]) -> str:
    """A table for each task: a line for each choice of layers, a column for each mask ratio."""
    parts = []
    for task in dict.fromkeys(row.task for row in rows):
        cells = {(row.layers, row.mask_ratio): row for row in rows if row.task == task}
        lines = [
            [layers, *(f"{c.auc:.3f}, {c.ratio:.2f}, {c.violations:.3f}" for c in line)]
            for layers in dict.fromkeys(layers for layers, _ in cells)
            for line in [[cells[layers, ratio] for ratio in MASK_RATIOS]]
        ]
        if task == "mrf9":
            lines.append(["paper", f"{PAPER.auc:.3f}, {PAPER.ratio:.2f}, {PAPER.violations:.3f}", "", "", ""])
        header = [task, *(f"{ratio:.0%} masked" for ratio in MASK_RATIOS)]
        parts.append(table(header, lines, left=1))
    return "\n\n".join(parts)


def threshold_table(taken: list[Taken]) -> str:
    lines = [[t.task, f"{t.tau:g}", f"{t.edges:.1%}", f"{t.others:.1%}"] for t in taken]
    return table(["", "tau", "true edges", "other pairs"], lines, left=1)


def plot(task: Task, file: Path) -> None:
    """The graph of mrf9 beside that of a fully masked sequence. Needs matplotlib, of the extra "bench"."""
    from matplotlib import pyplot

    masked = torch.ones(1, LENGTH, dtype=torch.bool)
    scores = attention_scores(task.model, task.prompts[:1], task.answers[:1], masked, SHARE)[0]
    place = [(float(i), 1.0) for i in range(LINKS + 1)] + [(i + 0.5, 0.0) for i in range(LINKS)]
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 3.2), layout="constrained")
    weights = (task.edges.double(), scores / scores.fill_diagonal_(0).max())
    titles = ("true dependencies", "attention, all masked (width: score; red: no true edge)")
    for axes, weight, title in zip(panels, weights, titles, strict=True):
        for i, j in torch.triu_indices(LENGTH, LENGTH, 1).T.tolist():
            color = "tab:blue" if task.edges[i, j] else "tab:red"
            # A straight line from X1 to X3 would run through X2.
            distance = place[j][0] - place[i][0] if place[i][1] == place[j][1] else 1.0
            bow = (-0.1 if place[i][1] == 0.0 else 0.1) * (distance - 1)
            style = {"arrowstyle": "-", "color": color, "linewidth": 6 * weight[i, j].item()}
            style["connectionstyle"] = f"arc3,rad={bow}"
            axes.annotate("", place[i], place[j], arrowprops=style)
        for name, (x, y) in zip(NAMES, place, strict=True):
            axes.text(x, y, name, ha="center", va="center", bbox={"boxstyle": "circle", "facecolor": "white"})
        axes.set(xlim=(-0.4, LINKS + 0.4), ylim=(-0.6, 1.7), title=title)
        axes.axis("off")
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> int:
    parser = study.parser("mrf9", __doc__, page_plot="docs/dapd_graph.png")
    parser.add_argument("--model", type=Path, default=CHECKPOINT, help="folder of an mrf9 checkpoint")
    parser.add_argument(
        "--samples", type=study.count, default=200, help="sequences, each with its own masks (200)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of sequences and masks (0)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(options.seed)
    mrf9 = mrf9_task(models.load_model(options.model), options.samples, generator)
    tasks = (mrf9, chains4_task(options.samples, generator))
    rows = [row for task in tasks for row in measure(task, generator)]
    taken = [one for task in tasks for one in thresholds(task)]
    print("edge AUC, mean score of edges / of other pairs, degrees in the wrong order\n")
    print(tables(rows))
    print("\npairs whose score exceeds tau times the row's largest, all masked\n")
    print(threshold_table(taken))
    record = {
        "samples": options.samples,
        "paper": asdict(PAPER),
        "rows": [asdict(row) for row in rows],
        "thresholds": [asdict(one) for one in taken],
    }
    study.write(options.out, "mrf9", record, lambda file: plot(mrf9, file))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
