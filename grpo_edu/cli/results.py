"""What is done with a run: `grpo-edu show`, `compare`, `diagnose`, `chat` and `export`."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from grpo_edu.cli.options import complain, say_loading, visible


def add_show_options(command: ArgumentParser) -> None:
    """Add the options of `grpo-edu show`."""
    add = command.add_argument
    add("run", metavar="RUN", help="folder of a run")
    add(
        "--step",
        type=int,
        metavar="N",
        help="which step to show (default: the last one that was kept; with --html all)",
    )
    add("--worst", type=int, metavar="N", help="show the N completions with the lowest reward (default: 5)")
    add("--best", type=int, metavar="N", help="show the N completions with the highest reward")
    add("--html", metavar="FILE", help="write a page that shows how each token was pushed (train with --inspect-steps)")


def run_show_command(arguments: Namespace) -> int:
    """Print completions that a run sampled, with their rewards and advantages; returns the exit code."""
    from grpo_edu.runs.completions import by_reward, read_completions, sampled_text

    counts = {"best": arguments.best, "worst": arguments.worst}
    if arguments.html is not None:
        if any(count is not None for count in counts.values()):
            raise ValueError("`html` writes a page with all answers of a group; leave out `best` and `worst`.")
        return _write_inspector(arguments)
    if all(count is None for count in counts.values()):
        counts["worst"] = 5
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ValueError(f"`{name}` must be at least 1, got {count}.")
    sampled = read_completions(arguments.run, arguments.step)
    chosen = {name: by_reward(sampled, best=name == "best")[:count] for name, count in counts.items() if count}
    if arguments.json:
        print(json.dumps({name: [asdict(one) for one in rows] for name, rows in chosen.items()}))
        return 0
    mean = sum(one.reward for one in sampled) / len(sampled)
    print(f"Step {sampled[0].step}: {len(sampled)} completions are kept, mean reward {mean:.2f}")
    for name, rows in chosen.items():
        for one in rows:
            print(visible(f"\n=== {name}: {one.prompt}\n--- {sampled_text(one)}"))
    return 0


def _write_inspector(arguments: Namespace) -> int:
    """Write the token inspector of a step as a page of its own; returns the exit code."""
    from grpo_edu.figures.tokens import inspector_page
    from grpo_edu.runs.tokens import read_all_tokens, read_tokens

    path = Path(arguments.html)
    if path.suffix.lower() not in (".html", ".htm"):  # a mistyped name must not replace a file of another kind
        raise ValueError(f"`html`: the name of the page must end with .html, got {arguments.html!r}.")
    run, step = arguments.run, arguments.step
    records = read_all_tokens(run) if step is None else [read_tokens(run, step)]
    title = f"Tokens that {Path(run).resolve().name} sampled"
    path.write_text(inspector_page(records, title), encoding="utf-8")
    steps = [record["step"] for record in records]
    text = f"{path} shows the tokens of step {', '.join(map(str, steps))}; open it in a browser."
    print(json.dumps({"html": str(path), "steps": steps}) if arguments.json else text)
    return 0


def add_compare_options(command: ArgumentParser) -> None:
    """Add the options of `grpo-edu compare`."""
    command.add_argument("runs", nargs=2, metavar="RUN", help="folders of two runs that were evaluated to their end")


def run_compare_command(arguments: Namespace) -> int:
    """Print how two runs differ in settings and in held-out accuracy; returns the exit code."""
    from grpo_edu.evaluation import compare
    from grpo_edu.problems.hub import read_run_config
    from grpo_edu.runs.comparison import read_evaluations, settings_that_differ, take_common
    from grpo_edu.runs.summary import accuracy_text

    first, then = arguments.runs
    evaluations = [read_evaluations(run) for run in arguments.runs]
    pair = take_common(evaluations[0][1], evaluations[1][1])
    comparison = compare(*pair)
    configs = [read_run_config(Path(run).expanduser()) or {} for run in arguments.runs]
    settings = list(settings_that_differ(dict(enumerate(configs))).values())
    if arguments.json:
        found = {name: value for name, value in asdict(comparison).items() if value is not None}
        print(json.dumps({"runs": arguments.runs, "n": pair[0].n, **found, "settings": settings}))
        return 0
    width = max(map(len, arguments.runs))
    for run, (before, after) in zip(arguments.runs, evaluations, strict=True):
        print(f"{run:<{width}}  before {accuracy_text(before):<22} after {accuracy_text(after)}")
    print("Settings that differ:" if settings[0] else "The settings are the same.")
    for name, value in settings[0].items():
        print(visible(f"  {name}: {value} and {settings[1][name]}"))
    print(f"After training, from {first} to {then}, on the {pair[0].n} held-out problems of both:")
    print(f"  {comparison} (exact McNemar test)")
    return 0


def add_diagnose_options(command: ArgumentParser) -> None:
    """Add the option of `grpo-edu diagnose`."""
    command.add_argument(
        "log", metavar="LOG", help="log or folder of a run of this package, TRL or verl; or a W&B or TensorBoard export"
    )


def run_diagnose_command(arguments: Namespace) -> int:
    """Print what a log says about its run, and what it cannot tell; returns the exit code."""
    from grpo_edu.runs.log_diagnosis import diagnose, diagnosis_text
    from grpo_edu.runs.measures import RunFacts
    from grpo_edu.runs.metric_logs import read_metrics

    rows = read_metrics(arguments.log)
    diagnosis = diagnose(rows)
    if any(cause.fault in ("length truncation", "no end") for found in diagnosis.findings for cause in found.causes):
        diagnosis = diagnose(rows, RunFacts(turn_end=_find_turn_end(Path(arguments.log))))
    text = f"{arguments.log}: {diagnosis_text(diagnosis)}"
    print(json.dumps(asdict(diagnosis)) if arguments.json else visible(text))
    return 0


def _find_turn_end(run: Path) -> str | None:
    """Return the token that ends a turn in the chat template of a run's model, if no completion ends with it."""
    from grpo_edu.rollout import end_token_ids, find_unused_turn_end

    folder = next((folder for folder in (run / "model", run) if (folder / "tokenizer_config.json").is_file()), None)
    if folder is None:
        return None
    from transformers import GenerationConfig

    from grpo_edu.model_files import load_tokenizer

    tokenizer = load_tokenizer(folder, "")
    has_config = (folder / "generation_config.json").is_file()
    generation_config = GenerationConfig.from_pretrained(folder) if has_config else None
    return find_unused_turn_end(tokenizer, end_token_ids(tokenizer, generation_config))


