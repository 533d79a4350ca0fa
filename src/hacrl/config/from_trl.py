"""Translates the YAML of `trl grpo --config FILE` into settings of a run, and says what became of each key."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hacrl.config.run import TRACKERS, RunConfig
from hacrl.config.starting import agents_of, is_procedural
from hacrl.config.strict import MOST
from hacrl.config.task import is_data_set
from hacrl.config.trl_keys import DEFAULTS, REASONS, RENAMED, SAME, TRL_KEYS
from hacrl.errors import UserError, nearest

REWARDS: dict[str, Any] = {
    "accuracy_reward": "math",
    "reasoning_accuracy_reward": "math",
    "get_soft_overlong_punishment": {"name": "soft_overlong", "max_completion_length": 1280, "soft_punish_cache": 256},
}
"""Reward functions that TRL knows by name, and ours."""
OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused"), "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), "adamw_8bit"),
}
DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "auto": None}
NEEDS = {
    **dict.fromkeys(("lora_r", "lora_alpha", "lora_target_modules"), "use_peft"),
    **dict.fromkeys([key for key in TRL_KEYS if key.startswith("vllm_") and key not in REASONS], "use_vllm"),
}
"""Keys that TRL reads only if another one is true."""
NO_BOUND = "vllm_importance_sampling_clip_max"
"""The key of TRL whose value may be null although its default is a number."""
BATCHES = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "generation_batch_size",
    "steps_per_generation",
)
STEPS = ("max_steps", "num_train_epochs", "warmup_steps", "warmup_ratio", "save_steps", "eval_steps")
SIZES = (*BATCHES, *STEPS, "save_strategy", "eval_strategy")
"""Keys whose translation depends on each other: `_sizes`."""


class NotTaken(Exception):
    """Raised for a value that has no counterpart; the message says why."""


def one_of(offered: str, values: Mapping[Any, Any] | None = None) -> Callable[[Any], Any]:
    """A converter that looks a value up; without `values`, it takes those that are `offered` as they are."""
    known = {name: name for name in offered.split(", ")} if values is None else values

    def convert(value: Any) -> Any:
        if not isinstance(value, str | bool) or value not in known:
            raise NotTaken(f"{value} is not offered: {offered}")
        return known[value]

    return convert


def trackers(value: Any) -> list[str]:
    names = value if isinstance(value, list) else [value]
    if names == ["none"]:
        return []
    unknown = [str(name) for name in names if name not in TRACKERS]
    if unknown:
        raise NotTaken(f"{', '.join(unknown)}: choose from {', '.join(TRACKERS)}")
    return list(names)


def target_modules(value: Any) -> Any:
    return None if value in ("all-linear", ["all-linear"]) else value


CONVERT: dict[str, Callable[[Any], Any]] = {
    "lr_scheduler_type": one_of("constant, linear, cosine"),
    "optim": one_of("adamw or adamw_8bit", OPTIMIZERS),
    "dtype": one_of("float32 or bfloat16", DTYPES),
    "bf16": one_of("true or false", {True: "bfloat16", False: None}),
    "use_cpu": one_of("true or false", {True: "cpu", False: None}),
    "use_vllm": one_of("true or false", {True: "vllm", False: None}),
    "use_peft": one_of("true or false", {True: {}, False: None}),
    "report_to": trackers,
    "lora_target_modules": target_modules,
    "scale_rewards": one_of(
        "group, batch, none", {True: "group", False: "none", "group": "group", "batch": "batch", "none": "none"}
    ),
    "loss_type": one_of("grpo, bnpo, dapo, dr_grpo, cispo"),
}
"""How a value changes. A converter that returns None sets nothing. Values of other keys stay as they are."""


@dataclass
class Translation:
    """Settings of a run, and what became of each key of the file."""

    settings: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)
    """Key at the top of the settings: which key of TRL it comes from."""
    taken: dict[str, str] = field(default_factory=dict)
    """Key of TRL: what it is called here."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Key of TRL that is not taken over: the reason."""
    unknown: dict[str, str] = field(default_factory=dict)
    """Key that TRL 1.16 does not have either: the nearest one that it has."""

    def put(self, place: str, value: Any, origin: str, *keys: str) -> None:
        """Set a value at a place with dots, for these keys of TRL. The YAML comments on the first word of the place."""
        self.taken |= dict.fromkeys(keys, f"{place}: {value}")
        section = self.settings
        *above, last = place.split(".")
        for name in above:
            section = section.setdefault(name, {})
        section[last] = value
        top = place.partition(".")[0]
        if origin not in self.origin.get(top, "").split(", "):
            self.origin[top] = f"{self.origin[top]}, {origin}" if top in self.origin else origin


