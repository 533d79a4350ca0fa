"""A teacher behind vLLM's own server: its log-probabilities are those of the model that it serves."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hacrl.agents.loading import ZOO
from hacrl.config import RunConfig
from hacrl.config.sources import SourceConfig
from hacrl.rollouts.rollout import Rollout
from hacrl.run import train
from hacrl.sources.endpoint import Endpoint
from hacrl.tasks.arithmetic import ArithmeticTask

MODEL = ZOO / "llama-large"
EXAMPLE = Path(__file__).parents[2] / "examples" / "teacher" / "run.yaml"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that reports log-probabilities at the temperature of the request."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    options = {"model": MODEL, "served-model-name": "zoo", "host": "127.0.0.1", "port": port, "dtype": "float32",
               "max-model-len": 96, "max-num-seqs": 16, "logprobs-mode": "processed_logprobs"}  # fmt: skip
    arguments = [f"--{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", *arguments]
    log = tmp_path_factory.mktemp("server") / "log"
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    with log.open("wb") as output:
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    url = f"http://127.0.0.1:{port}/v1"
    try:
        while True:
            assert server.poll() is None, log.read_text()
            with suppress(OSError), urllib.request.urlopen(f"{url}/models"):
                break
            time.sleep(0.2)
        yield url
    finally:
        os.killpg(server.pid, 15)
        server.wait()


def source(url: str, **settings: Any) -> dict[str, Any]:
    endpoint = {"url": url, "model": "zoo", "logprobs": "at_temperature"}
    return {"id": "teacher", "endpoint": endpoint | settings.pop("endpoint", {}), "num_generations": 4, **settings}


def sampled(url: str, folder: Path, **settings: Any) -> tuple[list[Rollout], str]:
    problems = ArithmeticTask(0).train(0, 6)
    teacher = Endpoint(SourceConfig.model_validate(source(url, **settings)), 1, 0, 40)
    try:
        (remark,) = teacher.prepare(problems, True, folder)
        return teacher.give(problems, 1, 0).rollouts, remark
    finally:
        teacher.close()


def logps(rollout: Rollout, temperature: float = 1.0, api: str = "chat") -> list[float]:
    """What the model finds itself, with transformers; the end of turn is included if the rollout has it."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    prompt, tokens = tokenizer.encode(str(rollout.prompt)), tokenizer.encode(rollout.text)
    prompt = [tokenizer.bos_token_id] * (api == "chat") + prompt  # the template of the zoo
    tokens += [tokenizer.eos_token_id] * rollout.ended
    with torch.no_grad():
        logits_TV = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return (logits_TV / temperature).log_softmax(-1)[range(len(tokens)), tokens].tolist()


@pytest.mark.parametrize(("api", "temperature"), [("chat", 1.0), ("chat", 1.5), ("completions", 0.7)])
def test_log_probabilities_are_those_of_the_model(url: str, tmp_path: Path, api: str, temperature: float) -> None:
    settings = {"temperature": temperature, "endpoint": {"api": api}}
    rollouts, remark = sampled(url, tmp_path, **settings)
    assert "its log-probabilities are used" in remark
    assert len({rollout.text for rollout in rollouts}) > 6
    assert all(rollout.ended == (rollout.finish_reason == "stop") for rollout in rollouts)
    whole = [rollout for rollout in rollouts if rollout.logps]  # others have special tokens, which the text leaves out
    assert len(whole) >= (24 if (api, temperature) == ("chat", 1.0) else 12)
    for rollout in whole:
        assert rollout.logps == pytest.approx(logps(rollout, temperature, api), abs=1e-3)
    assert any(rollout.ended for rollout in whole)
    again, _ = sampled(url, tmp_path / "another", **settings)
    assert [rollout.text for rollout in again] == [rollout.text for rollout in rollouts]


def test_what_limits_and_stop_strings_cut_off_has_no_end_of_turn(url: str, tmp_path: Path) -> None:
    cut, _ = sampled(url, tmp_path / "cut", max_completion_length=3)
    stopped, _ = sampled(url, tmp_path / "stopped", endpoint={"stop": [";"]})
    assert {rollout.finish_reason for rollout in cut} == {"length"}
    assert any(rollout.finish_reason == "stop" and not rollout.ended for rollout in stopped)
    for rollout in (*cut, *stopped):
        assert rollout.logps == pytest.approx(logps(rollout), abs=1e-3)


def test_a_run_learns_from_it(url: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "algorithm": {"name": "hacpo"},
        "agents": [{"id": "llama", "model": "zoo:llama-large"}],
        "sources": [source(url)],
        "task": {"name": "arithmetic", "eval_size": 16},
        "prompts_per_step": 6,
        "num_generations": 4,
        "rollouts_per_update": 48,
        "max_prompt_length": 32,
        "max_completion_length": 40,
        "learning_rate": 1e-4,
        "max_steps": 2,
        "eval_every": 0,
        "save_every": 0,
        "output_dir": str(tmp_path / "run"),
    }
    run = train(RunConfig.from_dict(settings)).run_dir
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][1:]
    assert [step["teacher/rollouts"] for step in steps] == [24, 24]
    assert all(
        step["teacher/without_logps"] == step["teacher/failed"] == step["teacher/left_out"] == 0 for step in steps
    )
    first = [json.loads(line) for line in (run / "rollouts" / "step-000001.jsonl").read_text().splitlines()]
    ratios = [line["learners"]["llama"].get("ratio") for line in first if line["source"] == "teacher"]
    ratios = [ratio for ratio in ratios if ratio is not None]
    assert ratios
    assert ratios == pytest.approx([1.0] * len(ratios), abs=1e-3)  # the learner is still the teacher's model


def test_the_example(url: str, tmp_path: Path) -> None:
    """With fewer and smaller steps: the teacher answers the prompts for which no own answer was right."""
    changes = ["max_steps=2", "prompts_per_step=8", "task.eval_size=16", f"output_dir={tmp_path / 'run'}"]
    server = [f"sources.teacher.endpoint.url={url}", "sources.teacher.endpoint.model=zoo"]
    run = train(RunConfig.load(str(EXAMPLE), [*changes, *server])).run_dir
    asked = 0
    for step in (1, 2):
        text = (run / "rollouts" / f"step-{step:06d}.jsonl").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        solved = {line["prompt_id"] for line in lines if line["source"] == "small" and line["reward"] == 1}
        given = [line["prompt_id"] for line in lines if line["source"] == "teacher"]
        assert sorted(given) == sorted(2 * list({line["prompt_id"] for line in lines} - solved))
        asked += len(given)
    assert asked
