import functools
import inspect
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from hacrl.errors import UserError
from hacrl.tasks.verify import SoftOverlong, Verdict, Verifier, exact
from hacrl.tasks.worker import Reply, Worker
from reference import soft_overlong

FUNCTIONS = """
import mmap, os, subprocess, sys, threading, time

def length(prompts, completions, **columns):
    return [len(completion) for completion in completions]

def shapes(prompts, completions, answer, level, **columns):
    assert not {"torch", "transformers", "hacrl"} & set(sys.modules)
    assert columns == {}
    return [float(completion == [{"role": "assistant", "content": "b"}] if isinstance(prompt, list)
                  else completion == "a") for prompt, completion in zip(prompts, completions)]

def by_text(prompts, completions, **columns):
    print("scoring", completions[0])
    match completions[0]:
        case "hang":
            subprocess.Popen(["sleep", "1000"])
            9**9**9
        case "exit":
            sys.exit(3)
        case "abort":
            os.abort()
        case "raise":
            return [1 / 0]
        case "library":
            return os.listdir("/no/such/folder")
        case "long":
            return [0.5]
        case "none":
            return None
        case "nan":
            return [float("nan")]
        case "text":
            return ["1.0"]
    return [1.0]

def needs_label(prompts, completions, label, **columns):
    return [1.0] * len(completions)

async def coroutine(prompts, completions, **columns):
    return [1.0] * len(completions)

def hungry(completions, **columns):
    match completions[0]:
        case "itself":
            b"x" * (8 << 30)  # in one operation, which lets no other thread of the process run
        case "child":
            subprocess.run([sys.executable, "-c", "b'x' * (8 << 30)"], start_new_session=True)
        case "unused":
            room = mmap.mmap(-1, 8 << 30)
            time.sleep(0.3)
        case "file":
            with open("large", "wb") as file:
                file.truncate(700 << 20)
            with open("large", "rb") as file:
                room = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                sum(room[place] for place in range(0, 700 << 20, 4096))
                time.sleep(0.3)
        case "shared":
            room = b"x" * (300 << 20)
            os.fork(), os.fork()
            time.sleep(0.3)
    return [1.0]

def pid(completions, **columns):
    return [os.getpid()]

def start_processes():
    "One as it comes, one in a session of its own, and a daemon whose parent is gone."
    plain = subprocess.Popen(["sleep", "777"])
    apart = subprocess.Popen(["sleep", "777"], start_new_session=True)
    daemon = subprocess.run("setsid sleep 777 > /dev/null 2>&1 & echo $!", shell=True, capture_output=True).stdout
    with open("left", "w") as file:
        file.write(f"{plain.pid} {apart.pid} {int(daemon)}")

def starts(completions, **columns):
    start_processes()
    return [os.getpid()]

def leaves(completions, **columns):
    start_processes()
    if completions == ["now"]:
        os.kill(os.getpid(), 9)
    threading.Timer(0.2, os._exit, [3]).start()
    return [1.0]

def forks(completions, **columns):
    os.fork()
    return [float(completion) for completion in completions]

def large(completions, **columns):
    return [0.0, 10**400 if completions[0] == "int" else float(completions[0])]

number = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The current directory, with a module of reward functions."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    return tmp_path


@pytest.fixture(scope="module")
def math_verifier():
    with Verifier([("math", 1.0)], timeout=3.0, workers=2) as verifier:
        verifier.score(["?"], ["1"], {"answer": ["1"]})
        yield verifier


def score(verifier, *completions, answer="4", **columns):
    count = len(completions)
    columns = {key: [value] * count for key, value in {"answer": answer, **columns}.items()}
    return verifier.score(["?"] * count, completions, columns)


def test_exact():
    completions = ["4", " 4 \n", "so\n\n 4\n", "a  b", "so 4", "4\nso", "", [{"role": "assistant", "content": "4"}]]
    golds = ["4", "4", "4", "a b", "4", "4", "4", "4"]
    assert exact(completions=completions, answer=golds) == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("answer", "completion", "reward"),
    [
        ("72", "It is 70 and 2 more.\n#### 72", 1.0),
        ("72", "The answer is 72.", 1.0),
        ("72", "The answer is 71.", 0.0),
        ("1/2", r"so $\boxed{\frac{1}{2}}$", 1.0),
        (r"\frac{1}{2}", "0.5", 1.0),
        (r"\frac{1}{2}", r"\boxed{\dfrac{2}{4}}", 1.0),
        (r"\frac{1}{2}", r"\boxed{\frac{1}{3}}", 0.0),
        ("1000", "1,000", 1.0),
        (r"-\frac{5}{3}.", r"$x = -\frac{5}{3}$.", 1.0),
        (r"3\sqrt{13}", r"\(\sqrt{117}\)", 1.0),
        (r"3\sqrt{13}", r"3\sqrt{13} ", 1.0),
        ("3", r"3\sqrt{13}", 0.0),
        (r"\{1,2,3\}", r"\boxed{\{3,1,2\}}", 1.0),
        (r"\{1,2,3\}", r"\boxed{\{1,2\}}", 0.0),
        (r"\left( 3, \frac{\pi}{2} \right)", r"\boxed{(3, \pi/2)}", 1.0),
        (r"\left( 3, \frac{\pi}{2} \right)", r"\boxed{(\pi/2, 3)}", 0.0),
        ("x^2+2x+1", r"$(x+1)^2$", 1.0),
        ("x=5", r"\boxed{5}", 1.0),
        (r"\text{Evelyn}", r"\boxed{\text{Evelyn}}", 1.0),
        (r"\text{Evelyn}", r"\boxed{\text{Carla}}", 0.0),
        ("p - q", "p - q", 1.0),
        (r"10 \text{ cm}^2", "10", 1.0),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"$\begin{pmatrix}1\\2\end{pmatrix}$", 1.0),
        (r"Adding up, $2 + 2 = \boxed{4}$.", "4", 1.0),
        ("4", r"\boxed{3} or \boxed{4}", 0.0),
        ("4", "", 0.0),
        ("4", "no idea", 0.0),
        ("4", r"\boxed{\frac{", 0.0),
        ("???", "4", None),
        ("", "4", None),
    ],
)
def test_math(math_verifier, answer, completion, reward):
    assert score(math_verifier, completion, answer=answer) == [Verdict(reward, parts={"math": reward})]


def test_math_that_hangs_is_killed_and_results_keep_their_order(math_verifier):
    verdicts = score(math_verifier, "1", "9**9**9**9", *["4", "5"] * 20)
    assert [verdict.reward for verdict in verdicts] == [0.0, None, *[1.0, 0.0] * 20]
    assert verdicts[1] == Verdict(None, "timeout", "math took longer than 3 s", {"math": None})
    assert score(math_verifier, "4")[0].reward == 1.0


def test_a_verifier_that_is_closed_judges_no_more():
    """Of a batch that is under way, nothing is tried again."""
    with Verifier([("math", 1.0)], timeout=60.0, workers=1) as verifier, ThreadPoolExecutor(1) as thread:
        assert score(verifier, "4")[0].reward == 1.0
        verdicts = thread.submit(score, verifier, *["9**9**9**9"] * 8)
        time.sleep(0.5)
        verifier.close()
        assert [verdict.problem for verdict in verdicts.result(timeout=30)] == ["error"] * 8


def test_math_of_long_texts(math_verifier):
    texts = ["word " * 1_000_000 + r"\boxed{4}", "\\boxed{" * 700_000, "4"]
    verdicts = score(math_verifier, *texts)
    assert verdicts[1].reward in (None, 0.0)
    assert verdicts[2].reward == 1.0


PATHOLOGICAL = [
    r"\boxed{" + r"\frac{1}{" * 400 + "2" + "}" * 401,
    r"\boxed{" + "9" * 20_000 + "}",
    r"\boxed{10^{10^{10}}}",
    r"\boxed{99999999!}",
    r"\boxed{\sum_{n=1}^{10^{12}} \frac{1}{n}}",
    r"\boxed{\begin{pmatrix}" + r"1 & 2 \\ " * 500 + r"\end{pmatrix}}",
    r"\boxed{\left(\left[\left\{4}",
    r"\boxed{0/0}",
    r"\boxed{\text{" + "a" * 100_000 + "}}",
    r"\boxed{4}" * 2_000,
    r"\boxed{\x00\ud800}",
    "$" * 1_001 + "4",
    r"\boxed{\infty - \infty}",
    r"\boxed{[1, 10^{100}) \cup (-\infty, " + "9" * 500 + "]}",
]


def test_pathological_latex_costs_no_other_verdict(math_verifier):
    """Each is judged wrong or not judged, never right, and what comes after it is judged as ever."""
    texts = [text for pathological in PATHOLOGICAL for text in (pathological, "4")]
    verdicts = score(math_verifier, *texts, answer="5")
    assert all(verdict.reward in (None, 0.0) for verdict in verdicts[::2])
    assert [verdict.reward for verdict in verdicts[1::2]] == [0.0] * len(PATHOLOGICAL)
    assert [verdict.reward for verdict in score(math_verifier, "4", "5", answer="5")] == [0.0, 1.0]


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(UserError, match=r"pip install 'hacrl\[math\]'"):
        Verifier([("math", 1.0)])


def test_users_function_gets_what_trl_would_give_it():
    with Verifier([("functions:shapes", 1.0)]) as verifier:
        columns = {"answer": ["1", "2"], "level": [1, 2], "prompt": ["x", "y"]}
        verdicts = verifier.score(["?", [{"role": "user", "content": "?"}]], ["a", "b"], columns)
        assert [verdict.reward for verdict in verdicts] == [1.0, 1.0]
        assert verifier.score([], [], {}) == []
        with pytest.raises(ValueError, match="column level has 1 values for 2"):
            verifier.score(["?", "?"], ["a", "b"], {"level": [1]})


def test_users_function_that_hangs_or_ends_its_process(capfd):
    with Verifier([("functions.py:by_text", 1.0)], call_timeout=1.0) as verifier:
        assert score(verifier, "fine")[0].reward == 1.0
        hung = Verdict(None, "timeout", "by_text took longer than 1 s", {"by_text": None})
        assert score(verifier, "hang", "fine") == [hung, hung]
        for text, end in {"exit": "exit code 3", "abort": "SIGABRT"}.items():
            died = Verdict(None, "error", f"by_text ended its process ({end})", {"by_text": None})
            assert score(verifier, text) == [died]
        assert score(verifier, "fine")[0].reward == 1.0
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.count("scoring") == 5


def test_users_function_with_a_mistake(folder):
    line = FUNCTIONS[: FUNCTIONS.index("1 / 0")].count("\n") + 1
    with Verifier([("functions:by_text", 1.0)]) as verifier:
        for completions, message in {
            ("raise",): f"raised ZeroDivisionError: division by zero ({folder}/functions.py:{line}).",
            ("library",): f"No such file or directory: '/no/such/folder' ({folder}/functions.py:",
            ("long", "long"): "returned 1 values, expected 2, one for each completion.",
            ("none",): "returned a NoneType, expected a list of 1 numbers or None.",
            ("nan",): "returned nan (float) for completion 0, expected a finite number or None.",
            ("text",): "returned '1.0' (str) for completion 0, expected a finite number or None.",
        }.items():
            with pytest.raises(UserError) as caught:
                score(verifier, *completions)
            assert str(caught.value).startswith("Reward function functions:by_text ")
            assert message in str(caught.value)
        assert score(verifier, "fine")[0].reward == 1.0
    with Verifier([("functions:needs_label", 1.0)]) as verifier, pytest.raises(UserError, match="'label'"):
        score(verifier, "a")


def test_functions_that_cannot_be_loaded(folder):
    (folder / "broken.py").write_text("import os\nimport no_such_package\n")
    (folder / "typo.py").write_text("def f(:\n")
    (folder / "quits.py").write_text("raise SystemExit(4)")
    for name, message in {
        "maths": "exact and math are built in",
        ":f": "exact and math are built in",
        "nowhere:f": f"there is no module nowhere, neither installed nor in {folder}",
        "functions.sub:f": "there is no module functions.sub",
        "nowhere.py:f": f"there is no file {folder}/nowhere.py",
        "functions:lenght": "the functions of functions are length, shapes, by_text",
        "functions:number": "is not a function but a value of type int",
        "functions.py:coroutine": "is async",
        "broken:f": f"raised ModuleNotFoundError: No module named 'no_such_package' ({folder}/broken.py:2)",
        "typo.py:f": "raised SyntaxError",
        "quits:f": "ended its process (exit code 4) while it was imported",
    }.items():
        with pytest.raises(UserError) as caught:
            Verifier([(name, 1.0)])
        assert name in str(caught.value)
        assert message in str(caught.value)


def half(prompts, completions, **columns):
    return [0.5] * len(completions)


def even_lengths_only(prompts, completions, **columns):
    return [None if len(completion) % 2 else 1 for completion in completions]


class Constant:
    def __call__(self, prompts, completions, **columns):
        return [True] * len(completions)


def test_weighted_sum_and_functions_that_do_not_apply():
    rewards = [(half, 2.0), (even_lengths_only, 0.1), ("functions:length", -1.0), ("exact", 10), (Constant(), 0.0)]
    with Verifier(rewards) as verifier:
        first, second = score(verifier, "ab", "4")
    parts = {"half": 0.5, "even_lengths_only": 1.0, "length": 2.0, "exact": 0.0, "Constant": 1.0}
    assert first == Verdict(pytest.approx(1.0 + 0.1 - 2.0), parts=parts)
    assert second.reward == 1.0 - 1.0 + 10
    assert second.parts["even_lengths_only"] is None
    with Verifier([(even_lengths_only, 1.0)]) as verifier:
        assert score(verifier, "a") == [Verdict(None, parts={"even_lengths_only": None})]


@pytest.mark.parametrize(("longest", "cache"), [(100, 20), (100, 100), (100, 0), (7, 3), (1, 1)])
def test_soft_overlong(longest, cache):
    lengths = list(range(1, longest + 3))
    texts, answers = ["4"] * len(lengths), {"answer": ["4"] * len(lengths)}
    with Verifier([("exact", 1.0), (SoftOverlong(longest, cache), 0.5)]) as verifier:
        verdicts = verifier.score(["?"] * len(lengths), texts, answers, lengths)
        # Held-out answers come without lengths: accuracy has no penalty.
        (without,) = verifier.score(["?"], ["4"], {"answer": ["4"]})
    penalties = [soft_overlong(length, longest, cache) for length in lengths]
    assert [verdict.parts["soft_overlong"] for verdict in verdicts] == pytest.approx(penalties, rel=1e-15)
    assert [verdict.reward for verdict in verdicts] == pytest.approx([1 + p / 2 for p in penalties], rel=1e-15)
    assert penalties[-1] == -1
    assert without == Verdict(1.0, parts={"exact": 1.0, "soft_overlong": None})


def test_soft_overlong_by_hand():
    # The example of TRL: 90 tokens lie in the middle between 80 and 100.
    assert [SoftOverlong(100, 20).penalty(length) for length in (80, 85, 90, 100, 101)] == [0, -0.25, -0.5, -1, -1]


def test_a_penalty_on_length_alone_is_no_reward():
    with Verifier([(even_lengths_only, 1.0), (SoftOverlong(10, 5), 1.0)]) as verifier:
        odd, even = verifier.score(["?"] * 2, ["a", "ab"], {}, [3, 10])
    assert odd == Verdict(None, parts={"even_lengths_only": None, "soft_overlong": 0.0})
    assert even == Verdict(0.0, parts={"even_lengths_only": 1.0, "soft_overlong": -1.0})


def test_one_failure_makes_the_reward_none():
    with Verifier([(half, 1.0), ("functions:by_text", 1.0)]) as verifier:
        [verdict] = score(verifier, "abort")
    assert (verdict.reward, verdict.problem, verdict.parts) == (None, "error", {"half": 0.5, "by_text": None})


def test_callables_with_a_mistake():
    async def coroutine(prompts, completions, **columns):
        return [1.0]

    def short(prompts, completions, **columns):
        return []

    def raises(prompts, completions, **columns):
        raise RuntimeError("no key")

    with pytest.raises(UserError, match="coroutine is async"):
        Verifier([(coroutine, 1.0)])
    with Verifier([(short, 1.0)]) as verifier, pytest.raises(UserError, match="returned 0 values, expected 1"):
        score(verifier, "a")
    with Verifier([(raises, 1.0)]) as verifier, pytest.raises(UserError, match=r"no key \(.*test_verify.py:\d+\)"):
        score(verifier, "a")
    for rewards, said in (([], "at least one reward"), ([(half, 1.0), (half, 2.0)], r"Two .* are called half: give")):
        with pytest.raises(UserError, match=said):
            Verifier(rewards)


def test_weights_that_add_up_to_one_do_so():
    def one(completions, **columns):
        return [1.0] * len(completions)

    def two(completions, **columns):
        return [1.0] * len(completions)

    with Verifier([(one, 0.7), (two, 0.2), (half, 0.2)]) as verifier:  # 0.7 + 0.2 + 0.1 is less than 1
        assert [verdict.reward for verdict in verifier.score(["?"], ["a"], {})] == [1.0]


def test_rewards_may_be_numbers_and_arrays_of_numpy_and_torch():
    def array(completions, **columns):
        return np.array([len(text) for text in completions])

    def tensor(completions, **columns):
        return torch.tensor([len(text) / 4 for text in completions])

    def right(completions, answer, **columns):
        return list(np.array(completions) == np.array(answer))

    def elements(completions, **columns):
        return [torch.tensor(0.5), None]

    with Verifier([(array, 1.0), (tensor, 1.0), (right, 1.0), (elements, 1.0)]) as verifier:
        verdicts = verifier.score(["?", "?"], ["a", "abc"], {"answer": ["b", "abc"]})
    assert [list(verdict.parts.values()) for verdict in verdicts] == [[1.0, 0.25, 0.0, 0.5], [3.0, 0.75, 1.0, None]]
    with (
        Verifier([(lambda completions, **columns: [np.ones(2)], 1.0)]) as verifier,
        pytest.raises(UserError, match="Reward function lambda raised ValueError"),
    ):
        verifier.score(["?"], ["a"], {})


@pytest.mark.skipif(sys.platform != "linux", reason="memory is watched on Linux only")
def test_memory_limit(folder):
    """It counts what is in memory, in all processes of the function, once what they share, and no mapped files."""
    worker = Worker(f"{folder}/functions.py:hungry", path=sys.path, memory_gib=0.5)
    too_much = Reply("memory", detail="used more than the 0.5 GiB of memory that task.reward_memory_gib allows")
    expected = {"itself": too_much, "child": too_much}
    for use, reply in {**expected, **dict.fromkeys(("unused", "file", "shared"), Reply("returned", [1.0]))}.items():
        assert worker.call({"completions": [use]}, limit=60) == reply
    worker.close()
    with Verifier([("functions:hungry", 1.0)], memory_gib=0.5) as verifier:
        with pytest.raises(UserError, match=r"^Reward function functions:hungry used more than the 0\.5 GiB of memory"):
            score(verifier, "itself")
        assert score(verifier, "fine")[0].reward == 1.0


def test_a_function_that_forks_and_returns_in_both_processes():
    with Verifier([("functions:forks", 1.0)]) as verifier:
        assert [score(verifier, text)[0].reward for text in "1234"] == [1.0, 2.0, 3.0, 4.0]


def test_an_answer_to_another_call_is_not_taken(folder):
    """Not even if the function writes one to the socket itself."""
    (folder / "liar.py").write_text(
        "import gc, json, socket\n"
        "def lie(completions, **columns):\n"
        "    [channel] = [found for found in gc.get_objects() if isinstance(found, socket.socket)]\n"
        "    channel.sendall(json.dumps([int(completions[0]) - 1, True, [-1.0]]).encode() + b'\\n')\n"
        "    return [float(completions[0])]\n"
    )
    with Verifier([("liar:lie", 1.0)]) as verifier:
        assert [score(verifier, text)[0].reward for text in "123"] == [1.0, 2.0, 3.0]


def test_an_answer_that_the_function_writes_itself_runs_no_code(folder):
    """Only JSON is read: anything else ends the process of the function."""
    (folder / "pickler.py").write_text(
        "import gc, os, pickle, socket\n"
        "class Evil:\n"
        "    def __reduce__(self):\n"
        "        return os.mkdir, ('ran',)\n"
        "def lie(completions, **columns):\n"
        "    [channel] = [found for found in gc.get_objects() if isinstance(found, socket.socket)]\n"
        "    channel.sendall(pickle.dumps((1, True, Evil())) + b'\\n')\n"
        "    return [1.0]\n"
    )
    with Verifier([("pickler:lie", 1.0)]) as verifier:
        assert score(verifier, "a")[0].problem == "error"
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("raise KeyboardInterrupt", "raised KeyboardInterrupt"),
        ("raise type('Mute', (Exception,), {'__str__': lambda self: 1 / 0})", "raised Mute"),
    ],
)
def test_exceptions_that_are_hard_to_tell(folder, capfd, body, told):
    (folder / "odd.py").write_text(f"def fail(completions, **columns):\n    {body}\n")
    with Verifier([("odd:fail", 1.0)]) as verifier, pytest.raises(UserError, match=told):
        score(verifier, "a")
    assert "Traceback" not in capfd.readouterr().err


def test_what_a_function_prints_cannot_take_over_the_terminal(folder, capfd):
    (folder / "loud.py").write_text(
        "import os, sys\n"
        "def score(completions, **columns):\n"
        "    print('\\x1b[31mred')\n"
        "    print('10%\\r20%', file=sys.stderr)\n"
        "    os.system(r'printf \"\\033[2Jgone\\n\"')\n"
        "    return [1.0]\n"
    )
    with Verifier([("loud:score", 1.0)]) as verifier:
        assert score(verifier, "a")[0].reward == 1.0
    printed = capfd.readouterr().err
    assert printed.splitlines() == [r"\x1b[31mred", "10%", "20%", r"\x1b[2Jgone"]


def spoils(prompts, completions, answer, words, **columns):
    value = float(len(prompts[0]) == len(completions[0]) == len(answer) == len(words[0]) == len(columns) == 1)
    for inputs in (prompts[0][0], prompts, completions[0], completions, answer, words[0], columns):
        inputs.clear()
    return [value]


def test_functions_may_change_what_they_are_given(folder):
    (folder / "apart.py").write_text(inspect.getsource(spoils))
    prompt, columns = [{"role": "user", "content": "?"}], {"answer": ["4"], "words": [["w"]], "more": [1]}
    rewards = [(functools.partial(spoils), 1.0), ("apart:spoils", 1.0), ("exact", 1.0), (half, 1.0)]
    with Verifier(rewards) as verifier:
        for _ in range(2):
            [verdict] = verifier.score([prompt], ["4"], columns)
            assert verdict.parts == {"partial": 1.0, "spoils": 1.0, "exact": 1.0, "half": 0.5}
    assert prompt == [{"role": "user", "content": "?"}]
    assert columns == {"answer": ["4"], "words": [["w"]], "more": [1]}


@pytest.mark.parametrize("value", ["1e308", "-1.1e9", "int"])
def test_rewards_that_are_too_large(value):
    expected = r"\) for completion 1, expected a number from -1e\+09 to 1e\+09 or None\."
    with Verifier([("functions:large", 1.0)]) as verifier, pytest.raises(UserError, match=expected):
        score(verifier, value, "")
    with Verifier([(half, 1e9), ("functions:large", -1.0)]) as verifier:
        assert score(verifier, "1e9", "")[1].reward == -5e8
        with pytest.raises(
            UserError, match=r"weighted sum of the rewards \(half, large\) is 1\.5e\+09 for completion 1"
        ):
            score(verifier, "-1e9", "")


@pytest.mark.parametrize(
    ("sent", "outcome", "detail"),
    [
        (signal.SIGKILL, "died", "ended its process (SIGKILL)"),
        (signal.SIGSTOP, "timeout", "took longer than 1 s"),
    ],
)
def test_large_arguments_for_a_child_that_does_not_read(folder, sent, outcome, detail):
    worker = Worker(f"{folder}/functions.py:pid", path=sys.path)
    arguments = {"completions": ["a" * 10_000_000]}
    [pid] = worker.call(arguments, limit=60).values
    os.kill(int(pid), sent)
    assert worker.call(arguments, limit=1) == Reply(outcome, detail=detail)
    assert worker.call(arguments, limit=60).values != [pid]
    worker.close()


@pytest.mark.parametrize("when", ["now", "later"])
def test_what_a_function_started_ends_with_a_process_that_ended_by_itself(folder, when):
    worker = Worker(f"{folder}/functions.py:leaves", path=sys.path)
    reply = worker.call({"completions": [when]}, limit=60)
    left = [int(pid) for pid in (folder / "left").read_text().split()]
    if when == "now":
        assert reply == Reply("died", detail="ended its process (SIGKILL)")
    else:
        assert reply.outcome == "returned"
        time.sleep(1)
    worker.close()
    assert_ended(*left)


def test_what_a_function_started_ends_with_the_verifier(folder):
    with Verifier([("functions:starts", 1.0)]) as verifier:
        pid = int(score(verifier, "a")[0].reward)
        left = [int(pid) for pid in (folder / "left").read_text().split()]
        assert score(verifier, "b")[0].reward == pid
        assert all(map(is_running, [pid, *left]))
    assert_ended(pid, *left)


def test_children_end_with_a_killed_parent(folder):
    code = (
        "import time; from hacrl.tasks.verify import Verifier\n"
        "verifier = Verifier([('functions:starts', 1.0)])\n"
        "print(int(verifier.score(['?'], ['a'], {})[0].reward), flush=True)\n"
        "time.sleep(1000)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        left = [int(pid) for pid in (folder / "left").read_text().split()]
        assert all(map(is_running, [pid, *left]))
        parent.kill()
    assert_ended(pid, *left)


def assert_ended(*pids):
    for _ in range(300):
        running = [pid for pid in pids if is_running(pid)]
        if not running:
            return
        time.sleep(0.1)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
    pytest.fail(f"{len(running)} of {len(pids)} processes are left")


def is_running(pid):
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout
    return state.strip() != "" and not state.startswith("Z")
