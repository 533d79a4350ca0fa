"""Two models learn together, from Python: rows as a list, a reward as a function, and the trained model opened again.

python examples/python/train_from_python.py
python examples/python/train_from_python.py --seed 1 --output runs/python-1
python examples/python/train_from_python.py --max-steps 60 --resume
"""

import argparse
import random
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

import hacrl

MODELS = ["zoo:llama-plus", "zoo:llama-minus"]
"""Tiny models that come with hacrl. They answer `47+38-19=` with `47+38=85;85-19=66;#66`, not always correctly."""


def problems(count: int, seed: int) -> list[dict[str, str]]:
    """Chains of two or three additions and subtractions whose totals stay between 0 and 99."""
    draw, rows = random.Random(seed), []
    for _ in range(count):
        total = draw.randint(0, 99)
        prompt = str(total)
        for _ in range(draw.choice([2, 3])):
            step = draw.choice([n for n in range(-total, 100 - total) if n])
            prompt, total = f"{prompt}{step:+}", total + step
        rows.append({"prompt": f"{prompt}=", "answer": str(total)})
    return rows


def right(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """1 for the right number after the last `#`."""
    return [float(text.rpartition("#")[2] == gold) for text, gold in zip(completions, answer, strict=True)]


def at_most(characters: int) -> Any:
    """A reward that is 1 for short completions: functions may use what is around them."""

    def short(completions: list[str], **columns: Any) -> list[float]:
        return [float(len(text) <= characters) for text in completions]

    return short


def main() -> None:
    parser = argparse.ArgumentParser(description="Train two models together.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-steps", type=int, default=40)
    parser.add_argument("--output", default="runs/python", help="new folder of the run")
    parser.add_argument("--resume", action="store_true", help="continue the run in that folder")
    options = parser.parse_args()

    run = hacrl.train(
        agents=MODELS,
        train=problems(4000, seed=options.seed),
        eval=problems(300, seed=-1),
        reward=[right, (at_most(60), 0.1)],
        prompts_per_step=32,
        num_generations=4,
        rollouts_per_update=64,
        max_prompt_length=32,
        max_completion_length=48,
        learning_rate=1e-4,
        max_steps=options.max_steps,
        eval_every=20,
        seed=options.seed,
        output_dir=options.output,
        resume=options.resume,
    )

    for name, agent in run.agents.items():
        start, final = agent.summary["start_accuracy"], agent.summary["final_accuracy"]
        print(f"{name}: {start:.3f} -> {final:.3f} on held-out problems")

    folder = run.agents["llama-minus"].model_dir
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    question = [{"role": "user", "content": "47+38-19="}]
    asked = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**asked, max_new_tokens=48, do_sample=False)[0]
    print(f"{folder} answers {tokenizer.decode(answer, skip_special_tokens=True)}")


if __name__ == "__main__":
    main()
