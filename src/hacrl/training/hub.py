"""Uploads a trained model of a run to the Hugging Face hub."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from hacrl.errors import UserError, nearest
from hacrl.opening import reason
from hacrl.training.checkpoint import find_checkpoint
from hacrl.training.export import save_agent
from hacrl.training.run_dir import RunDir


@dataclass(frozen=True)
class Uploaded:
    """What was sent to the hub, and where it is now."""

    url: str
    files: dict[str, int]
    """The size of each file in bytes."""


def push_agent(
    run_dir: Path, agent_id: str, repo: str, step: int | None, *, merge: bool = False, private: bool = False
) -> Uploaded:
    """Upload the folder of one agent's model and tokenizer, and nothing else, as one commit to `repo`.

    The repository is made if it does not exist. With `merge`, adapters become part of their model's weights.
    """
    from huggingface_hub import HfApi, get_token

    run = RunDir.open(run_dir)
    agents = {agent.id: agent for agent in run.config().agents}
    if agent_id not in agents:
        raise UserError(f"{run_dir} has no agent {agent_id!r}{nearest(agent_id, agents)}")
    source = find_checkpoint(run.path, step) / "agents" / agent_id
    if get_token() is None:
        raise UserError("The hub needs a token that may write: run `hf auth login`, or set HF_TOKEN.")
    with TemporaryDirectory(prefix="hacrl-") as aside:
        folder = save_agent(agents[agent_id], source, Path(aside) / agent_id, merge) if merge else source
        files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
        try:
            api = HfApi()
            api.create_repo(repo, private=private or None, exist_ok=True)
            message = f"Upload {agent_id} of {source.parents[1].name}"
            done = api.upload_folder(repo_id=repo, folder_path=folder, commit_message=message)
        except Exception as error:  # of the library's own HTTP client, whose errors have no common type
            raise UserError(f"{agent_id} could not be uploaded to {repo}: {reason(error)}.") from error
    return Uploaded(str(done.commit_url), files)
