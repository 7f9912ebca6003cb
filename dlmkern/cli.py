"""The command ``dlmkern``."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

import dlmkern
from dlmkern.backends import table, use_backend
from dlmkern.backends.registry import BACKENDS

if TYPE_CHECKING:
    from dlmkern.decoders import Decoder

# Bad input, or a missing package, file or backend. Anything else is a defect and keeps its traceback.
USER_ERRORS = (ValueError, TypeError, OSError, ImportError, FloatingPointError, RuntimeError)


class Parser(argparse.ArgumentParser):
    """Reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit code: 0, or 2 after an error, of which stderr has one line."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    options.rest = rest
    if rest and options.command != "bench":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    backend = getattr(options, "backend", None)
    try:
        with use_backend(backend) if backend else nullcontext():
            options.run(options)
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except USER_ERRORS as error:
        lines = str(error).splitlines() or [type(error).__name__]
        print(f"dlmkern {options.command}: error: {lines[0]}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="dlmkern", description=dlmkern.__doc__)
    parser.add_argument("--version", action="version", version=f"dlmkern {dlmkern.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(
        name: str, run: Callable[[argparse.Namespace], None], summary: str
    ) -> argparse.ArgumentParser:
        out: Parser = commands.add_parser(name, help=summary, description=summary)
        out.set_defaults(run=run)
        return out

    info = command("info", _info, "versions, devices, and which backend serves which op here")
    info.add_argument("--json", action="store_true", help="print a JSON object")

    generate = command("generate", _generate, "answer a prompt")
    _add_model_options(generate)
    generate.add_argument(
        "--decoder",
        default="depcap",
        metavar="NAME",
        help="depcap (the default), dapd, cover, wino, saber, threshold, factor, vanilla or dream; or the "
        "published settings of dapd for a task: dapd-dream, and dapd-llada- with gsm8k, gsm8k-staged, "
        "humaneval, humaneval-staged, mbpp, mbpp-direct or math",
    )
    generate.add_argument(
        "--cache",
        choices=("none", "prefix", "dual"),
        default="none",
        help="the keys and values to reuse: none, those before the block (prefix), or all outside it (dual)",
    )
    generate.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the decoder, such as tau_low=0.7 or block_length=None; may be repeated",
    )
    generate.add_argument("--stop-at-eos", action="store_true", help="end at the end-of-sequence token")
    shown = generate.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="print a JSON object")
    shown.add_argument(
        "--stream",
        action="store_true",
        help="print what each forward pass commits (3='x'), replaces (3:='x') and masks again (-3)",
    )

    compare = command("compare", _compare, "decoders side by side on the same prompts")
    _add_model_options(compare)
    compare.add_argument(
        "--decoders",
        default="vanilla,threshold,depcap,dapd",
        metavar="NAMES",
        help="as for generate --decoder (vanilla,threshold,depcap,dapd)",
    )
    compare.add_argument("--count", type=int, default=50, help="test prompts of the model tiny (50)")
    compare.add_argument("--json", action="store_true", help="print a JSON object")

    command("bench", _bench, "time the ops: python -m benchmarks, with its arguments; needs the source tree")
    return parser


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", required=True, metavar="DIR", help="checkpoint folder, or tiny, the embedded model"
    )
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="tokenized by the checkpoint's tokenizer")
    prompt.add_argument("--prompt-ids", type=_token_ids, metavar="1,2,3", help="token ids")
    parser.add_argument("--chat", action="store_true", help="put --prompt into the chat template")
    parser.add_argument("--gen-length", type=int, metavar="N", help="tokens to generate (256; 40 for tiny)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="of sampling (0: none)")
    parser.add_argument("--seed", type=int, default=0, help="of sampling (0)")
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16, float16 or float64")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", choices=("auto", *BACKENDS), help="what runs the ops (auto)")


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected comma-separated numbers, got {text!r}") from None


def _info(options: argparse.Namespace) -> None:
    facts = {
        "dlmkern": dlmkern.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu kernels": _cpu_isa(),
        "cuda devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "ops": table(),
    }
    if options.json:
        print(json.dumps(facts, indent=2))
        return
    ops: dict[str, dict[str, str]] = facts.pop("ops")  # type: ignore[assignment]
    for name, value in facts.items():
        print(f"{name + ':':14}{(', '.join(value) or 'none') if isinstance(value, list) else value}")
    print()
    reasons: list[str] = []
    width = max(map(len, ops)) + 2
    print(f"{'op':{width}}" + "".join(f"{backend:12}" for backend in BACKENDS))
    for op, backends in ops.items():
        cells = []
        for answer in backends.values():
            if answer != "yes" and answer not in reasons:
                reasons.append(answer)
            cells.append("yes" if answer == "yes" else f"no ({reasons.index(answer) + 1})")
        print(f"{op:{width}}" + "".join(f"{cell:12}" for cell in cells).rstrip())
    for number, reason in enumerate(reasons, 1):
        print(f"({number}) {reason}")


def _cpu_isa() -> str:
    try:
        from dlmkern import _C
    except ImportError as error:
        return f"none: {error}"
    isa: str = _C.cpu_isa()
    return isa


