"""Programs that ask by clients that others made, of a shell and of JavaScript: each trains a model by `--agent`.
Python's own client is that of tests/agents/test_gateway.py.

The policy has random weights, and is rewarded for the letter a. Each program asks twice, sends its first answer back
as its client gave it, and writes down what it saw.
"""

import shutil
import subprocess
from collections import Counter
from statistics import mean

import pytest
from recorded import write_rows
from trainer_runs import finish, lines, options, timeless

pytestmark = pytest.mark.slow

CLIENTS = ["curl", pytest.param("node", marks=pytest.mark.rare)]
NPM_PACKAGE = "openai@6.49.0"
STEPS, EPISODES = 10, 16  # of a step
RISE = 0.1  # of the letter's share: ten times what chance moves the mean of three steps by

# Text stays as it is written in JSON: it goes back letter by letter.
CURL = r"""
question=$(sed 's/.*"question": \("[^"]*"\).*/\1/')
messages="{\"role\": \"user\", \"content\": $question}"
letters=0 length=0
for turn in 1 2; do
    answer=$(curl -sS --fail "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \
        -d "{\"model\": \"policy\", \"logprobs\": true, \"messages\": [$messages]}") || exit 1
    echo "$answer" >> "$(dirname "$0")/seen/$$"
    [[ $answer =~ \"content\":\ (\"([^\"\\]|\\.)*\") ]] && text=${BASH_REMATCH[1]}
    messages+=", {\"role\": \"assistant\", \"content\": $text}, {\"role\": \"user\", \"content\": \"More!\"}"
    only=${text//[^a]/}
    letters=$((letters + ${#only})) length=$((length + ${#text}))
done
printf '0.%03d\n' $((1000 * letters / length))
"""
NODE = """
import { appendFileSync, readFileSync } from "node:fs";
import OpenAI from "openai";

const task = JSON.parse(readFileSync(0, "utf8"));
const messages = [{ role: "user", content: task.question }];
const client = new OpenAI();
let share = 0;
for (let turn = 0; turn < 2; turn++) {
  const answer = await client.chat.completions.create({ model: "policy", messages, logprobs: true });
  appendFileSync(new URL(`seen/${process.pid}`, import.meta.url), JSON.stringify(answer) + "\\n");
  const { message } = answer.choices[0];
  messages.push(message, { role: "user", content: "More!" });
  share += (message.content.split("a").length - 1) / Math.max(message.content.length, 1) / 2;
}
console.log(share);
"""


@pytest.fixture
def folder(tmp_path):
    """A folder with data, and with one for what programs see."""
    (tmp_path / "seen").mkdir()
    for split, count in (("train", 16), ("test", 4)):
        rows = [{"question": f"{n}: say a word.", "answer": "a"} for n in range(count)]
        write_rows(tmp_path / f"data/{split}.jsonl", rows)
    return tmp_path


@pytest.fixture
def agent(request, folder) -> str:
    """What `--agent` says, for the name of a client."""
    if request.param == "curl":
        if not (shutil.which("curl") and shutil.which("bash")):
            pytest.skip("needs curl and bash")
        (folder / "ask.sh").write_text(CURL)
        return f"command: bash {folder}/ask.sh"
    install_npm_package(folder)
    (folder / "ask.mjs").write_text(NODE)
    return f"command: node {folder}/ask.mjs"


def install_npm_package(folder) -> None:
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("needs node and npm")
    options = ["--no-save", "--no-audit", "--no-fund", "--loglevel=error", "--prefix", folder]
    done = subprocess.run(["npm", "install", *options, NPM_PACKAGE], capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        pytest.skip(f"npm could not install {NPM_PACKAGE}: {' '.join(done.stderr.split())[:200]}")


def train(agent: str, folder, model_folder, **changes) -> list[float]:
    """Train to the end; return the mean reward of each step."""
    settings = {"agent": agent, "max_steps": STEPS, "prompts_per_step": 4, "num_generations": EPISODES // 4}
    settings |= {"learning_rate": 0.03, "max_prompt_length": 128, "max_completion_length": 12, "beta": 0}
    settings |= {"eval_steps": 0, "save_steps": 0, "report_to": "none"}
    finish(1, options(model_folder, folder / "data", folder / "run", **settings | changes))
    rows = timeless(folder / "run")
    for row in rows:
        assert row["agent/failure_frequency"] == row["agent/unseen"] == 0
        assert row["agent/branches"] == 1 and row["completions/mean_turns"] == 2
    return [row["rewards/agent/mean"] for row in rows]


def rises(rewards: list[float]) -> bool:
    return mean(rewards[-3:]) > mean(rewards[:3]) + RISE


def what_programs_saw(folder) -> Counter:
    """Count episodes by what their programs saw: texts, tokens and log-probs."""
    episodes = []
    for path in (folder / "seen").iterdir():
        turns = []
        for answer in lines(path):
            [choice], usage = answer["choices"], answer["usage"]
            logprobs = tuple(each["logprob"] for each in choice["logprobs"]["content"])
            turns.append((choice["message"]["content"], usage["prompt_tokens"], usage["completion_tokens"], logprobs))
        episodes.append(tuple(turns))
    return Counter(episodes)


def what_was_drawn(folder, tokenizer) -> Counter:
    """Count the same of the run's journal. The ids that an episode is trained on are those that were drawn for it."""
    records = [record for path in (folder / "run/journal").glob("*.jsonl") for record in lines(path)]
    episodes = []
    for record in (record for record in records if "rollout" in record):
        [branch] = record["rollout"]["branches"]
        drawn = [each for each in records if each["episode"] == record["episode"] and "ids" in each]
        first, second = [each["ids"] for each in drawn]
        between = branch["completion_ids"][len(first) : -len(second)]
        assert branch["completion_ids"] == [*first, *between, *second] and between
        assert branch["drawn"] == [*[True] * len(first), *[False] * len(between), *[True] * len(second)]
        before = len(branch["prompt_ids"])
        prompts = before, before + len(first) + len(between)
        turns = [
            (tokenizer.decode(each["ids"], skip_special_tokens=True), prompt, len(each["ids"]), tuple(each["logprobs"]))
            for prompt, each in zip(prompts, drawn, strict=True)
        ]
        episodes.append(tuple(turns))
    return Counter(episodes)


@pytest.mark.parametrize("agent", CLIENTS, indirect=True)
def test_a_client_trains_a_model_on_the_ids_that_were_drawn_for_it(agent, folder, model_folder, tokenizer):
    rewards = train(agent, folder, model_folder)
    assert len(rewards) == STEPS and rises(rewards), rewards
    seen = what_programs_saw(folder)
    assert seen.total() == STEPS * EPISODES
    assert seen == what_was_drawn(folder, tokenizer)


@pytest.mark.rare
@pytest.mark.parametrize("agent", ["curl"], indirect=True)
def test_without_learning_nothing_rises(agent, folder, model_folder):
    rewards = train(agent, folder, model_folder, learning_rate=1e-12)
    assert not rises(rewards) and max(rewards) < min(rewards) + RISE, rewards