def translate(
    given: Mapping[str, Any],
    models: Sequence[str] = (),
    data: str | None = None,
    reward: str | None = None,
    rows: int | None = None,
) -> Translation:
    """Translate the settings of `trl grpo`.

    `models` join the file's model; `data` and `reward` replace those of the file; `rows` counts the rows of the data.
    """
    found = Translation()
    for key, value in given.items():
        if key in REASONS:
            found.left_out[key] = REASONS[key] if value else "it is off in the file, and not offered here"
        elif key not in TRL_KEYS:
            found.unknown[key] = nearest(str(key), TRL_KEYS)
    values = {key: number(value) for key, value in {**DEFAULTS, **given}.items() if value is not None}
    if "fp16" in values and "bf16" not in given:
        del values["bf16"]
    _check_types(values)
    _models_and_data(found, values, models, data)
    if data is not None and is_procedural(data, reward):
        _procedural(found, data)
    else:
        _rewards(found, values, reward)
    _algorithm(found, values)
    if values.get("use_vllm") and given.get(NO_BOUND, 0) is None:  # null is TRL's word for no bound, and ours
        found.put(NO_BOUND, None, NO_BOUND)
    for key in [*SAME, *RENAMED]:
        if key in values and key not in (*SIZES, *found.taken, *found.left_out):
            _take(found, key, values)
    _sizes(found, values, rows)
    found.taken = {key: ours for key, ours in found.taken.items() if key in given}
    found.left_out = {key: why for key, why in found.left_out.items() if key in given}
    found.origin = {key: _comment(key, text, given) for key, text in found.origin.items()}
    return found


def _comment(key: str, origin: str, given: Mapping[str, Any]) -> str:
    """What the YAML says about a setting; nothing if it stands in TRL's file under the same name."""
    if origin in DEFAULTS and origin not in given:
        return "TRL's default" if origin == key else f"TRL's default of {origin}"
    return "" if origin == key else f"TRL: {origin}"


def _check_types(values: Mapping[str, Any]) -> None:
    """Raise UserError if a name is not a text, or something that is computed with not a number."""
    for key in ("model_name_or_path", "dataset_name"):
        if not isinstance(values.get(key, ""), str):
            raise UserError(f"{key}: expected a name, not {values[key]!r}.")
    for key in (*BATCHES, *STEPS, "num_generations", "num_iterations"):
        value = values.get(key, 1)
        least = 1 if key in (*BATCHES, "num_generations", "num_iterations") else -1
        if isinstance(value, bool) or not isinstance(value, int | float) or value < least or value > MOST:
            raise UserError(f"{key}: expected a number of at least {least}, not {value!r}.")


def number(value: Any) -> Any:
    """A number that YAML reads as text, such as 1e-6, as TRL reads it."""
    try:
        return float(value) if isinstance(value, str) and "e" in value.lower() and value[:1].isdigit() else value
    except ValueError:
        return value


def _take(found: Translation, key: str, values: Mapping[str, Any]) -> None:
    """Convert one value and put it in its place."""
    place = RENAMED[key][0] if key in RENAMED else key
    needed = NEEDS.get(key)
    if needed and not values.get(needed):
        found.left_out[key] = f"TRL reads it only with {needed}: true"
        return
    try:
        value = CONVERT.get(key, lambda same: same)(values[key])
    except NotTaken as reason:
        found.left_out[key] = str(reason)
        return
    if value is not None:
        found.put(place, value, key)
    default = place in RunConfig.model_fields and value in (None, RunConfig.model_fields[place].default)
    shown = "" if value in (None, {}) else f": {value}"
    found.taken[key] = f"{place}{shown}{' (the default here)' if default else ''}"


