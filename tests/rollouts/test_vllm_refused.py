"""What `engine: vllm` refuses before vLLM is imported and weights are read. tests/vllm has the engine itself."""

from importlib.metadata import PackageNotFoundError

import pytest

from conftest import MakeConfig
from hacrl.errors import UserError
from hacrl.run import train


def install(monkeypatch: pytest.MonkeyPatch, found: str | None) -> None:
    """Pretend that this version of vLLM is installed, or none."""

    def version(name: str) -> str:
        if found is None or name != "vllm":
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr("hacrl.rollouts.vllm.version", version)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (None, "engine: vllm needs vLLM, which is not installed: pip install 'hacrl[vllm]'."),
        ("0.23.1", "engine: vllm works with vLLM 0.24 to 0.32, but 0.23.1 is installed: pip install 'hacrl[vllm]'."),
        ("0.33.0rc1", "engine: vllm works with vLLM 0.24 to 0.32, but 0.33.0rc1 is installed"),
        ("1.2.0", "engine: vllm works with vLLM 0.24 to 0.32, but 1.2.0 is installed"),
    ],
)
def test_vllm_missing_or_of_another_version(
    found: str | None, said: str, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, found)
    with pytest.raises(UserError, match=f"^{said[:60]}") as refused:
        train(make_config(engine="vllm"))
    assert str(refused.value).startswith(said)


@pytest.mark.parametrize("found", ["0.24.0", "0.32.1+cpu"])
def test_texts_beyond_the_positions(found: str, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, found)
    with pytest.raises(UserError, match=r"^agents.agent0: max_prompt_length \(32\) .* allow 100032 tokens, but .*vLLM"):
        train(make_config(engine="vllm", max_completion_length=100_000))
