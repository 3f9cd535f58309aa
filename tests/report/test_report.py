"""`grpo report` as a user runs it; its page in a real Chromium, opened from the disk."""

import itertools
import json
import re
import shutil
import sys
import unicodedata
from pathlib import Path

import pytest
from browser import chromium, needs_browser
from conftest import running_server
from matplotlib.image import imread
from pictured import drawing
from recorded import completion, write
from trainer_runs import lines, options, plain_python

from grpo.report import __main__ as report
from grpo.report.page import embedded, run_names

HOSTILE = [
    '</script><script>window.pwned=1</script><img src="http://127.0.0.1:9/x" onerror="window.pwned=1">',
    "<!-- <script> ]]> {{data}} ${window.pwned=1} {{policy}}",
    "line\u2028paragraph\u2029lone \ud800 surrogate \udfff and \x00\x1b[31m controls",
    "left \u202eright to left\u202c \u200b\ufeff يمين",
]


@pytest.fixture
def main(monkeypatch, capsys):
    """`main(*arguments)`: exit code, lines of stdout, lines of stderr of the program, in this process."""

    def run(*arguments) -> tuple[int, list[str], list[str]]:
        monkeypatch.setattr(sys, "argv", ["grpo/report/__main__.py", *map(str, arguments)])
        try:
            code = report.main()
        except SystemExit as ended:
            code = ended.code
        shown = capsys.readouterr()
        return code, shown.out.splitlines(), shown.err.splitlines()

    return run


def metrics(count: int, **changes) -> list[dict]:
    rows = [{"step": 0, "eval_accuracy": 0.25, "eval_accuracy_se": 0.05, "eval_reward": 0.5, "eval_reward_se": 0.1}]
    same = {"time/generate": 0.5, "time/update": 0.25, "step_time": 1.0} | changes
    for step in range(1, count + 1):
        rows.append({"step": step, "reward": step / count, "kl": 0.01 * step, "num_tokens": 100 * step} | same)
    rows[-1]["eval_reward"] = 0.9
    return rows


def page_data(folder) -> dict:
    page = (folder / "report.html").read_text(encoding="utf-8")
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_a_page_and_pictures_beside_the_run(main, tmp_path):
    no_formula = {r"rewards/$\cash$/mean": 1.0}
    run = write(tmp_path / "run", metrics(30, **no_formula), [completion(step) for step in range(1, 31)])
    (run / "report").mkdir()
    (run / "report/report.unfinished").write_text("killed")
    code, written, errors = main(run, "--png")
    assert (code, errors) == (0, [])
    names = ["report.html", "reward.png", "held_out_problems.png", "policy.png", "speed.png", "everything_else.png"]
    assert written == [str(run / "report" / name) for name in [*names, "time.png"]]
    assert sorted(path.name for path in (run / "report").iterdir()) == sorted([*names, "time.png"])
    for path in written[1:]:
        assert imread(path)[..., :3].std() > 0.02
    data = page_data(run / "report")
    assert data["window"] == 5 and len(data["completions"][0]) == 30
    assert data["runs"][0]["accuracy"] == [[0.25, 0.05]] * 2 and data["runs"][0]["tokens"] == 3000
    assert data["runs"][0]["eval_reward"] == [[0.5, 0.1], [0.9, None]]
    assert data["runs"][0]["reward"] == pytest.approx([3 / 30, 28 / 30]) and data["runs"][0]["seconds"] == 30
    code, written, _ = main(run, "--smoothing", 1)  # over the older one, whose pictures would show another smoothing
    assert code == 0 and page_data(run / "report")["window"] == 1
    assert written == [written[0]] and [path.name for path in (run / "report").iterdir()] == ["report.html"]


