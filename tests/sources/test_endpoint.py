"""A teacher behind an address: what it is asked, what its answers become, and what happens when it misbehaves."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import MakeConfig
from hacrl.config.sources import SourceConfig
from hacrl.errors import UserError
from hacrl.sources import client as client_file
from hacrl.sources.endpoint import Endpoint
from hacrl.sources.outside import Given
from hacrl.tasks.problem import Problem
from teacher_server import Fields, Reply, Response, Teacher, asked, chat, right, worked

KEY = "sk-very-secret-0123456789"
PROBLEMS = [Problem(f"p{n}", f"{n}+{n + 1}-1=", f"{2 * n}") for n in range(4)]
Make = Callable[..., Endpoint]


@pytest.fixture
def teacher() -> Iterator[Teacher]:
    teacher = Teacher()
    yield teacher
    teacher.close()


@pytest.fixture
def make(teacher: Teacher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Make and prepare a source that asks the teacher; keys of `endpoint` and of the source may be given."""
    monkeypatch.setattr(client_file, "FIRST_PAUSE", 0.001)
    made: list[Endpoint] = []

    def make(needs_logps: bool = False, prepare: bool = True, seed: int = 0, **settings: Any) -> Endpoint:
        given = {"url": teacher.url, "model": "big", "timeout": 5.0, **settings.pop("endpoint", {})}
        config = SourceConfig.model_validate({"id": "teacher", "endpoint": given, **settings})
        made.append(Endpoint(config, 2, seed, 40))
        if prepare:
            made[-1].remarks = made[-1].prepare(PROBLEMS, needs_logps, tmp_path / "sources")  # type: ignore[attr-defined]
        return made[-1]

    yield make
    for source in made:
        source.close()


def remarks(source: Endpoint) -> str:
    return " ".join(source.remarks)  # type: ignore[attr-defined]


def metrics(source: Endpoint, given: Given) -> dict[str, float]:
    return {name: value for name, value in source.metrics(given.figures).items() if "time" not in name}


def test_every_answer_is_asked_for_by_itself_and_becomes_a_rollout(teacher: Teacher, make: Make) -> None:
    source = make(endpoint={"system_prompt": "Be brief.", "stop": ["\n"], "extra_body": {"top_k": 7}})
    given = source.give(PROBLEMS, 1, 0)
    assert len(teacher.sampled) == 8
    assert len({fields.pop("seed") for fields in teacher.sampled}) == 8
    assert set(teacher.paths) == {"/v1/chat/completions"}
    asked = [fields for fields in teacher.sampled if fields["messages"][1]["content"] == PROBLEMS[3].prompt]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROBLEMS[3].prompt}]
    limits = {"temperature": 1.0, "max_tokens": 40, "stop": ["\n"], "top_k": 7, "logprobs": True}
    assert asked == [{"model": "big", "messages": messages, **limits}] * 2
    assert [(r.prompt_index, r.index, r.prompt_id) for r in given.rollouts] == [
        (position, index, f"p{position}") for position in range(4) for index in range(2)
    ]
    for rollout in given.rollouts:
        text = worked(str(rollout.prompt))
        assert (rollout.text, rollout.finish_reason, rollout.ended) == (text, "stop", True)
        assert rollout.logps == [-0.25] * (len(text) + 1)
        assert (rollout.source, rollout.step, rollout.token_ids) == (2, 1, [])
    answered = sum(rollout.num_tokens for rollout in given.rollouts)
    assert metrics(source, given) == {
        "requests": 8, "failed": 0, "retries": 0, "late": 0, "skipped": 0, "over_budget": 0,
        "prompt_tokens": 72, "answer_tokens": answered,
    }  # fmt: skip
    assert source.metrics(given.figures)["time/latency"] > 0