class Setup:
    """A model, the prompts for it, and how to show its tokens."""

    def __init__(self, options: argparse.Namespace) -> None:
        from dlmkern import models
        from dlmkern.models import chains4

        self.tokenizer = None
        self.tiny = options.model == "tiny"
        if self.tiny:
            self.model = models.tiny(options.dtype, options.device)
        else:
            self.model = models.load_model(options.model, options.dtype, options.device)
            self.tokenizer = models.load_tokenizer(options.model)
        self.gen_length = options.gen_length
        if self.gen_length is None:
            self.gen_length = chains4.ANSWER_LENGTH if self.tiny else 256
        self.prompts: Any = [options.prompt_ids]
        if options.prompt is not None:
            if self.tokenizer is None:
                raise ValueError(f"--prompt: {options.model} has no tokenizer; use --prompt-ids")
            self.prompts = [options.prompt]
        elif options.prompt_ids is None:
            if not self.tiny:
                raise ValueError("one of --prompt and --prompt-ids is needed")
            count = getattr(options, "count", 1)
            if count < 1:
                raise ValueError(f"--count: expected at least 1, got {count}")
            self.prompts = chains4.prompts(count, options.seed).tolist()

    def text(self, tokens: list[int]) -> str | None:
        """None if nothing says how to write these tokens."""
        if self.tiny:
            from dlmkern.models import chains4

            return chains4.text(torch.tensor(tokens))
        return None if self.tokenizer is None else str(self.tokenizer.decode(tokens))

    def symbol(self, token: int) -> str:
        text = self.text([token])
        return str(token) if text is None else text


def _decoder(name: str, settings: list[str], cache: str = "none") -> Decoder:
    from dlmkern.decoders import PRESETS

    if name not in PRESETS:
        raise ValueError(f"unknown decoder {name!r}, known: {', '.join(PRESETS)}")
    values: dict[str, Any] = {"cache": None if cache == "none" else cache}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"--set: expected NAME=VALUE, got {setting!r}")
        if key == "cache":
            raise ValueError(f"--set: use --cache for the cache, got {setting!r}")
        try:
            values[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            values[key] = value
    known = inspect.signature(PRESETS[name]).parameters
    if unknown := values.keys() - known.keys():
        raise ValueError(
            f"--set: {name} has no setting {', '.join(sorted(unknown))}; it has {', '.join(known)}"
        )
    return PRESETS[name](**values)


def _generate(options: argparse.Namespace) -> None:
    from dlmkern.report import step_lines

    decoder = _decoder(options.decoder, options.set, options.cache)
    setup = Setup(options)
    began = time.perf_counter()
    stream = dlmkern.generate_stream(
        setup.model,
        setup.prompts,
        decoder,
        setup.gen_length,
        options.temperature,
        options.seed,
        options.stop_at_eos,
        tokenizer=setup.tokenizer,
        chat_template=options.chat,
    )
    if options.stream:
        for line in step_lines(stream, setup.symbol):
            print(line, flush=True)
    output = stream.result()
    seconds = time.perf_counter() - began
    tokens = output.tokens[0].tolist()
    text = setup.text(tokens)
    nfe = int(output.nfe[0])
    if not options.json:
        print(",".join(map(str, tokens)) if text is None else text)
        summary = f"{len(tokens)} tokens, {nfe} forwards, {len(tokens) / nfe:.2f} tokens per forward"
        revisions = f", {int(output.revisions[0])} revisions" if decoder.revise else ""
        print(f"{summary}{revisions}, {seconds:.2f} s", file=sys.stderr)
        return
    from dlmkern.decoders import Reason

    print(
        json.dumps(
            {
                "prompt": output.sequences[0][: -len(tokens)].tolist(),
                "tokens": tokens,
                "text": text,
                "nfe": nfe,
                "tokens_per_forward": len(tokens) / nfe,
                "seconds": seconds,
                "block_lengths": output.block_lengths[0],
                "step_map": output.step_map[0].tolist(),
                "revisions": int(output.revisions[0]),
                "reason": [Reason(reason).name for reason in output.reason[0].tolist()],
                "confidence": [None if math.isnan(c) else c for c in output.confidence[0].tolist()],
            }
        )
    )


def _compare(options: argparse.Namespace) -> None:
    from rich.console import Console

    from dlmkern.models import chains4
    from dlmkern.report import compare, comparison_table

    decoders = {name: _decoder(name, []) for name in options.decoders.split(",")}
    setup = Setup(options)

    def valid(prompt: list[int], answer: list[int]) -> bool:
        return chains4.valid(torch.tensor(prompt), torch.tensor(answer))

    checkable = setup.tiny and options.prompt_ids is None and setup.gen_length == chains4.ANSWER_LENGTH
    results = compare(
        setup.model,
        setup.prompts,
        decoders,
        setup.gen_length,
        valid=valid if checkable else None,
        temperature=options.temperature,
        seed=options.seed,
        tokenizer=setup.tokenizer,
        chat_template=options.chat,
    )
    if options.json:
        print(json.dumps([{**vars(result), "tokens": result.tokens.tolist()} for result in results]))
    else:
        Console().print(comparison_table(results))


def _bench(options: argparse.Namespace) -> None:
    root = Path(dlmkern.__file__).parents[1]
    if not (root / "benchmarks" / "__main__.py").is_file():
        raise ImportError("the benchmarks are part of the source tree: run python -m benchmarks there")
    sys.path.insert(0, str(root))
    from benchmarks.__main__ import main as run

    if run(options.rest):
        raise RuntimeError("results differ from the reference, see NO in the column 'match'")