def test_several_runs_by_name_and_what_differs_in_their_settings(main, tmp_path):
    first = write(tmp_path / "a/run", metrics(3), settings="beta: 0.04\nseed: 1\nreward_funcs: [x]\noutput_dir: a\n")
    (first / "starts.jsonl").write_text('{"step": 0, "hosts": {"box": ["cpu"]}}\n')
    second = write(tmp_path / "b/run", metrics(5), settings="beta: 0.04\nseed: 2\nuse_peft: true\noutput_dir: b\n")
    code, written, errors = main(first, second, "--output", tmp_path / "both")
    assert code == 0 and written[0] == str(tmp_path / "both/report.html")
    assert errors == [f"{run}: there is no completions.jsonl: no completions are shown" for run in (first, second)]
    data = page_data(tmp_path / "both")
    assert [(run["name"], len(run["notes"])) for run in data["runs"]] == [("a/run", 1), ("b/run", 1)]
    assert data["settings"] == {
        **{"beta": ["0.04", "0.04"], "seed": ["1", "2"], "reward_funcs": ['["x"]', None], "use_peft": [None, "true"]}
    }
    assert data["starts"] == [[{"step": "0", "hosts": '{"box": ["cpu"]}'}], []]
    (reward,) = [chart for chart in data["sections"][0]["charts"] if chart["title"] == "reward"]
    assert [line["run"] for line in reward["curves"]["reward"]] == [0, 1]


def test_runs_are_named_by_their_paths_from_the_folder_that_holds_all(tmp_path):
    assert run_names([tmp_path / "run"]) == [str(tmp_path / "run")]
    assert run_names([tmp_path / "x/run", tmp_path / "y/run"]) == ["x/run", "y/run"]
    assert run_names([tmp_path / "x", tmp_path / "x/y"]) == ["x", "x/y"]
    assert run_names([Path("."), Path("x/run")]) == [Path.cwd().name, f"{Path.cwd().name}/x/run"]
    assert run_names([tmp_path / "runs/1", tmp_path / "old/2"]) == ["runs/1", "old/2"]


def test_mistakes_end_in_one_line_and_nothing_is_written(main, tmp_path):
    run = write(tmp_path / "run", metrics(3), [])
    another_run = write(tmp_path / "other", metrics(3))
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation/metrics.json").write_text("{}")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/report.html").write_text("<h1>my own</h1>")
    cases = [
        ([], "runs=[]: name the folder of a run"),
        ([tmp_path / "evaluation"], "there is no metrics.jsonl of a run"),
        ([run, tmp_path / "other/../run"], "name each run once"),
        ([run] * 11, "only 10 can be told apart"),
        ([run, "--smoothing", -1], "smoothing=-1: use 0 or more"),
        ([run, "--output", another_run], "it is something else: name a new folder, or that of an older report"),
        ([run, "--output", tmp_path / "mine"], "it is something else"),
        ([run, "--output", run / "config.yaml"], "it is something else"),
        ([run, "--outputs", "x"], "did you mean output?"),
    ]
    before = sorted(tmp_path.rglob("*"))
    for arguments, message in cases:
        code, written, errors = main(*arguments)
        assert (code, written, len(errors)) == (2, [], 1) and message in errors[0], arguments
    code, _, errors = main(run, "--output", "/proc/report")
    assert code == 1 and ": error: " in errors[0] and "/proc/report" in errors[0]
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / "mine/report.html").read_text() == "<h1>my own</h1>"


def test_what_is_embedded_cannot_leave_its_place():
    data = {text: [text] for text in HOSTILE}
    text = embedded(data)
    text.encode()  # no lone surrogates
    assert not re.search("[<>&\u2028\u2029\x00-\x1f]", text)
    assert json.loads(text) == data


def test_a_long_run_of_long_completions_gives_a_page_that_opens(main, tmp_path):
    names = [f"rewards/{name}/mean" for name in "abcdefghij"]
    rows = [{"step": step} | {name: (step * 7919 % 104729) / 104729 for name in names} for step in range(1, 10_001)]
    long = [completion(step, completion="x" * 2_000) for step in range(1, 500) for _ in range(10)]
    run = write(tmp_path / "run", rows, long)
    code, _, errors = main(run)
    assert code == 0 and len(errors) == 1
    shown, recorded = map(int, re.search(r"completions of (\d+) of (\d+) training steps are shown", errors[0]).groups())
    assert recorded == 499 and 200 < shown < 300
    assert 5_000_000 < (run / "report/report.html").stat().st_size < 7_000_000