def test_the_text_of_a_prompt_is_sent_as_it_is_to_completions(teacher: Teacher, make: Make) -> None:
    source = make(endpoint={"api": "completions"}, num_generations=1)
    (rollout, *_) = source.give(PROBLEMS, 1, 0).rollouts
    assert teacher.sampled[0]["prompt"] in {p.prompt for p in PROBLEMS}
    assert set(teacher.paths) == {"/v1/completions"}
    assert teacher.sampled[0]["logprobs"] == 1
    assert rollout.logps == [-0.25] * (len(rollout.text) + 1)
    chatting = [Problem("c", [{"role": "user", "content": "1+1="}], "2")]
    with pytest.raises(UserError, match=r"the prompt of c is a chat.*Choose endpoint.api: chat"):
        make(prepare=False, endpoint={"api": "completions"}).prepare(chatting, False, Path("unused"))


def test_seeds_depend_on_where_in_the_run_a_request_is(teacher: Teacher, make: Make) -> None:
    source, seen = make(num_generations=1), []
    for where in ((1, 0), (2, 0), (1, 1)):
        source.give(PROBLEMS[:1] * 2, *where)  # a problem that occurs twice is asked twice
        seen += [fields["seed"] for fields in teacher.sampled[-2:]]
    make(prepare=False, seed=1)
    assert len(set(seen)) == 6
    assert all(0 <= seed < 2**31 for seed in seen)


def test_requests_that_are_alike_are_told_apart_without_a_seed(teacher: Teacher, make: Make) -> None:
    source = make(endpoint={"extra_body": {"seed": None}})
    first = source.give(PROBLEMS, 1, 0)
    assert all("seed" not in fields for fields in teacher.requests)
    source.close()
    count = len(teacher.requests)
    assert make(endpoint={"extra_body": {"seed": None}}).give(PROBLEMS, 1, 0).rollouts == first.rollouts
    assert len(teacher.requests) == count


# --- log-probabilities ---------------------------------------------------------------------------------


def given_one(teacher: Teacher, source: Endpoint, answer: Fields | Response) -> Given:
    teacher.reply = lambda fields: answer
    return source.give(PROBLEMS[:1], 1, 0)


@pytest.mark.parametrize(
    ("answer", "logps", "ended"),
    [
        (chat("#12"), [-0.25] * 4, True),
        (chat("#12", end=False), [-0.25] * 3 + [0.0], True),  # an end of turn that is not reported is certain
        (chat("#12", end=False, finish_reason="length"), [-0.25] * 3, False),
        (chat("#12", finish_reason="length"), None, False),
        (chat("#1 2", stop_reason=128), [-0.25] * 5, True),
        (chat("é#\U0001f600"), [-0.25] * 4, True),
        (chat("#12", logp=0.0005), [0.0] * 4, True),
        (chat("#12", logp=0.01), None, True),
        (chat("#12", logp=-9999.0), None, True),
        (chat("#12", logp=float("nan")), None, True),
        (chat("#12", logp=float("-inf")), None, True),
        (chat("#12", logp=True), None, True),
        (chat("#12", logprobs=None), None, True),
        (chat("#12", logprobs={"content": "no"}), None, True),
        (chat("#12", logprobs={"content": [{"token": "#12", "bytes": [300], "logprob": -1}]}), None, True),
        (chat("#12", logprobs={"content": [{"token": "#12", "bytes": None, "logprob": -1}]}), [-1.0, 0.0], True),
        (chat("#12", logprobs={"content": [{"token": "#13", "logprob": -1}]}), None, True),
        (chat("#12", logprobs={"content": [{"token": "#1", "logprob": -1}]}), None, True),
    ],
)  # fmt: skip
def test_log_probabilities_are_used_where_their_tokens_make_up_the_text(
    teacher: Teacher, make: Make, answer: Fields, logps: list[float] | None, ended: bool
) -> None:
    (rollout,) = given_one(teacher, make(num_generations=1), answer).rollouts
    assert (rollout.logps, rollout.ended) == (logps, ended)
    assert rollout.num_tokens == (len(logps) if logps else answer["usage"]["completion_tokens"])


