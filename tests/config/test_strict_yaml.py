"""YAML as settings are read from it: what is refused, and where the sentence says it is."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from hacrl.config import RunConfig
from hacrl.config.settings import apply_overrides
from hacrl.config.strict_yaml import MAX_BYTES, MAX_DEPTH, MAX_SIZE, dump_yaml, load_yaml
from hacrl.config.study import StudyConfig
from hacrl.config.warmup import WarmupConfig
from hacrl.errors import UserError
from hacrl.training.run_dir import RunDir


def bomb(anchored: str, expanding: str) -> str:
    """Ten levels, each of ten times the level before."""
    lines = [f"a0: &a0 {anchored}"]
    for level in range(1, 10):
        lines.append(f"a{level}: &a{level} " + expanding.format(", ".join([f"*a{level - 1}"] * 10)))
    return "\n".join(lines)


ALIASES = bomb("[x, x, x, x]", "[{}]")
MERGES = bomb("{x: 1, y: 2}", "{{<<: [{}]}}")
CHAIN = "a0: &a0 [x]\n" + "\n".join(f"a{level}: &a{level} [*a{level - 1}]" for level in range(1, 300))

REFUSED = [
    ("a: 1\nb: 2\na: 3\n", "line 3, column 1: the key 'a' is already in line 1"),
    ("x:\n  - {seed: 1, 'seed': 2}", "line 2, column 15: the key 'seed' is already in line 2"),
    ("{1: a, true: b}", "line 1, column 8: the key 'true' is already in line 1"),
    ("<<: {a: 1}\n<<: {a: 2}", "line 2, column 1: the key '<<' is already in line 1"),
    ("a: &x {b: *x}", "line 1, column 11: the alias *x refers to itself"),
    ("a: &x {<<: *x}", "line 1, column 12: the alias *x refers to itself"),
    ("&x [*x]", "line 1, column 5: the alias *x refers to itself"),
    (ALIASES, f"line 6, column 5: more than {MAX_SIZE:,} values and characters"),
    (MERGES, f"line 6, column 14: more than {MAX_SIZE:,} values and characters"),
    (f"a: &a {'x' * 99_000}\nb: [*a, *a, *a]", "line 2, column 4: more than 250,000 values"),
    (CHAIN, "line 100, column 6: nested deeper than 100 levels"),
    ("a: " + "[" * 20_000, f"line 1, column {3 + MAX_DEPTH}: nested deeper than 100 levels"),
    ("- " * 20_000, "line 1, column 201: nested deeper than 100 levels"),
    ("a: " + "9" * 101, "line 1, column 4: a number of more than 100 digits"),
    ("a: 0x" + "f" * 5000, "line 1, column 4: a number of more than 100 digits"),
    ("a: " + "9" * 5000, "line 1, column 4: not valid YAML: '9999"),
    ("b: 2026-99-99", "line 1, column 4: not valid YAML: '2026-99-99' is not a valid date: month must be in 1..12"),
    ("b: !!int x", "line 1, column 4: not valid YAML: 'x' is not a valid whole number"),
    ("b: !!int ''", "line 1, column 4: not valid YAML: '' is not a valid whole number"),
    ("b: !!bool maybe", "line 1, column 4: not valid YAML: 'maybe' is not a valid boolean"),
    ("b: !!timestamp x", "line 1, column 4: not valid YAML: 'x' is not a valid date"),
    ("b: " + "1:" * 999 + "1.5", "line 1, column 4: not valid YAML: '1:1:1:"),
    ("b: !!binary aGk=", "line 1, column 4: the tag 'tag:yaml.org,2002:binary' has no meaning"),
    ("b: !!python/name:os.system", "line 1, column 4: the tag"),
    ("b: =", "line 1, column 4: not valid YAML: could not determine a constructor"),
    ("? [a]\n: 1", "line 1, column 3: a key must be a text or a number"),
    ("b: *x", "line 1, column 4: not valid YAML: found undefined alias 'x'"),
    ("b: 1\n---\nc: 2", "line 2, column 1: not valid YAML: expected a single document"),
    ("b:\n\t- c", "line 2, column 1: not valid YAML"),
    ("b: 1\nc: \0", "line 2, column 4: not valid YAML: the character #x0000"),
    ('b: "\\ud800"', "line 1, column 4: an incomplete character"),
    ('b: "\\UFFFFFFFF"', "line 1, column 7: not valid YAML"),
    (b"b: 1\nc: \xe9\n", "line 2, column 4: not valid YAML: the byte 0xe9 is not UTF-8"),
    ("b: 1".encode("utf-16"), "line 1, column 1: not valid YAML: the byte 0xff is not UTF-8"),
    ("#" * (MAX_BYTES + 1), f"{MAX_BYTES + 1:,} bytes are too many for settings"),
]


@pytest.mark.parametrize(("text", "sentence"), REFUSED, ids=[sentence for _, sentence in REFUSED])
def test_refused_with_line_and_column(text: str | bytes, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        load_yaml(text, "my.yaml")
    message = str(caught.value)
    assert message.startswith(f"my.yaml: {sentence}")
    assert len(message.splitlines()) == 1


def test_aliases_and_merges_of_a_usual_size_are_read() -> None:
    text = "a: &a {x: 1, y: [2]}\nb: {<<: *a, x: 3}\nc: {<<: [*a, {z: 4}]}\nd: *a\n"
    assert load_yaml(text, "my.yaml") == yaml.safe_load(text)
    assert load_yaml("\ufeffa: 1".encode(), "my.yaml") == {"a": 1}
    assert load_yaml("a: " + "[" * 98 + "]" * 98, "my.yaml")


@pytest.mark.parametrize("load", [RunConfig.load, WarmupConfig.load, StudyConfig.load])
def test_every_kind_of_file_is_read_strictly(load: Any, tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("seed: 1\nagents: []\nseed: 2\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"my\.yaml: line 3, column 1: the key 'seed' is already in line 1"):
        load(path)


def test_a_runs_own_config_and_overrides_are_read_strictly(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: &a [*a]\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"config\.yaml: line 1, column 11: the alias \*a refers to itself"):
        RunDir.open(tmp_path).config()
    with pytest.raises(UserError, match=r"^The value of vllm: line 1, column 8: the key 'a' is already in line 1"):
        apply_overrides({}, ["vllm={a: 1, a: 2}"])
    with pytest.raises(UserError, match="more than 100 names"):
        apply_overrides({}, ["a." * 20_000 + "b=1"])
    with pytest.raises(UserError, match="there is no item '9999"):
        apply_overrides({"agents": []}, [f"agents.{'9' * 5000}.id=1"])


def test_what_is_written_is_read_again_and_harmless() -> None:
    texts = ["\x1b[31m", "\x9b", "\r", "\u202eltr", "\u2028", "\x85", "plain ü 中", "a: b", "\u202e " * 200, "1e-5"]
    data = {"list": texts, **dict.fromkeys(texts)}
    written = dump_yaml(data)
    assert load_yaml(written, "again.yaml") == data
    assert not set("\x1b\x9b\r\u202e\u2028\x85") & set(written)