@pytest.fixture(scope="module")
def trained(model_folder, data_folder, tmp_path_factory):
    """Train a few steps with the real programs and return the run's folder."""
    folder = tmp_path_factory.mktemp("trained")
    with running_server(model_folder, folder) as server:
        settings = options(model_folder, data_folder, folder / "run", ref_servers=server.url, max_steps=6)
        ended = plain_python(*settings)
        assert ended.returncode == 0, ended.stdout
    return folder / "run"


def texts_of(browser, selector: str) -> list[str]:
    """Return the texts of all elements that match, as they are and not as they are laid out."""
    return browser.js(f"[...document.querySelectorAll({json.dumps(selector)})].map((element) => element.textContent)")


def visible(text: str) -> str:
    """Return the text as the page shows it, with numbers for the characters that cannot be seen."""
    shown, hidden = "\t\n\u200c\u200d", ("Cc", "Cf", "Cs", "Zl", "Zp")
    is_hidden = {letter: letter not in shown and unicodedata.category(letter) in hidden for letter in text}
    return "".join(f"U+{ord(letter):04X}" if is_hidden[letter] else letter for letter in text)


def choose(browser, id: str, value: str) -> None:
    browser.js(f"document.getElementById('{id}').value = {json.dumps(value)}")
    for event in ("input", "change"):
        browser.js(f"document.getElementById('{id}').dispatchEvent(new Event('{event}'))")


@pytest.fixture
def page(main, tmp_path):
    """`page(*runs, *options)`: a browser that shows their page, in which at least so many paths are drawn."""
    with chromium(tmp_path) as browser:

        def open_page(*arguments, paths: int = 8):
            assert main(*arguments, "--output", tmp_path / "report")[0] == 0
            browser.screen(1280, 900)
            browser.open((tmp_path / "report/report.html").as_uri())
            browser.wait(f"document.querySelectorAll('svg.plot path').length > {paths}")
            shapes = "document.querySelectorAll('svg.plot :is(path, circle, line, text)')"
            drawn = browser.js(f"[...{shapes}].map((element) => element.outerHTML).join()")
            assert not re.search("NaN|Infinity|undefined", drawn)
            return browser

        yield open_page
        assert browser.console() == []


@pytest.mark.rare
@needs_browser
def test_the_page_of_real_runs_is_read_with_keys(page, trained, tmp_path):
    copy = tmp_path / "other"
    shutil.copytree(trained, copy, ignore=shutil.ignore_patterns("model", "tensorboard"))
    browser = page(trained, copy)
    rows, recorded = lines(trained / "metrics.jsonl"), lines(trained / "completions.jsonl")
    assert texts_of(browser, "section h2")[-2:] == ["Time by phase", "Completions"]
    browser.js("document.querySelector('#machine').open = true")
    assert {"command", "versions", "commit"} < set(texts_of(browser, "#starts tbody th"))
    assert {"max_steps", "learning_rate"} < set(texts_of(browser, "#all tbody th"))
    assert browser.js("document.querySelector('#settings').hidden")

    # The legend hides and shows a run.
    drawn = "document.querySelector('svg.plot').querySelectorAll('path').length"
    assert browser.js(drawn) == 4  # of two runs the values and their average
    for count in (2, 4):
        browser.js("document.querySelectorAll('#legend input')[1].click()")
        assert browser.js(drawn) == count

    # Arrow keys move a chart's cursor, and what stands there is the run's own number, averaged over five steps.
    browser.js("document.querySelector('svg.plot').focus()")
    for key in ("Home", "PageUp", "ArrowRight", "ArrowRight"):
        browser.press(key)
    words = browser.js("document.activeElement.getAttribute('aria-valuetext')")
    mean = sum(row["reward"] for row in rows if 2 <= row["step"] <= 6) / 5
    first = page_data(tmp_path / "report")["runs"][0]["name"]
    assert float(words.removeprefix(f"step 4: {first} ").split(",")[0]) == pytest.approx(mean, rel=2e-3)

    # Every recorded step of training and evaluation can be reached, and shows what the file has.
    for phase in ("eval", "train"):
        choose(browser, "phase", phase)
        browser.js("document.querySelector('#place').focus()")
        browser.press("Home")
        steps = list(dict.fromkeys(row["step"] for row in recorded if row["phase"] == phase))
        for place, step in enumerate(steps):
            assert browser.js("document.querySelector('#step').value") == str(step)
            assert browser.text("#which") == f"{place + 1} of {len(steps)}"
            shown = [row for row in recorded if (row["phase"], row["step"]) == (phase, step)]
            assert texts_of(browser, ".completion pre") == [visible(row["completion"]) for row in shown]
            prompts = [prompt for prompt, _ in itertools.groupby(row["prompt"] for row in shown)]
            assert texts_of(browser, ".group dd:nth-of-type(1)") == prompts
            facts = texts_of(browser, ".completion:first-of-type .facts")[0]
            assert ("reward" in facts and "advantage" in facts) if phase == "train" else "correct" in facts
            browser.press("ArrowRight")
    choose(browser, "step", "2")
    assert browser.text("#which") == f"2 of {len(steps)}"

    browser.check_widths()
    assert browser.hosts() == {""}  # the file, and nobody else