def test_a_stop_string_ends_no_turn(teacher: Teacher, make: Make) -> None:
    source = make(num_generations=1, endpoint={"stop": [";"]})
    content = [{"token": token, "logprob": -0.5} for token in ("#", "12", ";")]
    answer = chat("#12", stop_reason=";", logprobs={"content": content})
    (rollout,) = given_one(teacher, source, answer).rollouts
    assert (rollout.ended, rollout.finish_reason, rollout.logps) == (False, "stop", [-0.5, -0.5])
    (rollout,) = given_one(teacher, make(num_generations=1), chat("#12")).rollouts
    assert rollout.ended
    del answer["choices"][0]["stop_reason"]  # a server that does not tell: the stop string may have ended it
    teacher.reply = lambda fields: answer
    (rollout,) = source.give(PROBLEMS[:1], 2, 0).rollouts
    assert not rollout.ended


def test_the_disagreement_of_two_greedy_answers_is_measured_at_the_start(teacher: Teacher, make: Make) -> None:
    answers = iter((-0.25, -0.29, -0.25, -0.35, -0.25, -0.35))
    teacher.greedy = lambda fields: chat(worked(asked(fields)), logp=next(answers))
    used = make(endpoint={"logprobs": "at_temperature"}, temperature=0.7)
    assert "its log-probabilities are used" in remarks(used)
    assert "differ by 0.04 a token" in remarks(used)
    assert used.give(PROBLEMS, 1, 0).rollouts[0].logps
    used.kept.path.unlink()
    unused = make()
    assert "differ by 0.1 a token, more than 0.05; its rollouts count as if" in remarks(unused)
    assert unused.give(PROBLEMS, 1, 0).rollouts[0].logps is None
    unused.kept.path.unlink()
    with pytest.raises(UserError, match=r"sources.teacher: the log-probabilities of two greedy .* Choose another algo"):
        make(needs_logps=True)
    assert [fields["temperature"] for fields in teacher.requests].count(0) == 6


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"endpoint": {"logprobs": "none"}}, "it has no log-probabilities"),
        ({"temperature": 0.7}, "before temperature .endpoint.logprobs: raw., and its temperature is 0.7"),
        ({"temperature": 0, "endpoint": {"logprobs": "at_temperature"}}, "it answers greedily .temperature: 0."),
        ({"endpoint": {"reasoning": True}}, "its text has thinking in it"),
    ],
)
def test_settings_that_rule_log_probabilities_out(
    teacher: Teacher, make: Make, make_config: MakeConfig, settings: dict[str, Any], why: str
) -> None:
    """An algorithm that needs them refuses such a config; others ask for none."""
    source = make(**settings)
    assert why.split()[0] in remarks(source)
    source.give(PROBLEMS[:1], 1, 0)
    assert all("logprobs" not in fields for fields in teacher.requests)
    given = {
        "id": "teacher",
        **settings,
        "endpoint": {"url": "http://a/v1", "model": "m", **settings.get("endpoint", {})},
    }
    make_config("llama-plus", algorithm={"name": "hacpo_robust"}, sources=[given])
    with pytest.raises(
        UserError, match=rf"sources.teacher: .*{why}.*, and the algorithm weighs .* Choose another algo"
    ):
        make_config("llama-plus", algorithm={"name": "hacpo"}, sources=[given])


@pytest.mark.parametrize(
    ("greedy", "why"),
    [
        (lambda fields: chat("#1", logprobs=None), "it reports no log-probabilities"),
        (lambda fields: chat("#1", logprobs={"content": [{"token": "Hm", "logprob": -1}]}), "do not make up its text"),
        (lambda fields: chat(f"{fields['seed']}"), "begin with different tokens"),
        (lambda fields: chat(None, finish_reason="length"), r"cannot be used \(empty\)"),
    ],
)
def test_doubtful_log_probabilities_are_not_used(teacher: Teacher, make: Make, greedy: Reply, why: str) -> None:
    teacher.greedy = greedy
    with pytest.raises(UserError, match=why):
        make(needs_logps=True)
    assert "s = 1" in remarks(make())