def _models_and_data(found: Translation, values: Mapping[str, Any], models: Sequence[str], data: str | None) -> None:
    named = [values["model_name_or_path"]] if "model_name_or_path" in values else []
    if not named and not models:
        raise UserError("The file names no model (model_name_or_path). Add the models: hacrl init MODEL ... --from-trl")
    found.put("algorithm", {}, "importance_sampling_level")
    found.put("agents", agents_of([*map(str, named), *models]), "model_name_or_path")
    found.taken["model_name_or_path"] = f"agents: {', '.join(agent['id'] for agent in found.settings['agents'])}"
    train = data or values.get("dataset_name")
    if train is None:
        raise UserError("The file names no data (dataset_name). Add them: hacrl init --data FILE_OR_HUB_ID --from-trl")
    found.put("task.train", train, "dataset_name", "dataset_name")
    split = {"dataset_config": "subset", "dataset_train_split": "train_split", "dataset_test_split": "eval_split"}
    for key in split.keys() & values.keys():
        if not is_data_set(train):
            found.left_out[key] = "a file has no splits; name the file of held-out problems in task.eval"
    if values.get("eval_strategy", "no") != "no" and is_data_set(train):
        found.put("task.eval", train, "eval_strategy")
        if "dataset_config" in values:
            found.put("task.eval_subset", values["dataset_config"], "dataset_config")
    elif "dataset_test_split" in values and is_data_set(train):
        found.left_out["dataset_test_split"] = "TRL reads it only with an eval_strategy"


def _procedural(found: Translation, name: str) -> None:
    """Take a task that makes and verifies its own problems in place of data and rewards."""
    del found.settings["task"], found.origin["task"]
    found.put("task.name", name, "dataset_name", "dataset_name")
    own = ("dataset_config", "dataset_train_split", "dataset_test_split", "reward_funcs", "reward_weights")
    found.left_out |= dict.fromkeys(own, f"the task {name} has its own problems and verifier")


def _rewards(found: Translation, values: Mapping[str, Any], chosen: str | None) -> None:
    """Reward functions of TRL by our names, with their weights; `chosen` replaces them."""
    names = values.get("reward_funcs", [])
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"reward_funcs: expected a list of names, not {names!r}.")
    weights = values.get("reward_weights", [1.0] * len(names))
    if chosen is not None:
        found.put("task.reward", chosen, "reward_funcs")
        found.taken |= dict.fromkeys(("reward_funcs", "reward_weights"), f"task.reward: {chosen}, as asked")
        return
    if not isinstance(weights, list) or len(weights) != len(names):
        raise UserError(f"reward_weights: expected a number for each of {len(names)} reward_funcs, not {weights!r}.")
    rewards, missing = [], []
    for name, weight in zip(names, weights, strict=True):
        if name not in REWARDS and "." not in name:
            missing.append(name)
            continue
        ours = REWARDS.get(name, ":".join(name.rsplit(".", 1)))
        section = ours if isinstance(ours, dict) else {"name": ours}
        rewards.append(section if weight == 1 else {**section, "weight": weight})
    if missing:
        found.left_out["reward_funcs"] = f"{', '.join(missing)}: write it as a function and add file.py:function"
    if not rewards or all(reward["name"] == "soft_overlong" for reward in rewards):
        rewards.insert(0, {"name": "math"})
    found.put("task.reward", [each["name"] if len(each) == 1 else each for each in rewards], "reward_funcs")
    for key in ("reward_funcs", "reward_weights"):
        found.taken[key] = "task.reward: " + ", ".join(reward["name"] for reward in rewards)