@pytest.mark.rare
@needs_browser
def test_the_charts_zoom_together_and_leave_out_what_never_changes(page, tmp_path):
    rows = [{"step": step, "reward": 2.0**step, "loss": step - 20, "beta": 0.5, "kl": 0.0} for step in range(1, 41)]
    browser = page(write(tmp_path / "run", rows, []), "--smoothing", 1, paths=2)
    assert texts_of(browser, "#sections h3") == ["reward", "KL to the reference, nats per token", "loss"]
    assert texts_of(browser, "#constant tr")[1:] == ["KL coefficient beta0.5"]
    each = "[...document.querySelectorAll('svg.plot')]"
    extents = f"{each}.map((plot) => plot.ariaValueMin + ' ' + plot.ariaValueMax)"
    assert browser.js(extents) == ["1 40"] * 3

    # A drag over one chart, and the fields.
    left, top, width = browser.js(
        "(({x, y, width}) => [x, y, width])(document.querySelector('svg.plot').getBoundingClientRect())"
    )
    for kind, place in (("Pressed", 0.5), ("Moved", 0.6), ("Moved", 0.8), ("Released", 0.8)):
        browser.devtools(
            "Input.dispatchMouseEvent",
            **{"type": f"mouse{kind}", "x": left + place * width, "y": top + 50, "button": "left", "clickCount": 1},
        )
    (extent,) = set(browser.js(extents))
    assert 15 < int(extent.split()[0]) < 20 and 28 < int(extent.split()[1]) < 34
    assert browser.text("#zoom-all") == "all"
    choose(browser, "zoom-first", "39")
    choose(browser, "zoom-last", "40")
    ticks = "[...document.querySelector('svg.plot').querySelectorAll('text')].map((text) => text.textContent)"
    assert set(browser.js(extents)) == {"39 40"} and browser.js(ticks)[-3:] == ["step", "39", "40"]
    browser.js("document.querySelector('#zoom-all').click()")
    assert set(browser.js(extents)) == {"1 40"}

    # A chart with a number that is not positive has no logarithmic axis; on that of powers of two they are a line.
    hidden = browser.js("[...document.querySelectorAll('.log')].map((button) => button.hidden)")
    assert hidden == [False, True, True]
    browser.js("document.querySelector('.log').click()")
    path = browser.js("document.querySelector('svg.plot path').getAttribute('d')")
    heights = [float(point.split(",")[1]) for point in path[1:].split("L")]
    steps = [before - after for before, after in itertools.pairwise(heights)]
    assert min(steps) > 0 and max(steps) - min(steps) < 0.25