# --- text ------------------------------------------------------------------------------------------------


def test_thinking_is_left_out_unless_it_is_asked_for(teacher: Teacher, make: Make) -> None:
    answer = chat("#12")
    answer["choices"][0]["message"]["reasoning_content"] = "It is\n"
    (rollout,) = given_one(teacher, make(num_generations=1), answer).rollouts
    assert rollout.text == "#12"
    source = make(num_generations=1, endpoint={"reasoning": True, "extra_body": {"x": 1}})
    (rollout,) = given_one(teacher, source, answer).rollouts
    assert (rollout.text, rollout.logps) == ("<think>\nIt is\n</think>\n\n#12", None)


@pytest.mark.parametrize("text", ["\x1b[2J\x00#1", "<eos></s><|im_end|>#1", "‮#1", " #1 \n"])
def test_hostile_text_is_text(teacher: Teacher, make: Make, text: str) -> None:
    (rollout,) = given_one(teacher, make(num_generations=1), chat(text)).rollouts
    assert rollout.text == text
    assert rollout.logps == [-0.25] * (len(text) + 1)


@pytest.mark.parametrize("count", [0, -1, True, "7", 1e3, 10**30, None])
def test_impossible_numbers_of_tokens_are_not_believed(teacher: Teacher, make: Make, count: Any) -> None:
    answer = chat("#1234567", logprobs=None)
    answer["usage"] = {"completion_tokens": count, "prompt_tokens": count}
    given = given_one(teacher, make(num_generations=1), answer)
    assert given.rollouts[0].num_tokens == 2  # one token for four bytes
    assert given.figures["answer_tokens"] == 2


# --- failures --------------------------------------------------------------------------------------------

BIG = json.dumps(chat("#" * 10_000_000, logprobs=None)).encode()


@pytest.mark.parametrize(
    ("answer", "reason", "tries"),
    [
        (Response(b"", 500), "status_500", 3),
        (Response(b"{}", 429, {"Retry-After": "0"}), "status_429", 3),
        (Response(b"{}", 503, {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}), "status_503", 3),
        (Response(b"{}", 503, {"Retry-After": "soon"}), "status_503", 3),
        (Response(b"no such model", 404), "status_404", 1),
        (Response(b"", 418), "status_418", 1),
        (Response(b"", 599), "status_unknown", 1),
        (Response(b"{}", 302, {"Location": "http://127.0.0.1:9/steal"}), "status_302", 1),
        (Response(json.dumps(chat("#1")).encode(), cut=9), "connection", 3),
        (Response(b"<html>"), "not_json", 3),
        (Response(b"\xff\xfe{"), "not_json", 3),
        (Response(b"[" * 100_000), "not_json", 3),
        (Response(b'{"choices": 1}'), "wrong_fields", 1),
        (Response(b'{"choices": []}'), "wrong_fields", 1),
        (Response(b'{"choices": [null]}'), "wrong_fields", 1),
        (Response(b"[]"), "wrong_fields", 1),
        (chat([]), "wrong_fields", 1),  # type: ignore[arg-type]
        (chat(""), "empty", 1),
        (chat(None), "empty", 1),
        (chat("  \n"), "empty", 1),
        (chat("#\ud800"), "not_unicode", 1),
        (chat("#1", finish_reason="content_filter"), "content_filter", 1),
        (chat("#1", finish_reason="a/b\n"), "finish_reason", 1),
        (chat("#1", finish_reason=None), "finish_reason", 1),
        (chat("#" * 2561), "too_large", 1),
        (Response(BIG), "too_large", 1),
        (Response(b"this is not gzip", headers={"Content-Encoding": "gzip"}), "connection", 3),
    ],
)  # fmt: skip
def test_a_failure_is_counted_by_its_reason(
    teacher: Teacher, make: Make, answer: Fields | Response, reason: str, tries: int
) -> None:
    source = make(num_generations=1, endpoint={"max_retries": 2})
    given = given_one(teacher, source, answer)
    found = metrics(source, given)
    assert not given.rollouts
    assert (found["requests"], found["failed"], found[f"failed/{reason}"]) == (1, 1, 1)
    assert (len(teacher.sampled), found["retries"]) == (tries, tries - 1)
    again = len(teacher.requests)
    source.close()
    resumed = make(num_generations=1, endpoint={"max_retries": 2})  # what failed for good has failed for good
    assert metrics(resumed, resumed.give(PROBLEMS[:1], 1, 0)) == found
    assert len(teacher.requests) == again


