"""A reward function of the user's, for mixture.yaml."""


def brief(prompts: list, completions: list, **columns: list) -> list[float]:
    """Half a point for answers of less than 30 characters."""
    return [0.5 * (len(completion[0]["content"]) < 30) for completion in completions]