@pytest.mark.rare
@needs_browser
def test_completions_are_found_followed_and_compared(page, tmp_path):
    def recorded(name: str) -> list[dict]:
        rows = []
        for step, problem in itertools.product((0, 10, 20), (3, 5, 8)):
            facts = {"problem": problem, "prompt": f"question {problem}", "completion": f"{name} {problem} at {step}"}
            facts |= {"correct": problem == 3 or step == 20, "finished": problem != 5, "tokens": problem}
            pictures = {"pictures": ["a.png", "gone.png"]} if problem == 8 else {}
            rows.append(completion(step, "eval", reward=None, **facts, **pictures))
        for step, copy in itertools.product(range(1, 21), range(4)):
            facts = {"completion": "x" * copy + name, "reward": step + copy / 10, "prompt": f"training {step}"}
            rows.append(completion(step, note="n", **facts))
        return sorted(rows, key=lambda row: (row["step"], row["phase"]))

    runs = [write(tmp_path / name, metrics(20), recorded(name)) for name in ("a", "b")]
    (runs[1] / "pictures").mkdir()
    (runs[1] / "pictures/a.png").write_bytes(drawing(24, 16, 0))
    browser = page(*runs)

    def shown() -> list[str]:
        return texts_of(browser, ".completion pre")

    assert shown() == ["a", "xa", "xxa", "xxxa"] and "note n" in texts_of(browser, ".facts")[0]
    for id, value, count, first in (
        ("words", "XXXA", 20, "xxxa"),
        ("words", "training 7", 4, "a"),
        ("low", "19.15", 6, "xxa"),
        ("high", "19.25", 1, "xxa"),
        ("order", "high", 80, "xxxa"),
        ("order", "short", 80, "a"),
    ):
        choose(browser, id, value)
        assert browser.text("#which") == f"{count} found in 20 steps" and shown()[0] == first, (id, value)
        if id != "low":
            for each in ("words", "low", "high", "order"):
                choose(browser, each, "")
    choose(browser, "order", "long")
    before = len(shown())
    browser.js("document.querySelector('#more').click()")
    assert before < len(shown()) <= 80
    choose(browser, "order", "")

    choose(browser, "phase", "eval")
    choose(browser, "beside", "1")
    assert shown() == [f"{name} {problem} at 20" for problem in (3, 5, 8) for name in "ab"]
    choose(browser, "verdict", "wrong")
    assert shown() == [f"{name} {problem} at {step}" for step in (0, 10) for problem in (5, 8) for name in "ab"]
    choose(browser, "verdict", "cut")
    assert shown() == [f"{name} 5 at {step}" for step in (0, 10, 20) for name in "ab"]
    browser.js("document.querySelector('.group button').click()")  # over the steps
    assert browser.text("#which") == "2 of 3" and browser.js("document.querySelector('#step').value") == "5"
    assert texts_of(browser, "h3.at") == ["step 0", "step 10", "step 20"]
    assert shown() == [f"{name} 5 at {step}" for step in (0, 10, 20) for name in "ab"]
    choose(browser, "step", "8")
    assert shown()[0] == "a 8 at 0"
    assert texts_of(browser, ".group dd") == ["question 8", "gone.png is not in this page", "4"]
    assert browser.js("[...document.images].map((image) => [image.complete, image.naturalWidth])") == [[True, 24]]


@pytest.mark.rare
@needs_browser
def test_a_conversation_is_shown_as_such_and_what_is_not_trained_on_told_apart(page, tmp_path):
    call = {"type": "function", "function": {"name": "price", "arguments": {"item": "pen"}}}
    messages = [
        {"role": "assistant", "content": "I ask.", "tool_calls": [call]},
        {"role": "tool", "name": "price", "content": "seven <b>coins</b>"},
        {"role": "assistant", "content": "It is 7."},
    ]
    rows = [completion(1, completion="I ask.\nIt is 7.", messages=messages), completion(1)]
    browser = page(write(tmp_path / "a", metrics(1), rows))
    assert texts_of(browser, ".segment.drawn pre") == ['I ask.\nprice({"item": "pen"})', "It is 7."]
    assert texts_of(browser, ".segment.answered pre") == ["seven <b>coins</b>"]
    assert texts_of(browser, ".role") == ["model", "tool price, not trained on", "model"]
    assert texts_of(browser, ".completion > pre") == ["4"]
    choose(browser, "words", "coins")
    assert browser.text("#which") == "1 found in 1 steps"


