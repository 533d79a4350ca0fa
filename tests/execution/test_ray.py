"""Agents as processes of a real Ray: the same run as in one process, and what happens when one of them is lost."""

import ipaddress
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.cluster_utils import Cluster

import ray
from hacrl.config import RunConfig
from hacrl.errors import UserError
from hacrl.execution import private_ray
from hacrl.run import resumed_config, train
from hacrl.tasks.keeper import descendants
from hacrl.training.run_dir import RunDir
from integration.test_resume import assert_equal_runs, interruptible

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"


def config(output_dir: Path, **changes: Any) -> RunConfig:
    """Five steps of two agents with two tokenizers, checkpoints after steps 2, 4 and 5."""
    return RunConfig.from_dict({**interruptible(output_dir).model_dump(mode="json"), **changes})


def on(cluster: Cluster, output_dir: Path, *, overlap: int = 0, **options: Any) -> RunConfig:
    return config(output_dir, execution="ray", ray={"address": cluster.address, **options}, overlap=overlap)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in one process."""
    return train(config(tmp_path_factory.mktemp("local") / "run")).run_dir


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes with room for one agent each; one has something that an agent may ask for."""
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    nodes.add_node(num_cpus=1, resources={"big": 1})
    nodes.wait_for_nodes()
    yield nodes
    ray.shutdown()
    nodes.shutdown()
    assert ray_processes() == []


def ray_processes() -> list[str]:
    """What this process has started of Ray and still runs."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            status, command = (path / "stat").read_text(), (path / "cmdline").read_bytes().decode()
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, parent = status.rpartition(")")[2].split()[:2]
        if int(parent) == os.getpid() and state != "Z" and ("raylet" in command or "gcs_server" in command):
            found.append(command)
    return found


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder for this process alone, with a path short enough for Ray."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def listening_sockets(others: list[int]) -> dict[str, list[str]]:
    """The addresses on which this process and all below it listen, by name; `others` and those below them aside."""
    found: dict[str, list[str]] = {}
    aside = {pid for other in others for pid in (other, *descendants(other))}
    for pid in {os.getpid(), *descendants(os.getpid())} - aside:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    found.setdefault(process.name(), []).append(connection.laddr.ip.removeprefix("::ffff:"))
    return found


@contextmanager
def meanwhile(work: Callable[[], None]) -> Iterator[None]:
    """Do this in a thread; what goes wrong there is told at the end."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    thread.join(timeout=60)
    assert not errors, errors
    assert not thread.is_alive()


def wait_for_step(run_dir: Path, step: int) -> None:
    """Until the rollouts of the step are there: agents are about to learn from them."""
    deadline = time.monotonic() + 300
    while not RunDir(run_dir).step_file("rollouts", step).is_file():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def place(agent: str, rank: int = 0) -> tuple[str, str, int]:
    """Node id, address and process of an agent, or of a rank of it, of the run that goes on in this process."""
    found: tuple[str, str, int] = ray.get(ray.get_actor(f"{agent}:{rank}").place.remote())
    return found


def kill_process(run_dir: Path, agent: str, step: int, rank: int = 0) -> None:
    wait_for_step(run_dir, 1)
    _, _, process = place(agent, rank)
    assert process != os.getpid()
    wait_for_step(run_dir, step)
    os.kill(process, signal.SIGKILL)


# --- the same run ----------------------------------------------------------------------------------