def _algorithm(found: Translation, values: dict[str, Any]) -> None:
    """One agent learns as in TRL. Several share rollouts, for which grpo's clip of tokens has no counterpart."""
    level = values["importance_sampling_level"]
    alone = len(found.settings["agents"]) == 1
    name = ("gspo" if level == "sequence" else "grpo") if alone else "hacpo_robust"
    found.put("algorithm.name", name, "importance_sampling_level", "importance_sampling_level")
    if alone or level == "sequence":
        values.setdefault("epsilon_high", values["epsilon"])
        return
    for key in ("epsilon", "epsilon_high"):
        found.left_out[key] = "it clips the ratio of a token; hacpo_robust clips that of a whole answer, more tightly"


def _sizes(found: Translation, values: Mapping[str, Any], rows: int | None) -> None:
    """A step here is one generation batch of TRL, or one update if that is larger. It makes the updates of both."""
    per_pass, group = int(values["per_device_train_batch_size"]), int(values["num_generations"])
    update = per_pass * int(values["gradient_accumulation_steps"])
    steps_per_generation = values.get("steps_per_generation", values["gradient_accumulation_steps"])
    step = max(int(values.get("generation_batch_size", per_pass * int(steps_per_generation))), update)
    if group < 1 or step % group:
        raise UserError(
            f"TRL would refuse this file: a generation batch of {step} rollouts does not divide into groups of "
            f"num_generations ({group}). Change one of them."
        )
    prompts = step // group
    found.put("prompts_per_step", prompts, "generation batch / num_generations, for one process")
    sharing = len(found.settings["agents"])
    found.put(
        "rollouts_per_update",
        update * sharing,
        "per_device_train_batch_size x gradient_accumulation_steps" + (f" x {sharing} agents" if sharing > 1 else ""),
    )
    updates = max(step // update, 1) * int(values["num_iterations"])
    steps = _max_steps(found, values, prompts, updates, rows)
    found.taken |= dict.fromkeys(BATCHES, f"prompts_per_step: {prompts}, rollouts_per_update: {update * sharing}")
    for key, ours in (("save_steps", "save_every"), ("eval_steps", "eval_every"), ("warmup_steps", "warmup_steps")):
        count = values.get(key, values.get("warmup_ratio") if key == "warmup_steps" else None)
        if count is not None:
            converted = max(round(count * steps if 0 < count < 1 else count / updates), 1 if count else 0)
            found.put(ours, converted, f"{key}, in steps", key)
    found.taken["warmup_ratio"] = found.taken.get("warmup_steps", "")
    for strategy, ours in (("save_strategy", "save_every"), ("eval_strategy", "eval_every")):
        chosen = values.get(strategy, "steps")
        found.taken[strategy] = f"{ours}: {0 if chosen == 'no' else found.settings.get(ours, 'the default here')}"
        if chosen == "no":
            found.put(ours, 0, strategy)
        elif chosen != "steps":
            found.left_out[strategy] = f"{chosen} is not offered; {ours} counts steps"
            del found.taken[strategy]


def _max_steps(found: Translation, values: Mapping[str, Any], prompts: int, updates: int, rows: int | None) -> int:
    """Steps of the run: from TRL's updates, or from epochs if the number of rows is known."""
    epochs, keys = values["num_train_epochs"], ["max_steps"]
    if values.get("max_steps", -1) > 0:
        steps, origin = math.ceil(int(values["max_steps"]) / updates), f"TRL's max_steps / {updates} updates a step"
        found.left_out["num_train_epochs"] = "max_steps is given, which TRL prefers too"
    elif rows is not None:
        steps = max(math.floor(rows / prompts * float(epochs)), 1)
        origin = f"{epochs:g} epochs of {rows} rows / {prompts} prompts a step"
        keys.append("num_train_epochs")
    else:
        steps, origin = 60, f"CHANGE THIS: {epochs:g} epochs are {epochs:g} x rows of the data / {prompts}"
        found.left_out["num_train_epochs"] = f"the rows are not known yet: max_steps is {epochs:g} x rows / {prompts}"
    found.put("max_steps", steps, origin, *keys)
    return steps
