"""Train the bundled tiny models: random weights, then supervised warm-up on worked arithmetic.

    python -m hacrl.agents.zoo.train --output models                     # all, one process each, on the GPU
    python -m hacrl.agents.zoo.train --output models --only llama-plus   # one, in this process
    python -m hacrl.agents.zoo.train --output models --device cpu --max-steps 2   # does it run?

Warm-up ends when sampled answers first solve the row's `target` share of the validation problems, so the zoo has
models at several stages of training, none of them finished. They also differ in what they practised
(`minus_share`): agents that are good at different things have something to learn from each other. The test split
is never read.

Every model is an ordinary Hugging Face folder in float16; its `warmup.json` says what it reached, and how.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    GPTNeoXConfig,
    LlamaConfig,
    Olmo2Config,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from hacrl.agents.zoo.tokenizers import build_tokenizer
from hacrl.tasks.arithmetic import ArithmeticTask, verify, worked_answer
from hacrl.tasks.problem import Problem


@dataclass(frozen=True)
class Row:
    name: str
    architecture: str
    tokenizer: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    minus_share: float
    """Share of practice chains that lean to subtraction; the task itself has 0.5."""
    target: float
    """Validation accuracy of sampled answers at which warm-up ends."""
    seed: int


ZOO = [
    # The state pair: the same model twice, with other weights and complementary practice.
    Row("llama-plus", "llama", "char", 96, 256, 3, 4, minus_share=0.10, target=0.33, seed=1),
    Row("llama-minus", "llama", "char", 96, 256, 3, 4, minus_share=0.90, target=0.33, seed=2),
    # The size pair.
    Row("llama-small", "llama", "char", 96, 256, 3, 4, minus_share=0.5, target=0.22, seed=3),
    Row("llama-large", "llama", "char", 160, 448, 4, 5, minus_share=0.5, target=0.42, seed=4),
    # Against llama-large, the gap pair.
    Row("llama-weak", "llama", "char", 96, 256, 3, 4, minus_share=0.5, target=0.08, seed=5),
    # With llama-plus, the model pair; all three, the team.
    Row("neox-pair", "gpt_neox", "pair", 128, 512, 3, 4, minus_share=0.90, target=0.28, seed=6),
    Row("qwen3-bpe", "qwen3", "bpe", 128, 384, 3, 4, minus_share=0.5, target=0.28, seed=7),
    # Another architecture with llama's tokenizer, so that architecture and tokenizer can be told apart.
    Row("olmo2-char", "olmo2", "char", 128, 384, 3, 4, minus_share=0.90, target=0.28, seed=8),
]

PAIRS = {
    "state": ["llama-plus", "llama-minus"],
    "size": ["llama-small", "llama-large"],
    "model": ["llama-plus", "neox-pair"],
    "gap": ["llama-weak", "llama-large"],
    "team": ["llama-plus", "neox-pair", "qwen3-bpe"],
}

NUM_PRACTICE = 100_000
NUM_VALIDATION = 1000
BATCH_SIZE = 256
LEARNING_RATE = 2e-3
LEARNING_RATE_WARMUP_STEPS = 100
WEIGHT_DECAY = 0.01
EVALUATE_EVERY = 10
MAX_COMPLETION_LENGTH = 64
IGNORED = -100


def build_config(row: Row, tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    shared = {
        "vocab_size": len(tokenizer),
        "hidden_size": row.hidden_size,
        "intermediate_size": row.intermediate_size,
        "num_hidden_layers": row.num_layers,
        "num_attention_heads": row.num_heads,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    head_dim = row.hidden_size // row.num_heads
    if row.architecture == "llama":
        return LlamaConfig(**shared, num_key_value_heads=row.num_heads)
    if row.architecture == "qwen3":
        return Qwen3Config(**shared, num_key_value_heads=row.num_heads, head_dim=head_dim)
    if row.architecture == "olmo2":
        return Olmo2Config(**shared, num_key_value_heads=row.num_heads)
    if row.architecture == "gpt_neox":
        return GPTNeoXConfig(**shared)
    raise ValueError(f"{row.name}: no architecture is called {row.architecture!r}")


def encode(problems: list[Problem], tokenizer: PreTrainedTokenizerFast) -> tuple[np.ndarray, np.ndarray]:
    """Right-padded token ids and labels, both problems x length; only the answer and its end are learned.

    Prompt and answer are encoded apart, as they are in a rollout.
    """
    prompts = tokenizer([f"{tokenizer.bos_token}{problem.prompt}" for problem in problems])["input_ids"]
    answers = tokenizer([f"{worked_answer(problem)}{tokenizer.eos_token}" for problem in problems])["input_ids"]
    length = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    ids = np.full((len(problems), length), tokenizer.pad_token_id, dtype=np.int64)
    labels = np.full((len(problems), length), IGNORED, dtype=np.int64)
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        ids[index, :end] = prompt + answer
        labels[index, len(prompt) : end] = answer
    return ids, labels


def warm_up(row: Row, output: Path, device: str, max_seconds: float, max_steps: int) -> None:
    started = time.monotonic()
    torch.manual_seed(row.seed)
    torch.set_float32_matmul_precision("high")
    tokenizer = build_tokenizer(row.tokenizer)
    model = AutoModelForCausalLM.from_config(build_config(row, tokenizer), dtype=torch.float32)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.to(device).train()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())

    practice = ArithmeticTask(row.seed, minus_share=row.minus_share)
    num_practice = min(NUM_PRACTICE, max_steps * BATCH_SIZE)
    ids_NT, labels_NT = (
        torch.from_numpy(array).to(device) for array in encode(practice.train(0, num_practice), tokenizer)
    )
    validation = ArithmeticTask().heldout("validation", NUM_VALIDATION)
    print(
        f"{row.name}: {num_parameters:,} parameters, data after {time.monotonic() - started:.0f} s",
        flush=True,
    )

    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY, fused=True
    )
    rng = np.random.default_rng(row.seed)
    order = np.empty(0, dtype=np.int64)
    curve: list[tuple[int, float]] = []
    step, accuracy = 0, 0.0
    while step < max_steps and time.monotonic() - started < max_seconds:
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / LEARNING_RATE_WARMUP_STEPS)
        if len(order) < BATCH_SIZE:
            order = np.concatenate([order, rng.permutation(len(ids_NT))])
        batch, order = torch.from_numpy(order[:BATCH_SIZE]).to(device), order[BATCH_SIZE:]
        loss = answer_loss(model, ids_NT[batch], labels_NT[batch])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % EVALUATE_EVERY == 0 or step == max_steps:
            accuracy = rewards(model, tokenizer, validation, do_sample=True).mean().item()
            curve.append((step, accuracy))
            seconds = time.monotonic() - started
            print(f"step {step:5d}  loss {loss.item():.3f}  sampled {accuracy:.3f}  {seconds:.0f} s", flush=True)
            if accuracy >= row.target:
                break

    folder = output / row.name
    save(model, tokenizer, folder)
    # What counts is what was stored, in float16.
    stored = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    sampled = rewards(stored, tokenizer, validation, do_sample=True)
    right = rewards(stored, tokenizer, validation)
    minus = np.array([problem.columns["num_minus"] / problem.columns["num_operators"] for problem in validation])
    result = {
        **asdict(row),
        "parameters": num_parameters,
        "steps": step,
        "seconds": round(time.monotonic() - started, 1),
        "reached_target": accuracy >= row.target,
        "sampled_accuracy": sampled.mean().item(),
        "validation_accuracy": right.mean().item(),
        "validation_accuracy_mostly_plus": right[minus < 0.5].mean().item(),
        "validation_accuracy_mostly_minus": right[minus > 0.5].mean().item(),
        "curve": curve,
    }
    (folder / "warmup.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"{row.name}: {result['validation_accuracy']:.3f} greedy, {result['seconds']} s", flush=True)


def answer_loss(model: PreTrainedModel, ids_BT: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    # Padding is on the right, where causal attention does not look: no mask is needed.
    logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits_BTV[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten(), ignore_index=IGNORED
    )


def rewards(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, problems: list[Problem], do_sample: bool = False
) -> np.ndarray:
    """The verdict on one answer to each problem: the greedy one, or one sampled at temperature 1."""
    prompts = [f"{tokenizer.bos_token}{problem.prompt}" for problem in problems]
    inputs = tokenizer(prompts, padding=True, return_tensors="pt").to(model.device)
    model.eval()
    ids_BT = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        **({"do_sample": True, "top_k": 0} if do_sample else {"do_sample": False}),
        max_new_tokens=MAX_COMPLETION_LENGTH,
    )
    model.train()
    texts = tokenizer.batch_decode(ids_BT[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return np.array([verify(text, problem.answer) for text, problem in zip(texts, problems, strict=True)])


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    model.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def warm_up_all(rows: list[Row], output: Path, logs: Path, arguments: list[str]) -> bool:
    """One process a model, all at once; True when every one ended well."""
    logs.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    processes = {}
    for row in rows:
        command = [sys.executable, "-m", "hacrl.agents.zoo.train", "--only", row.name, *arguments]
        with (logs / f"{row.name}.log").open("w") as log:
            processes[row.name] = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    failed = [name for name, process in processes.items() if process.wait() != 0]
    for name in failed:
        print(f"{name} failed, the end of its log:\n{(logs / f'{name}.log').read_text()[-2000:]}\n")
    print_summary([row for row in rows if row.name not in failed], output)
    return not failed


def print_summary(rows: list[Row], output: Path) -> None:
    names = ("model", "parameters", "MB", "target", "sampled", "greedy", "mostly +", "mostly -", "steps", "seconds")
    print("".join(f"{name:>11}" for name in names))
    for row in rows:
        result = json.loads((output / row.name / "warmup.json").read_text())
        size = sum(file.stat().st_size for file in (output / row.name).iterdir()) / 1e6
        accuracies = [result[f"{kind}_accuracy"] for kind in ("sampled", "validation")]
        accuracies += [result[f"validation_accuracy_mostly_{sign}"] for sign in ("plus", "minus")]
        print(
            f"{row.name:>11}{result['parameters']:>11,}{size:>11.2f}{row.target:>11.2f}"
            + "".join(f"{accuracy:>11.3f}" for accuracy in accuracies)
            + f"{result['steps']:>11}{result['seconds']:>11.0f}"
            + ("" if result["reached_target"] else "  missed its target")
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the bundled tiny models.")
    parser.add_argument("--output", type=Path, required=True, help="the folder of model folders")
    parser.add_argument("--only", choices=[row.name for row in ZOO], help="this model, in this process")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--max-seconds", type=float, default=300, help="time for one model, data included")
    parser.add_argument("--max-steps", type=int, default=20_000)
    parser.add_argument("--logs", type=Path, help="where the processes log to (default: OUTPUT-logs)")
    options = parser.parse_args()
    if options.only:
        row = next(row for row in ZOO if row.name == options.only)
        warm_up(row, options.output, options.device, options.max_seconds, options.max_steps)
        return
    logs = options.logs or options.output.with_name(f"{options.output.name}-logs")
    arguments = ["--output", str(options.output), "--device", options.device]
    arguments += ["--max-seconds", str(options.max_seconds), "--max-steps", str(options.max_steps)]
    if not warm_up_all(ZOO, options.output, logs, arguments):
        sys.exit(1)


if __name__ == "__main__":
    main()
