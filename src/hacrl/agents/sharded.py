"""One agent in several processes, each with a part of every weight, gradient and moment (FSDP).

`RankAgent` is the agent in one of them, whoever started it: `ShardedAgent` starts them on this machine and asks them,
`RayExecutor` does on a cluster.
"""

import logging
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from hacrl.agents.agent import Agent, Traits
from hacrl.agents.loading import load_model, load_tokenizer, resolve_device
from hacrl.algorithms import Algorithm, Reading
from hacrl.config import AgentConfig
from hacrl.decoder.policy import Policy, local
from hacrl.decoder.scoring import TokenLogprobs
from hacrl.errors import TrainingDiverged, UserError
from hacrl.learners.imitation import Imitator
from hacrl.learners.learner import Learner, LearnResult, Lesson
from hacrl.learners.lora import with_same_weights
from hacrl.learners.ranks import join_team
from hacrl.learners.updating import read_state
from hacrl.learners.weights import MasterWeights
from hacrl.rollouts.engines import engine_of
from hacrl.rollouts.rollout import Rollout
from hacrl.rollouts.vllm import Sampler
from hacrl.seeding import derive_seed
from hacrl.tasks.problem import Problem

SHARED = ("sample", "answer")
"""Calls of which each rank answers its share; the first rank answers all others."""


@dataclass(frozen=True)
class Member:
    """What one process has to know to be a rank of an agent, or all of it."""

    config: AgentConfig
    index: int
    algorithm: Algorithm
    seed: int
    trace: bool
    rank: int
    meeting_point: str

    def agent(self, sampler: Sampler | None = None) -> Agent:
        if self.config.fsdp > 1:
            return RankAgent(self)
        return Agent(self.config, self.index, self.algorithm, self.seed, self.trace, sampler=sampler)

    def ask(self, agent: Agent, name: str, *args: Any) -> Any:
        """This rank's part of the answer to a call."""
        answer = getattr(agent, name)(*args)
        return answer if name in SHARED or self.rank == 0 else None