def test_a_ray_of_its_own_gives_the_same_run_to_the_bit(local: Path, tmp_path: Path, temporary: Path) -> None:
    """It listens on no address that others reach, and leaves nothing behind."""
    before, others = ray_processes(), descendants(os.getpid())
    listening: dict[str, list[str]] = {}

    def look() -> None:
        wait_for_step(tmp_path / "run", 2)
        listening.update(listening_sockets(others))

    with meanwhile(look):
        run_dir = train(config(tmp_path / "run", execution="ray")).run_dir
    assert_equal_runs(run_dir, local)
    assert not ray.is_initialized()
    assert ray_processes() == before
    assert {"gcs_server", "raylet"} < listening.keys()
    assert any("AgentProcess" in name for name in listening)
    addresses = {address for found in listening.values() for address in found}
    assert all(ipaddress.ip_address(address).is_loopback for address in addresses), listening
    assert [path for path in temporary.iterdir() if "ray" in path.name] == []
    summary = RunDir(run_dir).summary()
    assert summary is not None
    assert summary["peak_memory_gib"] > 0.3  # of three processes
    assert all(agent["sample_seconds"] > 0 and agent["learn_seconds"] > 0 for agent in summary["agents"].values())


def test_agents_in_processes_of_their_own_score_each_other_as_in_one(cluster: Cluster, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"algorithm": {"name": "opd"}, "max_steps": 2}
    reference = train(config(tmp_path / "local", **changes)).run_dir
    there = {"execution": "ray", "ray": {"address": cluster.address}}
    run_dir = train(config(tmp_path / "run", **changes, **there)).run_dir
    assert_equal_runs(run_dir, reference)
    assert all(line["a/time/score"] > 0 for line in RunDir(run_dir).metrics()[1:])


def test_two_nodes_and_overlap_give_the_same_run_to_the_bit(cluster: Cluster, tmp_path: Path) -> None:
    """Checkpoints come from the other node in pieces, and go back there to be continued."""
    reference = train(config(tmp_path / "local", overlap=1)).run_dir
    data = on(cluster, tmp_path / "run", overlap=1).model_dump(mode="json")
    data["agents"][1]["resources"] = {"custom": {"big": 1}}
    nodes: list[str] = []

    def look() -> None:
        wait_for_step(tmp_path / "run", 1)
        nodes.extend(place(agent)[0] for agent in ("a", "b"))

    with meanwhile(look):
        train(RunConfig.from_dict(data))
    (worker,) = cluster.worker_nodes
    assert nodes == [cluster.head_node.node_id, worker.node_id]
    assert_equal_runs(tmp_path / "run", reference)
    for step in (4, 5):
        shutil.rmtree(tmp_path / "run" / f"checkpoint-{step}")
    (tmp_path / "run" / "summary.json").unlink()
    train(resumed_config(tmp_path / "run", []), resume=True)
    assert_equal_runs(tmp_path / "run", reference)


# --- losses ----------------------------------------------------------------------------------------