def add_chat_options(command: ArgumentParser) -> None:
    """Add the options of `grpo-edu chat`."""
    add = command.add_argument
    add("run", metavar="RUN", help="folder of a run, whose policy is compared with its base model; or a model alone")
    add("--question", action="append", metavar="TEXT", help="ask this question and exit; may be repeated")
    add(
        "--temperature",
        type=float,
        metavar="X",
        help="temperature of the sampling; 0 is greedy (default: that of the run)",
    )
    add("--max-completion-length", type=int, metavar="N", help="most tokens of an answer (default: as in the run)")
    add("--seed", type=int, default=0, metavar="N", help="random seed of the sampling (default: 0)")


def run_chat_command(arguments: Namespace) -> int:
    """Answer questions until the input ends; returns the exit code."""
    say_loading(arguments.run)
    import torch

    from grpo_edu.runs.export import start_conversation

    talk = start_conversation(
        arguments.run, max_completion_length=arguments.max_completion_length, temperature=arguments.temperature
    )
    generator = torch.Generator().manual_seed(arguments.seed)
    for question in arguments.question or _typed_questions():
        try:
            answers = talk.answers(question, generator)
        except ValueError as error:  # too long, say: at a terminal the conversation continues
            if arguments.question or not sys.stdin.isatty():
                raise
            complain(f"error: {error}")
            continue
        if arguments.json:
            print(json.dumps({"question": question, **answers}), flush=True)
        else:
            print(visible("\n".join(f"{name + ':':<9}{text}" for name, text in answers.items())), flush=True)
    return 0


def _typed_questions() -> Iterator[str]:
    """Yield the lines that are typed, or come through a pipe, until Ctrl-D or Ctrl-C."""
    if sys.stdin is None:  # closed by whoever started the command
        raise ValueError("there is no input to read questions from; ask with `question`.")
    if sys.stdin.isatty():
        print("Type a question; press Ctrl-D to stop.", file=sys.stderr)
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            question = input("> " if sys.stdin.isatty() else "").strip()
            if question:
                yield question


def add_export_options(command: ArgumentParser) -> None:
    """Add the options of `grpo-edu export`."""
    command.add_argument("run", metavar="RUN", help="folder of a run")
    command.add_argument("folder", metavar="DIR", help="new folder for model, tokenizer and model card")
    command.add_argument("--overwrite", action="store_true", help="replace the contents of the folder")


def run_export_command(arguments: Namespace) -> int:
    """Write a run's policy as an ordinary transformers folder; returns the exit code."""
    from grpo_edu.runs.export import export_run

    folder = export_run(
        arguments.run,
        arguments.folder,
        overwrite=arguments.overwrite,
        say=lambda text: print(visible(text), file=sys.stderr),
    )
    text = f"{folder} holds the model, its tokenizer and README.md, the model card."
    print(json.dumps({"folder": str(folder)}) if arguments.json else text)
    return 0
