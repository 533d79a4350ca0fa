"""Which differences of settings count when a run or a study goes on."""

from hacrl.config import RunConfig
from hacrl.training.run_dir import changed_settings


def test_completions_at_once_may_differ_from_those_of_an_earlier_version() -> None:
    """Folders of runs hold all defaults, and this one was 512."""
    new = RunConfig.load("demo")
    data = new.to_dict()
    data["agents"] = [{**agent, "sampling_batch_size": 512} for agent in data["agents"]]
    then = RunConfig.from_dict(data)
    assert then.agents[0].sampling_batch_size != new.agents[0].sampling_batch_size
    assert changed_settings(new, then) == []
    assert changed_settings(new, RunConfig.from_dict({**data, "temperature": 0.5})) != []
