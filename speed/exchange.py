"""What an exchange among n agents costs, and what breaks first: a simulation with costs measured on this machine.

    python speed/exchange.py                                  # bytes, and a step at n = 2, 4, 16, 64
    python speed/exchange.py --tokenizer MODEL_DIR            # retokenizing with that model's tokenizer
    python speed/exchange.py --check 2 4 8                    # the zoo on this CPU: simulated and real steps

Measured: the bytes of rollouts, lessons and results; Ray's object store; retokenizing; the `math` verifier; and the
trainer, the real one, with an executor that hands out ready-made rollouts in place of models. Sampling and learning are
the estimates of `hacrl train --dry-run`. Where n agents use too many rollouts for this machine, the trainer is measured
on fewer prompts.
"""

import argparse
import json
import pickle
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from process import add_process_options, restart_with_environment

QWEN3_17B = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
}  # fmt: skip
"""The shape of Qwen3-1.7B, from its published config.json."""
MOST_USES = 250_000
"""Rollouts times learners in one simulated step."""


@dataclass(frozen=True)
class Setting:
    title: str
    config: dict[str, Any]
    tokens: int
    """Of a completion."""
    text: str
    """Of a completion."""
    verifier: str

    def of(self, agents: int, **changes: Any) -> Any:
        """The config of so many equal agents. As many updates a step for any number of them."""
        from hacrl.config import RunConfig

        config = {**self.config, **changes}
        rollouts = agents * config["prompts_per_step"] * config["num_generations"]
        model = config.pop("model")
        return RunConfig.from_dict(
            {
                "algorithm": {"name": "hacpo"},
                "agents": [{"id": f"agent{k}", "model": model} for k in range(agents)],
                "rollouts_per_update": max(rollouts // 4, 1),
                **config,
            }
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, nargs="+", default=[2, 4, 16, 64])
    parser.add_argument("--group", type=int, help="rollouts of a prompt, of all agents together; else as many of each")
    parser.add_argument("--tokenizer", default="zoo:qwen3-bpe", help="a model whose tokenizer reads others' text")
    parser.add_argument("--network", type=float, default=1.25e9, help="bytes a second of a node's link (10 Gbit/s)")
    parser.add_argument("--check", type=int, nargs="+", help="compare with real runs of so many zoo agents, and stop")
    parser.add_argument("--json", type=Path)
    add_process_options(parser)
    options = parser.parse_args()
    restart_with_environment(options.malloc, options.threads)

    import torch
    from harness import machine, print_table

    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        zoo, large = settings(folder)
        if options.check:
            rows = [check(zoo, n, folder) for n in options.check]
            columns = ["agents", "trainer", "a step, simulated", "CPU time / cores", "elapsed", "CPU / simulated"]
            print_table(f"Seconds; {zoo.title}; {machine()}", columns, rows)
            return
        print(f"A look at rollouts takes {look_share():.2f} of a forward and a backward pass (zoo:llama-plus).")
        exchanged = demo_bytes(folder)
        rows = [[what, f"{size:,.0f}"] for what, size in exchanged.items()]
        print_table("Bytes of what travels in a step of the demo (pickle 5)", ["", "bytes"], rows)
        results = {"bytes": exchanged}
        for setting in (zoo, large):
            costs = measure(setting, options.tokenizer)
            rows = [[name, f"{value:.3g}"] for name, value in costs.items()]
            print_table(f"Measured; {setting.title}; {machine()}", ["", ""], rows)
            table = {n: step(setting, n, options.group, costs, options.network, folder) for n in options.agents}
            parts = [part for part in next(iter(table.values())) if not part.endswith("GB")]
            exchange = [part for part in parts if not part.endswith("estimate")]
            rows = [[part, *(f"{table[n][part]:,.2f}" for n in table)] for part in next(iter(table.values()))]
            whole = {n: sum(table[n][part] for part in parts) for n in table}
            spent = {n: sum(table[n][part] for part in exchange) for n in table}
            rows.append(["a step", *(f"{whole[n]:,.1f}" for n in table)])
            rows.append(["of it sampling", *(f"{table[n][parts[0]] / whole[n]:.0%}" for n in table)])
            rows.append(["of it the exchange", *(f"{spent[n] / whole[n]:.0%}" for n in table)])
            rows.append(["largest of the exchange", *(max(exchange, key=table[n].__getitem__) for n in table)])
            print_table(f"Seconds of a step; {setting.title}", ["", *(f"n = {n}" for n in table)], rows)
            results[setting.title] = {"costs": costs, "steps": table}
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def settings(folder: Path) -> tuple[Setting, Setting]:
    """Zoo agents with a core each, and Qwen3-1.7B's shape with an H200 each; rows whose answers are yes."""
    from transformers import Qwen3Config

    Qwen3Config(**QWEN3_17B).save_pretrained(folder / "qwen3-1.7b")
    rows = [json.dumps({"prompt": f"{'question ' * 20}{i}", "answer": "yes"}) + "\n" for i in range(1024)]
    (folder / "train.jsonl").write_text("".join(rows), encoding="utf-8")
    common = {"task": {"train": str(folder / "train.jsonl"), "reward": "exact"}, "execution": "ray"}
    zoo = {"prompts_per_step": 64, "num_generations": 4, "max_prompt_length": 10, "max_completion_length": 24}
    large = {"prompts_per_step": 128, "num_generations": 8, "max_prompt_length": 256, "max_completion_length": 1024}
    return (
        Setting(
            "zoo:llama-plus, a CPU core each, 64 x 4 x 24 tokens",
            {"model": "zoo:llama-plus", "device": "cpu", **common, **zoo},
            24,
            "23+98=121 121-5=116; 16",
            "exact",
        ),
        Setting(
            "Qwen3-1.7B, an H200 each, 128 x 8 x 1024 tokens",
            {"model": str(folder / "qwen3-1.7b"), "device": "cuda", "dtype": "bfloat16", **common, **large},
            1024,
            "So the answer to this part is $x_1 = 25$, and we go on with the rest of it. " * 50 + r"\boxed{12}",
            "math",
        ),
    )


# --- bytes -----------------------------------------------------------------------------------------


def demo_bytes(folder: Path) -> dict[str, float]:
    """Of a real step of the demo, as Ray's executor sends it."""
    from hacrl.config import RunConfig
    from hacrl.execution.local import LocalExecutor
    from hacrl.learners.lesson import LearnResult, Lesson

    seen: list[tuple[list[Lesson], list[LearnResult]]] = []

    class Recording(LocalExecutor):
        def learn(self, lessons: Any) -> Any:
            results = super().learn(lessons)
            seen.append((lessons, [result.value for result in results]))
            return results

    config = RunConfig.load("demo", ["algorithm.name=hacpo", "task.eval_size=1", f"output_dir={folder}/demo"])
    trainer = trainer_of(config, Recording(config))
    trainer.step = 1
    trainer.train_step()
    ((lessons, results),) = seen
    rollouts = [rollout for rollout in lessons[0].rollouts if rollout.source == 0]
    count, tokens = len(rollouts), sum(rollout.num_tokens for rollout in rollouts)
    size = size_of(rollouts)
    rows = [(0, place) for place in range(len(lessons[0].rollouts))]
    lesson = size_of((replace(lessons[0], rollouts=[]), rows))
    return {
        f"rollouts of one agent: {count} with {tokens:,} tokens": size,
        "a rollout": size / count,
        "a token": size / tokens,
        f"a lesson, without its {len(rows)} rollouts": lesson,
        "of it for each rollout": lesson / len(rows),
        "a result": size_of(results[0]),
        "of it for each rollout used": size_of(results[0]) / len(rows),
    }


def size_of(value: Any) -> int:
    return len(pickle.dumps(value, protocol=5))


def memory_of(rollouts: list[Any]) -> int:
    """What they take in the process that has unpickled them."""
    packed = pickle.dumps(rollouts, protocol=5)
    tracemalloc.start()
    unpacked = pickle.loads(packed)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del unpacked
    return size


def rollouts_of(setting: Setting, count: int, source: int = 0) -> list[Any]:
    """Rollouts whose lists are their own, as after sampling."""
    import random

    from hacrl.rollouts.rollout import Rollout

    rng = random.Random(source)
    most = 19 if setting.tokens < 100 else 150_000
    return [
        Rollout(
            step=1, prompt_id=str(i // 8), prompt="question " * 20 + str(i // 8), prompt_index=i // 8, source=source,
            index=i % 8, text=setting.text + str(i), token_ids=[rng.randrange(most) for _ in range(setting.tokens)],
            logps=[-rng.random() for _ in range(setting.tokens)], finish_reason="stop", ended=True,
            special_inside=False, vocabulary="v" * 64, policy_version=1, reward=1.0,
        )
        for i in range(count)
    ]  # fmt: skip


# --- costs, each measured by itself ----------------------------------------------------------------


def measure(setting: Setting, tokenizer: str) -> dict[str, float]:
    """Seconds of each rollout."""
    rollouts = rollouts_of(setting, 256)
    put, get = store_seconds(rollouts)
    return {
        "bytes of a rollout": size_of(rollouts) / len(rollouts),
        "bytes in memory": memory_of(rollouts) / len(rollouts),
        "put into the object store": put / len(rollouts),
        "taken out of it": get / len(rollouts),
        "retokenized": retokenizing_seconds(setting, tokenizer),
        f"verified ({setting.verifier}, 2 processes)": verifying_seconds(setting),
    }


def best(work: Any, repeats: int = 5, clock: Callable[[], float] = time.perf_counter) -> float:
    """The quickest of several: others use this machine too."""
    times = []
    for _ in range(repeats):
        start = clock()
        work()
        times.append(clock() - start)
    return min(times)


def store_seconds(rollouts: list[Any]) -> tuple[float, float]:
    """Into Ray's object store, and out of it in another process."""
    import os

    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")

    @ray.remote
    class Taker:
        def take(self, rollouts: Any = None) -> None:
            pass

    try:
        taker: Any = Taker.remote()
        ray.get(taker.take.remote())
        call = best(lambda: ray.get(taker.take.remote()))
        put = best(lambda: ray.put(rollouts))

        def once() -> float:
            reference = ray.put(rollouts)
            start = time.perf_counter()
            ray.get(taker.take.remote(reference))
            return time.perf_counter() - start

        return put, max(min(once() for _ in range(5)) - call, 0.0)
    finally:
        ray.shutdown()


def retokenizing_seconds(setting: Setting, model: str) -> float:
    from hacrl.agents.loading import load_tokenizer
    from hacrl.config import AgentConfig
    from hacrl.rollouts.retokenize import Dropped, Retokenizer

    reader = Retokenizer(load_tokenizer(AgentConfig(id="reader", model=model)), 0, 10**9)
    rollouts = rollouts_of(setting, 64)

    def read() -> None:
        for rollout in rollouts:
            with suppress(Dropped):  # found out at the end, by the comparison of texts
                reader(rollout)

    return best(read, clock=time.process_time) / len(rollouts)


def verifying_seconds(setting: Setting) -> float:
    from hacrl.tasks.verify import Verifier

    texts = [setting.text] * 128
    columns = {"answer": ["12"] * len(texts)}
    with Verifier([(setting.verifier, 1.0)], workers=2) as verifier:
        return best(lambda: verifier.score([""] * len(texts), texts, columns), repeats=3) / len(texts)


def look_share() -> float:
    """What a learner spends to see whether a foreign rollout has a gradient, over what it spends on the gradient."""
    import torch
    from harness import forced_agent, problems_for

    agent = forced_agent("zoo:llama-plus", prompts=32, generations=8, tokens=24)
    problems = problems_for(agent, 32)
    rollouts = agent.sample(problems, 0, 0)
    texts = [agent.reader.prompt_ids(problems[r.prompt_index]) for r in rollouts], [r.token_ids for r in rollouts]

    def gradient() -> None:
        with agent.learner.policy.driven():
            agent.learner.policy.score(*texts, 1.0).logp_NT.sum().backward()

    def look() -> None:
        with torch.no_grad():
            agent.learner.policy.score(*texts, 1.0)

    return best(look, clock=time.process_time) / best(gradient, clock=time.process_time)


# --- the trainer, with ready-made rollouts ---------------------------------------------------------


class ReadyMade:
    """An executor without models: every second rollout is right, every ratio is inside the band."""

    def __init__(self, config: Any, setting: Setting) -> None:
        self.config, self.setting = config, setting
        self.peak_memory: list[float | None] = [None] * len(config.agents)
        self.made = 0.0
        """Seconds that went into making rollouts and results."""
        (self.model,) = rollouts_of(setting, 1)

    def sample(self, problems: Any, step: int, sampling_round: int) -> Any:
        from hacrl.execution.executor import Timed

        start = time.process_time()
        rollouts = [
            [
                replace(
                    self.model, prompt_id=problem.id, prompt=problem.prompt, prompt_index=place, source=k, index=index,
                    text=f"{self.setting.text}\n{'yes' if (k + index) % 2 else 'no'}", reward=None, verdict={},
                )
                for place, problem in enumerate(problems)
                for index in range(self.config.agents[0].num_generations)
            ]
            for k in range(len(self.config.agents))
        ]  # fmt: skip
        self.made += time.process_time() - start
        return [Timed(own, 0.0) for own in rollouts]

    def learn(self, lessons: Any) -> Any:
        import numpy as np

        from hacrl.execution.executor import Timed
        from hacrl.learners.lesson import LearnResult

        start = time.process_time()
        names = ("log_ratio", "logp_sum", "num_tokens", "omega", "weight", "objective", "mean_weight", "update")
        results = []
        for lesson in lessons:
            size = len(lesson.rollouts)
            records = {name: np.full(size, 0.5) for name in names}
            records |= {"row": np.arange(size), "advantage": lesson.advantage_N.numpy(), "kept": np.ones(size, bool)}
            records |= {"lower": np.full(size, 0.8), "upper": np.ones(size)}
            counts = {"updates": 4, "tokens_trained": 0, "tokens_forward": 0, "nonfinite_updates": 0}
            results.append(LearnResult(records, counts))
        self.made += time.process_time() - start
        return [Timed(result, 0.0) for result in results]


class Nobody:
    def on_phase(self, phase: str) -> None: ...
    def on_metrics(self, step: int, metrics: dict[str, Any]) -> None: ...


def trainer_of(config: Any, executor: Any) -> Any:
    from hacrl.tasks import build_task
    from hacrl.training.run_dir import RunDir
    from hacrl.training.trainer import Trainer

    task, _ = build_task(config.task, config.seed)
    return Trainer(config, task, executor, RunDir.create(config), Nobody())


def trainer_costs(config: Any, setting: Setting, folder: Path) -> tuple[float, float]:
    """Seconds of what the trainer does by itself in a step, and the bytes of the rollouts' file."""
    prompts, uses = config.prompts_per_step, len(config.agents) * config.rollouts_per_step // config.prompts_per_step
    many = max(min(prompts, MOST_USES // uses), 4)
    few, most = (trainer_run(config, setting, count, folder) for count in (many // 2, many))
    # A straight line through both sizes.
    seconds, size = (y + (y - x) / (many - many // 2) * (prompts - many) for x, y in zip(few, most, strict=True))
    return seconds, size


def trainer_run(config: Any, setting: Setting, prompts: int, folder: Path) -> tuple[float, float]:
    """In CPU time, because others use this machine too."""
    where = tempfile.mkdtemp(dir=folder)
    config = config.model_copy(update={"prompts_per_step": prompts, "output_dir": f"{where}/run"})
    executor = ReadyMade(config, setting)
    trainer = trainer_of(config, executor)
    times = []
    for number in (1, 2, 3):
        trainer.step, executor.made = number, 0.0
        start = time.process_time()
        trainer.run.append_metrics(trainer.train_step())
        times.append(time.process_time() - start - executor.made)
    return min(times), trainer.run.step_file("rollouts", 3).stat().st_size


# --- a step ----------------------------------------------------------------------------------------


def step(
    setting: Setting, n: int, group: int | None, costs: dict[str, float], network: float, folder: Path
) -> dict[str, float]:
    """Seconds of each part, one after the other; agents work at the same time, the trainer is one process."""
    from hacrl.training.plan import plan

    config = setting.of(n, **({"num_generations": max(group // n, 1)} if group else {}))
    agent = plan(config)[0]
    own, everybodys = agent.rollouts_sampled, config.rollouts_per_step
    size, memory, put, get, retokenized, verified = costs.values()
    trainer, file = trainer_costs(config, setting, folder)
    return {
        "sampling, estimate": agent.sampling,
        "rollouts to the trainer": everybodys * max(get, size / network),
        "verifier": everybodys * verified,
        "trainer: lessons, figures, files": trainer,
        "rollouts into the store": everybodys * put,
        "from there to all nodes": n * everybodys * size / network,
        "out of the store": everybodys * get,
        "retokenizing": (everybodys - own) * retokenized,
        "learning, estimate": agent.learning,
        "rollouts in each process, GB": everybodys * memory / 1e9,
        "file of the rollouts, GB": file / 1e9,
    }


def check(setting: Setting, n: int, folder: Path) -> list[str]:
    """Real steps of n zoo agents in one process on this machine, against the simulation of the same."""
    import statistics

    import torch

    from hacrl.run import train
    from hacrl.training.plan import plan, step_seconds

    alike = setting.of(n, execution="local")
    trainer, _ = trainer_costs(alike, setting, folder)
    simulated = step_seconds(alike, plan(alike)) + trainer
    used, walls, cores = [], [], torch.get_num_threads()
    for steps in (2, 6):
        config = setting.of(
            n, execution="local", task={"name": "arithmetic", "eval_size": 1}, max_prompt_length=32,
            max_completion_length=48, max_steps=steps, eval_every=0, save_every=0, learning_rate=0.0,
            output_dir=f"{folder}/check-{n}-{steps}",
        )  # fmt: skip
        start = time.process_time()
        lines = (train(config).run_dir / "metrics.jsonl").read_text("utf-8").splitlines()
        used.append(time.process_time() - start)
        walls = [json.loads(line)["step_time"] for line in lines[2:]]
    torch.set_num_threads(cores)
    cpu = (used[1] - used[0]) / 4 / cores  # what both runs do but once is in both
    measured = [simulated, cpu, statistics.median(walls)]
    return [str(n), f"{trainer:.2f}", *(f"{seconds:.2f}" for seconds in measured), f"{cpu / simulated:.2f}"]


if __name__ == "__main__":
    main()
