"""Take a trained policy out of its run: a transformers folder with a model card, and two models to talk to."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_edu.evaluation import Estimate
from grpo_edu.model_files import choose_device
from grpo_edu.models import SMOLLM2, list_models, load_policy, save_policy
from grpo_edu.problems.hub import read_run_config
from grpo_edu.problems.templates import PROBLEM_SETS, data_dir
from grpo_edu.prompts import chat_messages, prompt_style, render_prompt
from grpo_edu.runs.options import use_current_names
from grpo_edu.runs.record import model_label, read_run_result

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_QUESTION = "YOUR QUESTION"
_SMOLLM2_ON_THE_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class Conversation:
    """A trained policy and the model that it was trained from, which answer the same prompt.

    models: "base" and "trained", or one entry for a model that no run has trained. tokenizer: tokenizer of all of them.
    max_completion_length, temperature: settings of the answers. options: options of `render_prompt`.
    """

    models: dict[str, PreTrainedModel]
    tokenizer: PreTrainedTokenizerBase
    max_completion_length: int
    temperature: float
    options: dict[str, None] = field(default_factory=dict)

    def answers(self, question: str, generator: torch.Generator | None = None) -> dict[str, str]:
        """Return the answer of each model to a question."""
        from grpo_edu.rollout import generate

        prompt = [render_prompt(self.tokenizer, question, **self.options)]
        return {
            name: generate(
                model,
                self.tokenizer,
                prompt,
                num_generations=1,
                max_completion_length=self.max_completion_length,
                temperature=self.temperature,
                generator=generator,
            ).completions[0]
            for name, model in self.models.items()
        }


def start_conversation(
    run: str | Path, *, max_completion_length: int | None = None, temperature: float | None = None
) -> Conversation:
    """Load a run's policy and the model that it started from, or a model alone; by default with the run's settings.

    Raises what `load_policy` raises, and FileNotFoundError for a run that was stopped before it saved a model.
    """
    stored = read_run_config(run) or {}
    settings = stored.get("config", {})
    trained, tokenizer = load_policy(run, stored.get("dtype"))
    models = {"trained" if settings else "answer": trained}
    if settings:
        base, _ = load_policy(stored["source"], stored.get("dtype"), chat_template=tokenizer.chat_template)
        models = {"base": base, **models}
    device = choose_device("auto", trained.num_parameters())
    models = {name: model.to(device) for name, model in models.items()}
    return Conversation(
        models,
        tokenizer,
        settings.get("max_completion_length", 256) if max_completion_length is None else max_completion_length,
        settings.get("temperature", 1.0) if temperature is None else temperature,
        _options(stored),
    )


def export_run(
    run: str | Path, folder: str | Path, *, overwrite: bool = False, say: Callable[[str], None] = lambda text: None
) -> Path:
    """Write the trained policy of a run into an ordinary transformers folder with a model card; returns the folder.

    Adapters were merged when the run saved its model. The folder loads with transformers, TRL and vLLM. say: gets,
    before anything is written, what the card will show of reward files of the user.

    Raises ValueError for a folder that holds no training run, FileNotFoundError for a run without a model,
    FileExistsError if `folder` is not empty and `overwrite` is False, and OSError if it cannot be written.
    """
    run, folder = Path(run).expanduser(), Path(folder).expanduser().absolute()
    stored = read_run_config(run)
    if stored is None or "config" not in stored:
        raise ValueError(f"`run`: {run} holds no training run; name the folder that `grpo-edu train` wrote.")
    if any(read_run_config(place) is not None for place in (folder, *folder.parents)):
        raise ValueError(f"`folder`: {folder} lies in the folder of a run; choose a folder outside it.")
    result = read_run_result(run)
    for reward in map(_reward, use_current_names(stored)["reward_funcs"]):
        if "```" in reward:
            say(f"The model card will show the reward {reward}")
    model, tokenizer = load_policy(run, stored.get("dtype"))
    save_policy(model, tokenizer, folder, overwrite=overwrite)
    names = folder / "tokenizer_config.json"
    content = json.loads(names.read_text(encoding="utf-8"))
    content["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that older transformers know as well
    names.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(model_card(stored, result, tokenizer, folder.name), encoding="utf-8")
    return folder


def model_card(
    stored: dict[str, Any], result: dict[str, Any] | None, tokenizer: PreTrainedTokenizerBase, name: str
) -> str:
    """Return the model card of a run: data, reward, settings, accuracy with its interval, and how to ask the model.

    stored, result: what config.json and result.json of the run hold.
    """
    config, style = stored["config"], prompt_style(tokenizer)
    data = ", ".join(Path(name).name for name in stored["data"])
    header = [
        *_base_header(stored),
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [grpo, grpo_edu]",
    ]
    settings = {**{key: stored.get(key) for key in ("lora_rank", "dtype", "backend")}, **config}
    messages = json.dumps(chat_messages(_QUESTION, style=style, **_options(stored)), ensure_ascii=False, indent=4)
    variables = "".join(f", {key}={value!r}" for key, value in style.template_kwargs.items())
    parts = [
        "\n".join(["---", *header, "---"]),
        f"# {name}",
        f"{model_label(stored['model'])} trained with GRPO by grpo_edu {stored['grpo_edu']} on {data}.",
        "## Accuracy",
        _accuracy(result, config["seed"]),
        "## Rewards",
        *(_reward(reward) for reward in use_current_names(stored)["reward_funcs"]),
        "## How to ask it",
        "The model was trained with this prompt and ends its answer with its end-of-turn token.",
        f"""```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForCausalLM.from_pretrained("{name}")
messages = {messages}
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False{variables})
inputs = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
output = model.generate(**inputs, max_new_tokens={config["max_completion_length"]}, do_sample=False)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
```""",
        "## Settings",
        "\n".join(["| setting | value |", "|---|---|", *(f"| {key} | {value} |" for key, value in settings.items())]),
    ]
    return "\n\n".join(parts) + "\n"


def _options(stored: dict[str, Any]) -> dict[str, None]:
    """Return the options of `render_prompt` for the problems of a run; some sets have no system prompt of ours."""
    scorers = [PROBLEM_SETS[name].scorer if name in PROBLEM_SETS else None for name in stored.get("data", [""])]
    return {"system": None} if all(scorer and not scorer.system_prompt for scorer in scorers) else {}


def _accuracy(result: dict[str, Any] | None, seed: int) -> str:
    if result is None or result["accuracy_after"] is None:
        return "The run was stopped before the policy was evaluated."
    rows = {"sampled, temperature 1": "accuracy", "greedy": "greedy"}
    lines = ["| | before | after |", "|---|---|---|"]
    for label, name in rows.items():
        pair = [result[f"{name}_{when}"] for when in ("before", "after")]
        if all(pair):
            cells = (f"{p['accuracy']:.1%} [{100 * p['low']:.1f}, {100 * p['high']:.1f}]" for p in pair)
            lines.append(f"| {label} | {' | '.join(cells)} |")
        rewards = [p["reward"] for p in pair if p and "reward" in p]
        if len(rewards) == 2 and any(p["reward"]["value"] != p["accuracy"] for p in pair):
            lines.append(f"| mean reward, {label} | {' | '.join(f'{Estimate(**one):.3f}' for one in rewards)} |")
    n = result["accuracy_after"]["n"]
    note = f"{n} held-out problems, 95% Wilson intervals; one run with seed {seed}, {result['steps']} steps."
    return "\n".join(lines) + f"\n\n{note} Exact McNemar test, sampled: p = {result['p_value']:.2g}."


def _reward(entry: str) -> str:
    """Return the name of a reward, with the source of the function alone if its file is still there."""
    place, _, name = entry.rpartition(":")
    source = read_function(Path(place), name) if place.endswith(".py") else ""
    name = name if place.endswith(".py") else entry
    return f"`{name}`:\n\n```python\n{source}\n```" if source else f"`{name}`"


def read_function(file: Path, name: str) -> str:
    """Return the source of one function of a file, which is not imported; "" if there is none."""
    if not file.is_file():
        return ""
    text = file.read_text(encoding="utf-8-sig")
    try:
        statements = ast.parse(text).body
    except SyntaxError:  # edited since the run
        return ""
    functions = (one for one in statements if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
    found = next((one for one in functions if one.name == name), None)
    if found is None:
        return ""
    first = min(line.lineno for line in (found, *found.decorator_list))
    return "\n".join(text.splitlines()[first - 1 : found.end_lineno])


def _base_header(stored: dict[str, Any]) -> list[str]:
    """Return the lines on the base model, with its license if its own model card names one."""
    base, source = stored["model"], stored["source"]
    if source == SMOLLM2:
        return [f"base_model: {_SMOLLM2_ON_THE_HUB}", "license: apache-2.0"]
    folder = data_dir() / "models" / source if source in list_models() else Path(source)
    header: dict[str, str] = {}
    if (folder / "README.md").is_file():
        lines = (folder / "README.md").read_text(encoding="utf-8").partition("\n---")[0].splitlines()
        header = dict(line.split(": ", 1) for line in lines if ": " in line)
    if "base_model" not in header and not Path(source).exists():  # otherwise the Hub would take a folder for a model
        header["base_model"] = base
    return [f"{name}: {header[name]}" for name in ("base_model", "license") if name in header]