def test_a_request_is_sent_again_after_the_pause_that_the_server_asks_for(teacher: Teacher, make: Make) -> None:
    replies = iter([Response(b"", 429, {"Retry-After": "0.3"}), Response(b"", 503, {"Retry-After": "9999"})])
    teacher.reply = lambda fields: next(replies, None) or right(fields)
    source = make(num_generations=1, endpoint={"timeout": 0.5})
    given = source.give(PROBLEMS[:1], 1, 0)
    assert (len(given.rollouts), given.figures["retries"]) == (1, 2)
    _, first, second, third = teacher.times[-4:]
    assert second - first >= 0.3
    assert third - second >= 0.5  # at most the timeout
    assert len({fields["seed"] for fields in teacher.sampled}) == 1


def test_a_pause_that_the_server_asks_for_holds_for_all_requests(teacher: Teacher, make: Make) -> None:
    source = make(num_generations=1, endpoint={"timeout": 0.5, "max_retries": 0})
    given_one(teacher, source, Response(b"", 429, {"Retry-After": "0.3"}))
    teacher.reply = right
    assert len(source.give(PROBLEMS[1:3], 2, 0).rollouts) == 2
    refused, *later = teacher.times[-3:]
    assert min(later) - refused >= 0.3


def test_a_server_that_is_down_is_left_alone_for_the_rest_of_the_step(
    teacher: Teacher, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    source = make(max_requests=4, endpoint={"max_retries": 0}, num_generations=6)
    teacher.reply = lambda fields: Response(b"", 500)
    for step in (1, 2):
        found = metrics(source, source.give(PROBLEMS, step, 0))
        assert found["requests"] + found["skipped"] == 24
        assert 8 <= found["requests"] == found["failed"] <= 11  # three were under way
    assert [record.message for record in caplog.records] == [
        "Source teacher: 8 requests in a row failed. Step 1 goes on without the rest."
    ]
    teacher.reply = right
    assert metrics(source, source.give(PROBLEMS, 3, 0))["requests"] == 24
    teacher.reply = lambda fields: Response(b"", 500)
    source.give(PROBLEMS, 4, 0)
    assert "Step 4 goes on" in caplog.records[-1].message


def test_what_takes_too_long_is_left_out(teacher: Teacher, make: Make) -> None:
    slow = PROBLEMS[1].prompt
    teacher.reply = lambda fields: Response(json.dumps(right(fields)).encode(), wait=60 * (asked(fields) == slow))
    settings = {"num_generations": 1, "step_timeout": 1.0, "max_requests": 1}
    source = make(**settings)
    given = source.give(PROBLEMS, 1, 0)
    found = metrics(source, given)
    assert [rollout.prompt_id for rollout in given.rollouts] == ["p0"]
    assert (found["requests"], found["late"], found["skipped"]) == (2, 1, 2)
    assert source.totals["unknown_tokens"] == 40 + len(slow) + 64
    source.close()
    teacher.reply, again = right, len(teacher.requests)
    resumed = make(**settings)
    replayed = resumed.give(PROBLEMS, 1, 0)
    assert (replayed.rollouts, metrics(resumed, replayed)) == (given.rollouts, found)
    assert len(teacher.requests) == again


def test_a_request_that_takes_too_long_fails(teacher: Teacher, make: Make) -> None:
    source = make(num_generations=1, endpoint={"timeout": 0.3, "max_retries": 0})
    found = metrics(source, given_one(teacher, source, Response(b"{}", wait=60)))
    assert found["failed/too_slow"] == 1


def test_closing_ends_a_step_that_waits(teacher: Teacher, make: Make) -> None:
    source = make(endpoint={"timeout": 60.0})
    teacher.reply = lambda fields: Response(b"{}", wait=60)
    waiting = threading.Thread(target=source.give, args=(PROBLEMS, 1, 0))
    waiting.start()
    while len(teacher.sampled) < 8:
        time.sleep(0.01)
    source.close()
    waiting.join(30)
    assert not waiting.is_alive()
    assert len(source.kept.path.read_text().splitlines()) == 1  # nothing is said of what was under way


# --- budget ----------------------------------------------------------------------------------------------


def test_no_step_can_exceed_the_budget(teacher: Teacher, make: Make, caplog: pytest.LogCaptureFixture) -> None:
    source = make(budget={"requests": 12})
    found = [metrics(source, source.give(PROBLEMS, step, 0)) for step in (1, 2, 3)]
    assert [(own["requests"], own["over_budget"]) for own in found] == [(8, 0), (2, 6), (0, 8)]
    assert len(teacher.requests) == source.totals["requests"] == 12  # two of them at the start
    assert [record.message.split(":")[0] for record in caplog.records] == ["Source teacher"]
    assert "its budget does not cover all requests of step 2" in caplog.text


def test_a_request_counts_the_most_that_it_can_use_until_it_is_answered(teacher: Teacher, make: Make) -> None:
    source = make(budget={"tokens": 1000})
    most = 40 + len(PROBLEMS[0].prompt) + 64
    for step in range(1, 20):
        used = source.totals["prompt_tokens"] + source.totals["answer_tokens"]
        found = metrics(source, source.give(PROBLEMS, step, 0))
        assert found["requests"] == min((1000 - used) // most, 8)
    assert source.totals["requests"] == len(teacher.requests)
    assert 1000 - most < source.totals["prompt_tokens"] + source.totals["answer_tokens"] <= 1000


# --- answers on disk -------------------------------------------------------------------------------------


def test_answers_are_kept_line_by_line_and_never_asked_for_again(teacher: Teacher, make: Make) -> None:
    source = make()
    first = source.give(PROBLEMS, 1, 0)
    source.close()
    path, count = source.kept.path, len(teacher.requests)
    whole = path.read_bytes()
    assert len(whole.splitlines()) == 9
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:6]) + lines[6][:20])  # a crash
    teacher.greedy = lambda fields: Response(b"", 500)  # is not asked
    resumed = make()
    assert remarks(resumed) == remarks(source)
    second = resumed.give(PROBLEMS, 1, 0)
    assert second.rollouts == first.rollouts
    assert metrics(resumed, second) == metrics(source, first)
    assert resumed.totals == source.totals
    assert len(teacher.requests) == count + 3
    assert len(path.read_bytes().splitlines()) == 9