@pytest.mark.rare
@needs_browser
def test_an_agents_episode_is_shown_as_its_turns_and_when_each_was_drawn(page, tmp_path):
    def turn(number, after, begins, asked_at, answered_at, **changes):
        facts = {"turn": number, "after": after, "begins": begins, "prompt_tokens": 1200, "tokens": 30}
        facts |= {"seen": True, "trained": True}
        return facts | {"asked_at": asked_at, "answered_at": answered_at} | changes

    tree = [
        turn(0, None, "new_conversation", 0.0, 1.0),
        turn(1, 0, None, 3.0, 4.0),
        turn(2, None, "changed_history", 7.5, 8.0, seen=False),
    ]
    messages = [{"role": "assistant", "content": "It is 7."}]
    rows = [completion(1, messages=messages, tree=tree, failure=""), completion(1, messages=messages, tree=[])]
    browser = page(write(tmp_path / "a", metrics(1), rows))
    assert texts_of(browser, ".completion summary") == ["turns of the episode: 3"]
    assert "failure" not in texts_of(browser, ".facts")[0]
    browser.js("document.querySelector('.completion summary').click()")
    cells = [text.replace("\u00a0", " ") for text in texts_of(browser, ".tree tbody :is(th, td)")]
    lost = "30, not trained on: its client was gone"
    assert cells == [
        *("turn 0", "new conversation", "1,200", "30", "", "0 to 1 s"),
        *("turn 1", "after turn 0", "1,200", "30", "", "3 to 4 s"),
        *("turn 2", "changed history", "1,200", lost, "", "7.5 to 8 s"),
    ]
    places = browser.js(
        "[...document.querySelectorAll('.tree .bar')].map((bar) => {"
        "  const [own, all] = [bar, bar.parentNode].map((each) => each.getBoundingClientRect());"
        "  const room = all.width - 12;"  # of the cell's padding
        "  return [(own.left - all.left) / room, own.width / room]; })"
    )
    assert places == [pytest.approx(place, abs=0.01) for place in ([0, 1 / 8], [3 / 8, 1 / 8], [7.5 / 8, 0.5 / 8])]


@pytest.mark.rare
@needs_browser
def test_what_models_wrote_is_shown_and_never_run(page, tmp_path):
    same = {"prompt": HOSTILE[0], "answer": HOSTILE[1], "advantage": -0.5}
    completions = [completion(step, completion=text, **same) for step in (1, 2) for text in HOSTILE]
    rows = metrics(8, **{HOSTILE[0]: 1.0, HOSTILE[1]: 1.0})
    rows[-1][HOSTILE[0]] = 2.0
    hostile_setting = json.dumps(HOSTILE[0]) + ": " + json.dumps(HOSTILE[1])
    settings = {"<script>window.pwned=1<": "", "b": hostile_setting}
    runs = [write(tmp_path / name, rows, completions, text) for name, text in settings.items()]
    (runs[0] / "starts.jsonl").write_text(json.dumps({"step": 0, "command": HOSTILE[1]}))
    browser = page(*runs)
    assert texts_of(browser, ".completion pre") == [
        *HOSTILE[:2],
        "lineU+2028paragraphU+2029lone U+D800 surrogate U+DFFF and U+0000U+001B[31m controls",
        "left U+202Eright to leftU+202C U+200BU+FEFF يمين",
    ]
    assert texts_of(browser, ".group dd") == HOSTILE[:2]
    for selector in ("#settings tbody th", "#sections h3"):
        assert HOSTILE[0] in texts_of(browser, selector)
    assert HOSTILE[1] in texts_of(browser, "#constant tbody th")
    for words in ("pwned", "(.*", "\u202e", "</script>"):
        choose(browser, "words", words)
        shown = texts_of(browser, ".completion pre")
        assert len(shown) == 2 * sum(words in text or words in HOSTILE[0] + HOSTILE[1] for text in HOSTILE), words
    assert HOSTILE[1] in texts_of(browser, "#settings td") and HOSTILE[1] in texts_of(browser, "#starts td")
    assert browser.js("[window.pwned ?? null, document.images.length, document.scripts.length]") == [None, 0, 2]
    browser.check_widths()
    assert browser.hosts() == {""} and browser.console() == []

    # And if some of it had got in, the page's policy would stop it.
    browser.js("document.body.appendChild(document.createElement('script')).text = 'window.pwned=1'")
    browser.js("new Image().src = 'http://127.0.0.1:9/image'")
    browser.js("fetch('http://127.0.0.1:9/').catch(() => 0)")
    assert browser.js("window.pwned ?? null") is None
    errors = browser.console()
    assert len(errors) >= 3 and all("Content Security Policy" in line for line in errors)