def joined(name: str, parts: list[Any]) -> Any:
    """The answer to a call, from the parts of all ranks."""
    if name == "sample":
        return in_order([rollout for part in parts for rollout in part])
    if name == "answer":
        return [parts[i % len(parts)][i // len(parts)] for i in range(sum(map(len, parts)))]
    return parts[0]


class RankAgent(Agent):
    """An agent of which this process holds a part. All ranks get the same calls; each answers for its share."""

    def __init__(self, member: Member) -> None:
        logging.getLogger("hacrl").disabled = member.rank > 0  # one warning is enough
        config, self.index, self.algorithm = member.config, member.index, member.algorithm
        self.config, self.seed, self.adapter = config, derive_seed(member.seed, member.rank), None
        self.device = resolve_device(config.device)
        self.team = join_team(member.rank, config.fsdp, member.meeting_point, self.device)
        self.tokenizer = load_tokenizer(config)
        self.on_cpu = config.model_copy(update={"device": "cpu"})
        self.model = load_model(self.on_cpu)
        self.read_tokens()
        self.whole = WholeModel(self, with_same_weights(self.model))
        policy = self._shard(self.model)
        self.whole.empty()
        self.weights = ShardedWeights(self.model, policy.dtype)
        reference = None
        if self.algorithm.beta or config.log_kl:
            reference = self._shard(load_model(self.on_cpu).requires_grad_(False)).score
        saves_work = config.fast and not member.trace
        self.learner = Learner(
            config, self.index, self.algorithm, self.weights, policy, reference, saves_work, self.team
        )
        self.imitator = Imitator(self.learner, self.algorithm.imitation, self.index, member.seed)

    def _shard(self, model: Any) -> Policy:
        """Distribute a model's layers over the ranks; a pass puts one layer after the other together."""
        policy = Policy(model, self.config, self.stop_ids, False, entropy_gradient=self.algorithm.entropy_coef > 0)
        policy.side_by_side = False
        mesh = dist.init_device_mesh(self.device.type, (self.team.size,))
        options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": True}
        if policy.dtype != torch.float32:
            options["mp_policy"] = MixedPrecisionPolicy(policy.dtype, torch.float32)
        for module in [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)] + [model]:
            part: FSDPModule = fully_shard(module, **options)
            # The objective is a sum over rollouts, not a mean over ranks.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
        if policy.backbone is None:
            return policy
        score = policy.scorer

        def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
            scored = score(*args)
            return scored.logp_NT.clone(), scored.mask_NT, scored.entropy_NT.clone()  # FSDP warns of views

        model.score = forward
        register_fsdp_forward_method(model, "score")
        policy.scorer = lambda *args: TokenLogprobs(*model.score(*args))
        return policy

    def sample(self, problems: Sequence[Problem], step: int, sampling_round: int) -> list[Rollout]:
        own = list(range(len(problems)))[self.team.rank :: self.team.size]
        with self.whole.gathered():
            rollouts = super().sample([problems[i] for i in own], step, sampling_round) if own else []
        for rollout in rollouts:
            rollout.prompt_index = own[rollout.prompt_index]
        return rollouts

    def sample_ahead(self, problems: Sequence[Problem], step: int) -> list[Rollout]:
        rollouts = in_order(self.team.gather(self.sample(problems, step, 0)))
        self.learner.score_ahead(rollouts, [self.prompt_ids(problem) for problem in problems])
        return rollouts

    def answer(self, problems: Sequence[Problem], sampled: bool = False) -> list[str]:
        own = problems[self.team.rank :: self.team.size]
        with self.whole.gathered():
            return super().answer(own, sampled) if own else []

    def save(self, model_dir: Path, state_file: Path) -> None:
        state = self.weights.state_dict(self.model)
        if self.team.rank == 0:
            self.whole.model.save_pretrained(model_dir, state_dict=state)
            self.tokenizer.save_pretrained(model_dir)
        with state_of(state_file, self.team.rank).open("wb") as file:
            torch.save(self.state_dict(), file)
        dist.barrier()

    def load(self, model_dir: Path, state_file: Path) -> None:
        self.weights.load_state_dict(self.model, load_model(self.on_cpu, model_dir).state_dict())
        self.load_state_dict(read_state(state_of(state_file, self.team.rank), self.device))


def state_of(state_file: Path, rank: int) -> Path:
    """Where a rank keeps its part of the agent's state."""
    return state_file.with_suffix(f".rank{rank}") if rank else state_file


def in_order(rollouts: list[Rollout]) -> list[Rollout]:
    return sorted(rollouts, key=lambda rollout: (rollout.prompt_index, rollout.index))


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor put together, in every process; all must ask for it."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach().clone()


class WholeModel:
    """The agent's model with all weights in one process: while it samples, and not longer."""

    def __init__(self, agent: RankAgent, model: Any) -> None:
        self.agent, self.model = agent, model
        self.policy: Policy | None = None

    def empty(self) -> None:
        for parameter in self.model.parameters():
            parameter.data = torch.empty(0)
        if self.policy is not None and self.policy.backbone is not None and self.policy.backbone.lean is not None:
            for joined in self.policy.backbone.lean.joined:
                joined.release()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        agent = self.agent
        dtype = getattr(torch, agent.config.dtype)
        for parameter, shards in zip(self.model.parameters(), agent.model.parameters(), strict=True):
            parameter.data = whole(shards).to(dtype)
        if self.policy is None:
            self.model.to(agent.device).requires_grad_(False)
            self.policy = Policy(self.model, agent.config, agent.stop_ids)
            agent.engine = engine_of(self.policy, agent.tokenizer)
        elif self.policy.backbone is not None:
            self.policy.backbone.moved += 1
        try:
            yield
        finally:
            self.empty()


class ShardedWeights(MasterWeights):
    """This process's part of the weights: plain tensors on the memory of the sharded ones, always float32."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.working = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.separate = dtype != torch.float32
        self.weights = [nn.Parameter(local(parameter.detach())) for parameter in self.working]
        for weight in self.weights:
            weight.grad = torch.zeros_like(weight)

    def zero_grad(self) -> None:
        gradients: Any = self.gradients
        torch._foreach_zero_(gradients)
        for parameter in self.working:
            parameter.grad = None

    def collect(self) -> None:
        for parameter, gradient in zip(self.working, self.gradients, strict=True):
            if parameter.grad is not None:
                gradient += local(parameter.grad)
                parameter.grad = None

    def publish(self) -> None:
        """The model has the same memory."""

    def state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """The whole model in the first process, nothing in the others, which must ask for it too."""
        copies: dict[int, Tensor] = {}
        state: dict[str, Tensor] = {}
        for name, value in model.state_dict(keep_vars=True).items():
            if id(value) not in copies:  # tied weights stay tied
                gathered = whole(value)
                copies[id(value)] = gathered.cpu() if dist.get_rank() == 0 else torch.empty(0)
            state[name] = copies[id(value)]
        return state

    def load_state_dict(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            given = state[name].to(parameter.device)
            part = distribute_tensor(given, parameter.device_mesh, parameter.placements, src_data_rank=None)
            with torch.no_grad():
                local(parameter.detach()).copy_(part.to_local())


class ShardedAgent:
    """An agent whose ranks are processes on this machine."""

    def __init__(self, config: AgentConfig, index: int, algorithm: Algorithm, seed: int, trace: bool = False) -> None:
        self.config, self.index = config, index
        self.device = torch.device("cpu")  # that of this process's part of the work
        self.folder = tempfile.TemporaryDirectory(prefix="hacrl-")
        threads = str(max(torch.get_num_threads() // config.fsdp, 1))
        first = resolve_device(config.device)
        self.ranks: list[Connection] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.end = weakref.finalize(self, end_all, self.processes)
        for rank in range(config.fsdp):
            here, there = Pipe()
            start = "from hacrl.agents.sharded import main; main()"
            command = [sys.executable, "-c", start, str(there.fileno())]
            environment = os.environ | {"OMP_NUM_THREADS": threads}
            pass_fds = [there.fileno()]
            self.processes.append(subprocess.Popen(command, pass_fds=pass_fds, env=environment, start_new_session=True))
            there.close()
            device = f"cuda:{(first.index or 0) + rank}" if first.type == "cuda" else "cpu"
            own = config.model_copy(update={"device": device})
            tell(here, Member(own, index, algorithm, seed, trace, rank, f"file://{self.folder.name}/meeting"))
            self.ranks.append(here)
        self._answers()  # all have opened the model

    def check_prompts(self, problems: Sequence[Problem]) -> None:
        self._call("check_prompts", problems)

    def traits(self, problem: Problem) -> Traits:
        traits: Traits = self._call("traits", problem)
        return traits

    def sample(self, problems: Sequence[Problem], step: int, sampling_round: int) -> list[Rollout]:
        rollouts: list[Rollout] = self._call("sample", problems, step, sampling_round)
        return rollouts

    def sample_ahead(self, problems: Sequence[Problem], step: int) -> list[Rollout]:
        rollouts: list[Rollout] = self._call("sample_ahead", problems, step)
        return rollouts

    def answer(self, problems: Sequence[Problem], sampled: bool = False) -> list[str]:
        answers: list[str] = self._call("answer", problems, sampled)
        return answers

    def score(self, rollouts: Sequence[Rollout]) -> list[Reading | None]:
        readings: list[Reading | None] = self._call("score", rollouts)
        return readings

    def learn(self, lesson: Lesson) -> LearnResult:
        result: LearnResult = self._call("learn", lesson)
        return result

    def save(self, model_dir: Path, state_file: Path) -> None:
        self._call("save", model_dir, state_file)

    def load(self, model_dir: Path, state_file: Path) -> None:
        self._call("load", model_dir, state_file)

    def _call(self, name: str, *args: Any) -> Any:
        for connection in self.ranks:
            tell(connection, (name, args))
        return joined(name, self._answers())

    def _answers(self) -> list[Any]:
        """One of each rank. The first error ends them all: the others may be waiting for the one that failed."""
        answers: dict[Connection, Any] = {}
        while len(answers) < len(self.ranks):
            for ready in wait([connection for connection in self.ranks if connection not in answers]):
                assert isinstance(ready, Connection)
                try:
                    answers[ready] = hear(ready)
                except (EOFError, ConnectionError):
                    answers[ready] = RuntimeError(f"A process of agent {self.config.id} has ended.")
                if isinstance(answers[ready], Exception):
                    self.end()
                    raise answers[ready]
        return [answers[connection] for connection in self.ranks]


def tell(connection: Connection, what: Any) -> None:
    connection.send_bytes(pickle.dumps(what))  # send() would lend tensors, which takes both processes


def hear(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())


def end_all(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
        process.wait()


def serve(connection: Connection) -> None:
    """Be a rank: answer calls until nobody is there to make any."""
    member: Member = hear(connection)
    agent = member.agent()
    tell(connection, None)
    while True:
        name, args = hear(connection)
        tell(connection, member.ask(agent, name, *args))


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    try:
        serve(connection)
    except (EOFError, ConnectionError):  # the run has ended
        pass
    except (UserError, TrainingDiverged) as error:
        tell(connection, error)
    except Exception:
        tell(connection, RuntimeError(traceback.format_exc()))
    os._exit(0)  # without waiting for ranks that may never come
