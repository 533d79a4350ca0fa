"""`hacrl rollouts`."""

from typing import Annotated

from typer import Option

from hacrl.cli.common import RunFolder, console


def rollouts(
    run: RunFolder,
    step: Annotated[int | None, Option(help="Default: the newest.")] = None,
    prompt: Annotated[int | None, Option(help="Which prompt of the step, from 0; default: the first few.")] = None,
    agent: Annotated[str | None, Option(help="Only this agent's.")] = None,
    limit: Annotated[int, Option(min=1, help="Prompts to show.")] = 3,
    as_json: Annotated[bool, Option("--json", help="The lines as they are in the file.")] = False,
) -> None:
    """Show the rollouts of a step, all agents' answers to one prompt together."""
    from hacrl.live.browse import show_rollouts

    show_rollouts(console, run, step, prompt, agent, limit, as_json)
