"""The way to real models and data: a Qwen2 folder, GSM8K's files, the Hub's caches, and a word where one lacks."""

import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from random_policy import byte_tokenizer, random_model

from grpo_edu.cli.main import main
from grpo_edu.models import load_policy, save_policy
from grpo_edu.runs.log import read_log

REPOSITORY = Path(__file__).resolve().parents[1]
SMALL = ["--num-generations", "2", "--prompts-per-step", "2", "--max-completion-length", "12"]


@pytest.fixture(scope="module")
def qwen_dir(tmp_path_factory):
    """A Qwen2 on disk that has room for the longest question of GSM8K, a byte a token."""
    folder = tmp_path_factory.mktemp("policy") / "qwen"
    tokenizer = byte_tokenizer()
    model = random_model(tokenizer, max_position_embeddings=4096, stop_ids=range(0, 256, 16))
    save_policy(model, tokenizer, folder)
    return folder


def grpo_edu(*arguments, **environment) -> subprocess.CompletedProcess:
    """The command in a process of its own, with other places for what the Hub keeps."""
    command = [sys.executable, "-m", "grpo_edu", *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def test_the_whole_path_on_a_folder_and_the_real_files(qwen_dir, gsm8k_dir, tmp_path, capsys):
    data = ["--data", "gsm8k", "--data-path", str(gsm8k_dir)]
    output = tmp_path / "run"
    typed = ["train", "--model", str(qwen_dir), *data, *SMALL, "--steps", "2", "--n", "4", "--no-greedy"]
    assert main([*typed, "--num-problems", "6", "--checkpoint-every", "1", "--output", str(output)]) == 0
    assert len(read_log(output / "metrics.jsonl")) == 2 and "gsm8k" in (output / "summary.md").read_text()
    capsys.readouterr()
    assert main(["evaluate", "--model", str(output), *data, "--n", "9", "--max-completion-length", "12", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["n"] == 9 and sum(part["n"] for part in found["per_steps"].values()) == 9
    assert found["tokens_per_second"] > 0 and found["peak_gib"] > 0.1


def test_a_file_that_is_cut_in_the_middle_names_its_line(qwen_dir, gsm8k_dir, tmp_path, capsys):
    content = (gsm8k_dir / "test.jsonl").read_bytes()
    cut = content[: len(content) // 2]
    (tmp_path / "test.jsonl").write_bytes(cut)
    line = cut.count(b"\n") + 1
    assert not cut.endswith(b"\n")
    assert main(["evaluate", "--model", str(qwen_dir), "--data", "gsm8k", "--data-path", str(tmp_path)]) == 2
    assert f"{tmp_path / 'test.jsonl'}:{line}: this line is not JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model Qwen/Qwen2-0.5B-Instruct", "folder Qwen/Qwen2-0.5B-Instruct does not exist"),
        ("--model Qwen/Qwen2-0.5B-Instruct", "hf download Qwen/Qwen2-0.5B-Instruct --local-dir FOLDER"),
        ("--data gsm8k", "openai/gsm8k could not be loaded from the Hub"),
        ("--data gsm8k", "test.jsonl from github.com/openai/grade-school-math"),
    ],
)
def test_without_a_network_it_says_how_to_do_without(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    assert main(["evaluate", *arguments.split(), "--n", "3"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def hub_cache(model: Path, folder: Path) -> None:
    """The Hub's cache of a model: a snapshot, and a reference to it."""
    place = folder / "models--Qwen--Qwen2-0.5B-Instruct"
    revision = "0" * 40
    shutil.copytree(model, place / "snapshots" / revision)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(revision)


def datasets_cache(folder: Path, source: Path) -> None:
    """The datasets library's cache of GSM8K, as it is after a load from the Hub."""
    from datasets import load_dataset

    splits = {split: str(source / f"{split}.jsonl") for split in ("train", "test")}
    made = load_dataset("json", data_files=splits, cache_dir=str(folder / "made"))
    files = Path(made["test"].cache_files[0]["filename"]).parent
    place = folder / "openai___gsm8k" / "main" / "0.0.0" / files.name
    place.mkdir(parents=True)
    for file in files.glob("*.arrow"):
        shutil.copy(file, place / file.name.replace("json-", "gsm8k-"))
    info = json.loads((files / "dataset_info.json").read_text())
    (place / "dataset_info.json").write_text(json.dumps({**info, "config_name": "main", "dataset_name": "gsm8k"}))


def test_model_and_data_come_from_the_caches_without_a_network(qwen_dir, gsm8k_dir, tmp_path):
    hub_cache(qwen_dir, tmp_path / "hub")
    datasets_cache(tmp_path / "datasets", gsm8k_dir)
    done = grpo_edu(
        "evaluate",
        "--model",
        "Qwen/Qwen2-0.5B-Instruct",
        "--data",
        "gsm8k",
        "--n",
        "5",
        "--max-completion-length",
        "8",
        "--json",
        HF_HUB_CACHE=str(tmp_path / "hub"),
        HF_DATASETS_CACHE=str(tmp_path / "datasets"),
        HF_HUB_OFFLINE="1",
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(last_line(done.stdout))
    assert found["n"] == 5 and found["model"] == "Qwen/Qwen2-0.5B-Instruct"


class _Gate(BaseHTTPRequestHandler):
    """A Hub on this machine, whose model has terms that nobody accepted."""

    def do_HEAD(self):
        self.send_response(403)
        self.send_header("X-Error-Code", "GatedRepo")
        self.send_header("X-Error-Message", "Access to model secret/model is restricted.")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD

    def log_message(self, *arguments):
        pass


@pytest.mark.long
def test_a_gated_model_says_how_it_is_opened(tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Gate)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        done = grpo_edu(
            "evaluate",
            "--model",
            "secret/model",
            "--n",
            "3",
            HF_HUB_OFFLINE="0",
            HF_HUB_CACHE=str(tmp_path),
            HF_ENDPOINT=f"http://127.0.0.1:{server.server_address[1]}",
            no_proxy="127.0.0.1",
        )
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == 2
    line = last_line(done.stderr)
    assert "secret/model is gated. Accept its terms" in line and "hf auth login" in line


def test_code_of_a_models_folder_is_not_run(qwen_dir, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(qwen_dir, folder)
    config = json.loads((folder / "config.json").read_text())
    ran = tmp_path / "ran"
    code = f"open({str(ran)!r}, 'w').close()\nclass Mine: ...\nclass MineConfig: ...\n"
    (folder / "modeling_mine.py").write_text(code)
    auto = {"AutoConfig": "modeling_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.Mine"}
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": auto}))
    load_policy(folder)  # as the Qwen2 that it is
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": auto, "model_type": "mine"}))
    with pytest.raises(ValueError, match=f"{folder}.* config.json"):
        load_policy(folder)
    assert not ran.exists()