def test_an_answer_is_on_disk_before_its_thread_asks_again(teacher: Teacher, make: Make) -> None:
    source, lines = make(max_requests=1), list[int]()

    def reply(fields: Fields) -> Fields:
        lines.append(len(source.kept.path.read_bytes().splitlines()))
        return right(fields)

    teacher.reply = reply
    source.give(PROBLEMS, 1, 0)
    assert lines == list(range(1, 9))


def test_a_damaged_line_is_named(teacher: Teacher, make: Make) -> None:
    source = make()
    source.give(PROBLEMS, 1, 0)
    source.close()
    path, lines = source.kept.path, source.kept.path.read_bytes().splitlines(keepends=True)
    for damage, found in ((b"{]\n", "is not an answer of a source"), (lines[3][:1] + b"}\n", "request is missing")):
        path.write_bytes(b"".join([*lines[:3], damage, *lines[4:]]))
        with pytest.raises(UserError, match=rf"teacher.jsonl, line 4,.*{found}.*Delete that line"):
            make().give(PROBLEMS, 1, 0)
    path.write_bytes(b"{}\n" + b"".join(lines[1:]))
    with pytest.raises(UserError, match=r"line 1.*source is missing.*Start a new run"):
        make()


# --- the start, and secrets ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("greedy", "said"),
    [
        (Response(b"", 500), r" after 2 retries \(status_500\). Check that the server runs"),
        (Response(b'{"error": "wrong key"}', 401), r"\(status_401: \{\"error\": \"wrong key\"\}\). Check the key in"),
        (Response(b"<html>"), r"\(not_json\). Check endpoint.url: for most servers it ends with /v1"),
        (Response(b"{}", wait=60), r"\(too_slow\).*endpoint.timeout"),
    ],
)
def test_a_server_that_does_not_answer_ends_the_run_at_the_start(
    teacher: Teacher, make: Make, greedy: Response, said: str
) -> None:
    teacher.greedy = lambda fields: greedy
    with pytest.raises(UserError, match=rf"sources.teacher: {teacher.url} gives no answer.*{said}"):
        make(endpoint={"max_retries": 2, "timeout": 0.5})


