"""The playground's JavaScript, in Node: its updates, weights and advantages are those of the package."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from grpo_edu.advantages import group_advantages
from grpo_edu.config import LOSS_TYPES
from grpo_edu.losses import LOSSES, grpo_loss

ROOT = Path(__file__).resolve().parents[1]
STATIC, WEB = ROOT / "book" / "static", ROOT / "grpo_edu" / "web"
# The scripts of the book, if there is no page; then what the test asks for.
HARNESS = """
globalThis.window = globalThis;
globalThis.document = { querySelectorAll: () => [] };
const { readFileSync } = require("fs"), { runInThisContext } = require("vm");
for (const file of JSON.parse(process.argv[1])) runInThisContext(readFileSync(file, "utf8"), file);
const asked = JSON.parse(readFileSync(0, "utf8"));
process.stdout.write(JSON.stringify(runInThisContext(`(${asked.code})`)(asked.input)));
"""
pytestmark = pytest.mark.usefixtures("node")
SETTINGS = {"scaling": "group", "updates": 3, "low": 0.2, "high": 0.28, "beta": 0.05, "rate": 0.7}


def javascript(code, given):
    """What a function of JavaScript returns for an argument. Its test asks for the fixture `node`."""
    scripts = [
        WEB / "chances.js",
        WEB / "formulas.js",
        *(STATIC / f"{name}.js" for name in ("explorers", "recorded", "playground")),
    ]
    files = json.dumps([str(path) for path in scripts])
    asked = json.dumps({"code": code, "input": given})
    done = subprocess.run(["node", "-e", HARNESS, files], input=asked, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


STEPS = """given => {
  const task = coursePlayground.TASKS[given.task], random = coursePlayground.randomNumbers(given.seed);
  let table = task.logits;
  return Array.from({ length: given.steps }, () => {
    const group = Array.from({ length: given.size }, () => coursePlayground.sampleCompletion(table, task, random));
    const reward = Object.values(task.rewards)[given.reward];
    const rewards = group.map(completion => reward(coursePlayground.wordsOf(task, completion)));
    const settings = { ...given.settings, length: task.length };
    const found = coursePlayground.updatePolicy(table, task.logits, group, rewards, settings);
    const step = { before: table, group, rewards, ...found };
    table = found.table;
    return step;
  });
}"""


def log_probabilities(table, rows, tokens):
    return table.log_softmax(dim=-1)[rows, tokens]


def package_step(start, reference, group, rewards, loss, settings, length):
    """The same updates with the package's loss and PyTorch's gradient."""
    width = max(map(len, group))
    mask = torch.tensor([[int(place < len(one)) for place in range(width)] for one in group])
    tokens = torch.tensor([one + [0] * (width - len(one)) for one in group])
    rows = torch.cat([torch.zeros_like(tokens[:, :1]), 1 + tokens[:, :-1]], dim=1) * mask
    advantages = group_advantages(
        torch.tensor(rewards, dtype=torch.float64), len(group), scale_rewards=settings["scaling"]
    )
    table = start.clone().requires_grad_()
    old, before = (log_probabilities(policy, rows, tokens).detach() for policy in (start, reference))
    optimizer = torch.optim.SGD([table], lr=settings["rate"])
    for _ in range(settings["updates"]):
        optimizer.zero_grad()
        grpo_loss(
            log_probabilities(table, rows, tokens),
            old,
            advantages,
            mask,
            ref_per_token_logps=before,
            epsilon=settings["low"],
            epsilon_high=settings["high"],
            beta=settings["beta"],
            loss_type=loss,
            max_completion_length=length,
        ).backward()
        optimizer.step()
    return table.detach(), advantages


@pytest.mark.parametrize("loss", LOSS_TYPES)
@pytest.mark.parametrize(("task", "length"), [("one word", 1), ("up to three tokens", 3)])
def test_the_policy_of_the_page_becomes_that_of_the_package(task, length, loss):
    settings = SETTINGS | ({"high": 5.0} if LOSSES[loss].clips == "weight" else {})
    given = {"task": task, "seed": 3, "steps": 4, "size": 8, "reward": 1, "settings": {**settings, "loss": loss}}
    steps = javascript(STEPS, given)
    reference = torch.tensor(steps[0]["before"], dtype=torch.float64)
    changed = 0.0
    for step in steps:
        start = torch.tensor(step["before"], dtype=torch.float64)
        table, advantages = package_step(start, reference, step["group"], step["rewards"], loss, settings, length)
        assert step["advantages"] == pytest.approx(advantages.tolist(), abs=1e-9)
        assert_close(torch.tensor(step["table"], dtype=torch.float64), table, atol=1e-9, rtol=0)
        changed += (table - start).abs().sum().item()
    assert changed > 0.1, "groups that all tie would agree about anything"
    ratios = [ratio for step in steps for row in step["ratios"] for ratio in row]
    assert max(abs(ratio - 1) for ratio in ratios) > 0.05, "after three updates the ratios differ from 1"


LEARN = """given => {
  const task = coursePlayground.TASKS[given.task], reward = Object.values(task.rewards)[given.reward];
  const random = coursePlayground.randomNumbers(given.seed);
  const settings = { loss: "grpo", scaling: "group", updates: 2, low: 0.2, high: 0.2, beta: given.beta, rate: 0.5,
    length: task.length };
  let table = task.logits;
  const curve = [coursePlayground.measure(table, task.logits, task, reward)];
  for (let step = 0; step < given.steps; step++) {
    const group = Array.from({ length: 8 }, () => coursePlayground.sampleCompletion(table, task, random));
    const rewards = group.map(completion => reward(coursePlayground.wordsOf(task, completion)));
    table = coursePlayground.updatePolicy(table, task.logits, group, rewards, settings).table;
    curve.push(coursePlayground.measure(table, task.logits, task, reward));
  }
  const share = curve[0].rows.reduce((sum, [, chance]) => sum + chance, 0);
  return { first: curve[0], last: curve[curve.length - 1], share };
}"""


@pytest.mark.parametrize("task", ["one word", "up to three tokens"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_what_the_page_promises_is_what_happens(task, seed):
    """With the right reward the policy becomes right; the reward that can be hacked is hacked; KL holds it back."""
    ask = {"task": task, "seed": seed, "steps": 150, "beta": 0}
    honest = javascript(LEARN, {**ask, "reward": 0})
    assert honest["share"] == pytest.approx(1)
    assert honest["first"]["right"] < 0.6 and honest["last"]["right"] > 0.9 and honest["last"]["kl"] > 0.1
    hacked = javascript(LEARN, {**ask, "reward": 1})
    assert hacked["last"]["reward"] > 1.5 * hacked["first"]["reward"] and hacked["last"]["right"] < 0.2
    held = javascript(LEARN, {**ask, "reward": 0, "beta": 1})
    assert held["last"]["kl"] < honest["last"]["kl"]