def test_a_killed_process_is_started_again_and_the_run_goes_on(
    cluster: Cluster, local: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = tmp_path / "run"
    with caplog.at_level(logging.WARNING, "hacrl"), meanwhile(lambda: kill_process(run_dir, "b", 3)):
        train(on(cluster, run_dir))
    assert_equal_runs(run_dir, local)
    (warning,) = [record.getMessage() for record in caplog.records if "was lost" in record.getMessage()]
    expected = (
        r"Agent b \(process \d+ on [\d.]+\) was lost: .*Restart 1 of at most 3: all agents go back to "
        r"checkpoint-[24]; \d finished steps are done again"
    )
    assert re.match(expected, warning), warning


def test_an_agent_on_two_nodes_is_the_same_to_the_bit_and_lost_with_one_of_its_processes(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run in two processes of this machine; each has its part of the optimizer, which comes back to it."""
    agents = [{"id": "b", "model": "zoo:neox-pair", "fsdp": 2}]
    reference = train(config(tmp_path / "local", agents=agents, max_steps=3)).run_dir
    nodes: list[str] = []

    def look_and_kill() -> None:
        wait_for_step(tmp_path / "run", 1)
        nodes.extend(place("b", rank)[0] for rank in (0, 1))
        kill_process(tmp_path / "run", "b", 3, rank=1)

    data = on(cluster, tmp_path / "run").model_dump(mode="json")
    with caplog.at_level(logging.WARNING, "hacrl"), meanwhile(look_and_kill):
        train(RunConfig.from_dict({**data, "agents": agents, "max_steps": 3}))
    (worker,) = cluster.worker_nodes
    assert sorted(nodes) == sorted([cluster.head_node.node_id, worker.node_id])
    assert (
        sum("Agent b" in record.getMessage() and "Restart 1" in record.getMessage() for record in caplog.records) == 1
    )
    assert len(list((reference / "checkpoint-3" / "state").iterdir())) == 2
    assert_equal_runs(tmp_path / "run", reference)


def test_ranks_on_one_machine_meet_without_a_port_that_others_reach(tmp_path: Path, temporary: Path) -> None:
    others = descendants(os.getpid())
    listening: dict[str, list[str]] = {}

    def look() -> None:
        wait_for_step(tmp_path / "run", 1)
        listening.update(listening_sockets(others))

    agents = [{"id": "b", "model": "zoo:neox-pair", "fsdp": 2}]
    with meanwhile(look):
        train(config(tmp_path / "run", execution="ray", agents=agents, max_steps=2))
    assert any("AgentProcess" in name for name in listening)
    assert {address for found in listening.values() for address in found} == {"127.0.0.1"}, listening


def is_alive(process: psutil.Process) -> bool:
    """Whether it does anything: one that has ended may wait for ever for whoever adopted it."""
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def test_a_killed_driver_leaves_no_process_and_the_run_goes_on(local: Path, tmp_path: Path, temporary: Path) -> None:
    (tmp_path / "run.yaml").write_text(config(tmp_path / "run", execution="ray").to_yaml())
    driver = subprocess.Popen(
        [sys.executable, "-m", "hacrl.cli", "train", str(tmp_path / "run.yaml")],
        env=os.environ | {"TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )
    wait_for_step(tmp_path / "run", 3)
    below = {psutil.Process(pid): psutil.Process(pid).name() for pid in descendants(driver.pid)}
    assert "raylet" in below.values()
    driver.kill()
    driver.wait()
    deadline = time.monotonic() + 60
    # Two of Ray's own helpers notice it a minute later.
    while left := [name for process, name in below.items() if is_alive(process) and not name.endswith("Agent")]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    train(resumed_config(tmp_path / "run", ["execution=local"]), resume=True)
    assert_equal_runs(tmp_path / "run", local)
    assert len(list(temporary.glob("ray-*"))) == 1
    (temporary / "ray-alive").mkdir()
    private_ray._take(temporary / "ray-alive")
    private_ray._clear_away(str(temporary))  # as the next start does
    assert [path.name for path in temporary.glob("ray-*")] == ["ray-alive"]


def test_a_killed_node_moves_its_agent_to_another(
    cluster: Cluster, local: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Killed before the first checkpoint: the run starts again from the beginning."""
    run_dir = tmp_path / "run"
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()

    def kill_node() -> None:
        wait_for_step(run_dir, 1)
        homes = {place(agent)[0] for agent in ("a", "b")} - {cluster.head_node.node_id}
        (node, *_) = [node for node in cluster.worker_nodes if node.node_id in homes]
        cluster.remove_node(node, allow_graceful=False)

    with caplog.at_level(logging.WARNING, "hacrl"), meanwhile(kill_node):
        train(on(cluster, run_dir))
    assert_equal_runs(run_dir, local)
    assert sum("was lost" in record.getMessage() for record in caplog.records) == 1
    assert len(cluster.list_all_nodes()) == 2


def test_on_failure_stop_ends_the_run_and_says_how_to_go_on(
    cluster: Cluster, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)  # or else the newest cluster of this machine
    run_dir = tmp_path / "run"
    lost = rf"Agent a .* was lost.*{re.escape(f'Continue with `hacrl train {run_dir} --resume`.')}"
    stop = {"address": "auto", "on_failure": "stop"}
    with meanwhile(lambda: kill_process(run_dir, "a", 3)), pytest.raises(UserError, match=lost):
        train(config(run_dir, execution="ray", ray=stop))
    assert not ray.is_initialized()
    # What was begun on a cluster can be ended in one process.
    train(resumed_config(run_dir, ["execution=local"]), resume=True)
    assert_equal_runs(run_dir, local)


def test_restarts_are_bounded(cluster: Cluster, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with meanwhile(lambda: kill_process(run_dir, "b", 2)), pytest.raises(UserError, match=r"0 times already.*--resume"):
        train(on(cluster, run_dir, max_restarts=0))


def test_a_ray_of_its_own_keeps_the_logs_of_a_lost_agent(tmp_path: Path, temporary: Path) -> None:
    run_dir = tmp_path / "run"
    stop = config(run_dir, execution="ray", ray={"on_failure": "stop"}, agents=[{"id": "b", "model": "zoo:neox-pair"}])
    with (
        meanwhile(lambda: kill_process(run_dir, "b", 1)),
        pytest.raises(UserError, match=r"Agent b .* was lost") as lost,
    ):
        train(stop)
    (folder,) = temporary.glob("ray-*")
    assert f"Ray's logs are in {folder}. Continue with" in str(lost.value)
    private_ray._clear_away(str(temporary))  # as the next start does
    assert list(folder.glob("session_latest/logs/*.log"))


# --- mistakes --------------------------------------------------------------------------------------


def test_errors_of_an_agent_are_told_as_in_one_process(cluster: Cluster, tmp_path: Path) -> None:
    data = {**on(cluster, tmp_path / "run").model_dump(mode="json"), "max_prompt_length": 2}
    data["agents"][1]["max_prompt_length"] = 2
    with pytest.raises(UserError) as caught:
        train(RunConfig.from_dict(data))
    assert type(caught.value) is UserError
    assert re.fullmatch(
        r"The prompt of \S+ has \d+ tokens for agent b, more than max_prompt_length .*", str(caught.value)
    )
    assert not (tmp_path / "run").exists()


def test_too_little_room_is_told(cluster: Cluster, tmp_path: Path) -> None:
    data = on(cluster, tmp_path / "run", placement_timeout=2.0).model_dump(mode="json")
    data["agents"][0]["resources"] = {"num_cpus": 7, "custom": {"big": 1}}
    with pytest.raises(UserError, match=r"no room.*Wanted: a CPU 7, big 1; b CPU 1; 2 nodes have CPU 2"):
        train(RunConfig.from_dict(data))


def test_a_cluster_that_is_not_there_is_told(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(UserError, match=rf"ray.address: there is no cluster at {address} .*ray start --head"):
        train(config(tmp_path / "run", execution="ray", ray={"address": address}))


def test_without_ray_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "hacrl.execution.ray", raising=False)
    with pytest.raises(UserError, match=r"pip install 'hacrl\[ray\]'"):
        train(config(tmp_path / "run", execution="ray"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"overlap": 1, "dynamic_sampling": True}, "overlap: dynamic_sampling needs the rewards"),
        ({"overlap": 2}, "overlap: must be at most 1"),
        ({"execution": "ray", "device": "cuda:1"}, "Ray chooses the GPU"),
        ({"execution": "ray", "device": "cuda", "resources": {"num_gpus": 0}}, "device: cuda needs a GPU"),
        ({"execution": "ray", "fsdp": 2, "resources": {"num_gpus": 0.5}}, "each process of fsdp needs a whole GPU"),
        ({"execution": "ray", "resources": {"sampler": {}}}, "resources.sampler is the process of vLLM"),
        ({"resources": {"sampler": {"num_gpu": 1}}}, "did you mean num_gpus"),
        ({"ray": {"adress": "auto"}}, "did you mean address"),
        ({"ray": {"address": "ray://head:10001"}}, "ray.address"),
        ({"resources": {"num_cpu": 2}}, "did you mean num_cpus"),
    ],
)
def test_impossible_settings_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    agents = [{"id": "a", "model": "zoo:llama-plus"}]
    with pytest.raises(UserError, match=message):
        RunConfig.from_dict({"agents": agents, "task": {"name": "arithmetic"}, **changes})