def test_an_address_where_nobody_is_ends_the_run_at_the_start(make: Make) -> None:
    with pytest.raises(UserError, match=r"http://127.0.0.1:9/v1 gives no answer \(connection: ConnectError\)"):
        make(endpoint={"url": "http://127.0.0.1:9/v1", "max_retries": 0})


def test_the_key_is_sent_and_shown_nowhere(
    teacher: Teacher, make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: Any
) -> None:
    monkeypatch.setenv("TEACHER_KEY", f"{KEY}\n")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-another-secret")
    echo = Response(f'{{"error": "{KEY} is wrong"}}'.encode(), 401)
    teacher.greedy = lambda fields: echo
    with pytest.raises(UserError) as refused:
        make(endpoint={"api_key_env": "TEACHER_KEY"})
    assert KEY not in str(refused.value)
    assert "*** is wrong" in str(refused.value)
    teacher.greedy = right
    source = make(endpoint={"api_key_env": "TEACHER_KEY"}, num_generations=1)
    found = metrics(source, given_one(teacher, source, chat(f"your key is {KEY}")))
    assert found["failed/repeats_key"] == 1
    assert {headers["authorization"] for headers in teacher.headers} == {f"Bearer {KEY}"}
    teacher.reply = right
    make(num_generations=1, endpoint={"extra_body": {"x": 1}}).give(PROBLEMS[:1], 5, 0)
    assert teacher.headers[-1]["authorization"] == "Bearer none"
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert written
    assert all(KEY.encode() not in data for data in written)
    assert KEY not in "".join(capfd.readouterr())


def test_a_redirect_is_not_followed(teacher: Teacher, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", KEY)
    other = Teacher()
    source = make(endpoint={"api_key_env": "TEACHER_KEY"}, num_generations=1)
    given = given_one(teacher, source, Response(b"", 307, {"Location": f"{other.url}/chat/completions"}))
    other.close()
    assert given.figures["failed/status_307"] == 1
    assert not other.requests


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("", "the environment variable TEACHER_KEY is not set"),
        ("sk-very secret", "does not hold a key"),
        ("sk-vérysecret", "does not hold a key"),
    ],
)
def test_a_key_that_is_none_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch, value: str, said: str) -> None:
    monkeypatch.setenv("TEACHER_KEY", value)
    with pytest.raises(UserError, match=rf"sources.teacher.endpoint.api_key_env: .*{said}") as refused:
        make(endpoint={"api_key_env": "TEACHER_KEY"})
    assert "very" not in str(refused.value)
