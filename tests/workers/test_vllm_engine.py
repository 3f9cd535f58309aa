"""The engine that draws with vLLM, against a stand-in with vLLM's faults and, where there is one, against vLLM itself.

VLLM_PYTHON names the interpreter of an environment with vLLM (`make test-vllm`); each start of it takes a minute.
"""

import dataclasses
import functools
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from adapters import by_hand, write_adapter
from conftest import ENVIRONMENT, REPOSITORY
from pictured import drawing, for_vllm, save
from pools import distances, score
from processes import left_of
from safetensors.torch import load_file, save_file
from scripted_turns import Scripted, by_parity, count_answers
from servers import wait_until
from stored import TURNS, run_info, task_of
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel, Qwen2ForCausalLM

from grpo.agents.episodes import Agent
from grpo.config.sampling_settings import AskedSections, SharedConfig
from grpo.model.load import load_settings, load_tokenizer
from grpo.model.pictures import load_processor, vision_parameters
from grpo.pool.protocol import Probe, RunInfo, check_drawn
from grpo.wire.picture_files import PicturedPrompt
from grpo.workers.engine import EngineError, WorkerFailed, WorkerTools
from grpo.workers.vllm_engine import SERVER, VllmEngine, VllmServer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")]
VLLM_PYTHON = os.environ.get("VLLM_PYTHON")
FAKE = [sys.executable, str(REPOSITORY / "tests/fake_vllm.py")]
ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
PROMPT = [1, 89, 201, 197, 169, 223, 23, 11, 45, 78]
LONG_PROMPT = [3 + place * place % 400 for place in range(400)]  # three of vLLM's blocks on a CPU
PROMPTS = [PROMPT, LONG_PROMPT[:150]]
EOS = [2, *range(100, 130)]  # random weights find one of so many soon


def save_model(model: PreTrainedModel, tokenizer, folder: Path, is_tied: bool = False) -> Path:
    """Save a model that vLLM knows on a CPU: heads of 32 numbers, and random weights."""
    config = type(model.config).from_dict(model.config.to_dict())
    config.tie_word_embeddings = is_tied
    config.num_attention_heads = config.num_key_value_heads = 2
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def folders(model, tokenizer, tmp_path_factory) -> dict[str, Path]:
    """Model folders with tied and with untied heads, each with two versions of the weights, and one broken in two."""
    made = {}
    for kind, version in itertools.product(("tied", "untied"), (0, 1)):
        torch.manual_seed(version)
        name = f"{kind}{version}"
        made[name] = save_model(model, tokenizer, tmp_path_factory.mktemp(name), kind == "tied")
    made["cut"] = shutil.copytree(made["untied1"], tmp_path_factory.mktemp("cut") / "model")
    os.truncate(made["cut"] / "model.safetensors", 100_000)
    return made


@pytest.fixture(scope="session")
def run(model) -> RunInfo:
    of_model = {"vocab_size": model.config.vocab_size, "eos_token_ids": EOS}
    return run_info(num_generations=4, max_completion_length=24, **of_model)


@pytest.fixture(scope="session", params=["fake", "vllm"])
def make(request, tmp_path_factory):
    """`make(*faults)`: an engine. vLLM has the faults that it has."""
    if request.param == "vllm" and not VLLM_PYTHON:
        pytest.skip("VLLM_PYTHON names no environment with vLLM")
    engines = []

    def make(*faults: str, **options) -> VllmEngine:
        log = tmp_path_factory.mktemp("log") / "vllm.log"
        if request.param == "fake":
            arguments = [word for fault in faults for word in ("--fault", fault)]
            engines.append(VllmEngine(FAKE, log, arguments, **options))
        else:
            engines.append(VllmEngine([VLLM_PYTHON, *SERVER], log, ["--enforce-eager"], **options))
        return engines[-1]

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**ENVIRONMENT, **ON_CPU}.items():
            patch.setenv(name, value)
        yield make
        for engine in engines:
            engine.close()


@pytest.fixture
def make_fake(make, request):
    if "vllm" in request.node.callspec.params.values():
        pytest.skip("a fault that vLLM does not have when asked")
    return make


@pytest.fixture(scope="module")
def engine(make, run, folders) -> VllmEngine:
    """An engine that has started with the first weights; a test loads those that it wants."""
    engine = make()
    engine.start(run, folders["untied0"], 0)
    return engine


@functools.cache
def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def distance_of_probe(engine: VllmEngine, folder: Path) -> float:
    ids = LONG_PROMPT[:64]
    (expected,) = score(load(folder), PROMPT, [ids], 1.0)
    values = engine.logprobs(Probe(prompt_ids=PROMPT, completion_ids=ids, logprobs=[0.0] * 64))
    return max(abs(a - b) for a, b in zip(values, expected, strict=True))


def distance_of_draw(engine: VllmEngine, run: RunInfo, folder: Path, version: int, prompt=LONG_PROMPT) -> float:
    task = task_of(7, prompt, attempt=1, version=version)
    drawn = engine.draw(task)
    check_drawn(drawn, run, task)
    assert drawn.key == task.key
    return max(distances(task, drawn, run.temperature, {version: load(folder)}))


def test_a_completion_ends_with_any_eos_or_at_the_largest_length(engine, run):
    groups = [engine.draw(task_of(group, PROMPT)) for group in range(8)]
    completions = [tuple(ids) for group in groups for ids in group.completions]
    long = [ids for ids in completions if len(ids) > 3]
    assert len({*long}) == len(long) > 10
    last = {ids[-1] for ids in completions if len(ids) < run.max_completion_length}
    assert len(last) > 3 and last <= {*EOS}
    assert any(len(ids) == run.max_completion_length for ids in completions)


def test_new_weights_are_drawn_from_also_after_a_prompt_that_the_old_ones_have_read(engine, run, folders):
    assert engine.card and engine.capacity == 64
    engine.load(folders["untied0"], 0)
    for version, (old, new) in enumerate([("untied0", "untied1"), ("untied1", "untied0")] * 2, start=1):
        prompt = PROMPT if version == 4 else LONG_PROMPT
        assert distance_of_draw(engine, run, folders[new], version - 1, prompt) > 0.1  # the old ones
        engine.load(folders[new], version)
        assert distance_of_probe(engine, folders[new]) < 1e-4 < 0.1 < distance_of_probe(engine, folders[old])
        assert distance_of_draw(engine, run, folders[new], version, prompt) < 1e-4


def test_what_is_being_drawn_goes_on_with_new_weights_and_names_them(engine, run, folders, request, monkeypatch):
    """What a completion that runs has read is read anew: its log-probs are those of the version of each token."""
    length = 120 if "fake" in request.node.callspec.params.values() else 300
    long_run = dataclasses.replace(run, eos_token_ids=[], max_completion_length=length, in_flight_weight_updates=True)
    monkeypatch.setattr(engine, "run", long_run)
    engine.load(folders["untied0"], 5)
    for new in range(7, 31, 2):  # vLLM may draw them to their end before it hears of the load, or answers the probe
        old, names = new - 2, ("untied0", "untied1") if new % 4 == 3 else ("untied1", "untied0")
        policies = [load(folders[name]) for name in names]
        tasks = [task_of(group, prompt, version=old) for group, prompt in enumerate(PROMPTS)]
        before = engine.server.count_tokens() + sum(map(len, PROMPTS)) + 20
        with ThreadPoolExecutor(2) as threads:
            drawing = [threads.submit(engine.draw, task) for task in tasks]
            wait_until(lambda before=before: engine.server.count_tokens() > before)
            engine.load(folders[names[1]], new)
            assert distance_of_probe(engine, folders[names[1]]) < 1e-4
            was_proved_in_flight = not any(group.done() for group in drawing)
            groups = [group.result() for group in drawing]
        for task, group in zip(tasks, groups, strict=True):
            check_drawn(group, long_run, task)
            assert max(distances(task, group, run.temperature, {old: policies[0], new: policies[1]})) < 1e-4
        if all({*versions} == {old, new} for group in groups for versions in group.versions):
            break
    else:
        pytest.fail("no completion has tokens of both versions")
    assert was_proved_in_flight or length == 300
    for task, group in zip(tasks, groups, strict=True):
        assert min(distances(task, group, run.temperature, {old: policies[1], new: policies[0]})) > 0.1


def test_a_completion_goes_on_after_an_answer_and_with_new_weights(engine, run, folders, tokenizer, monkeypatch):
    turns = Scripted(EOS, by_parity, delay=lambda drawn: sum(drawn) % 10 / 10)
    changes = {"in_flight_weight_updates": True, "num_generations": 8, "max_completion_length": 60}
    with_turns = dataclasses.replace(run, turns=TURNS, **changes)
    monkeypatch.setattr(engine, "run", with_turns)
    monkeypatch.setattr(engine, "turns", WorkerTools(turns, tokenizer))
    engine.load(folders["untied0"], 0)
    tasks = [task_of(group, prompt) for group, prompt in enumerate(PROMPTS)]
    with ThreadPoolExecutor(2) as threads:
        drawing = [threads.submit(engine.draw, task) for task in tasks]
        wait_until(lambda: any(dialogue.asked for dialogue in turns.dialogues))
        engine.load(folders["untied1"], 1)
        groups = [group.result() for group in drawing]
    policies = {0: load(folders["untied0"]), 1: load(folders["untied1"])}
    for task, group in zip(tasks, groups, strict=True):
        check_drawn(group, with_turns, task)
        assert count_answers(group) > 0
        assert max(distances(task, group, run.temperature, policies)) < 1e-4
    assert {*itertools.chain(*groups[0].versions, *groups[1].versions)} == {0, 1}
    assert [dialogue.closed for dialogue in turns.dialogues] == [1] * 16


AGENT = """
async def solve(task, client):
    messages = [{"role": "user", "content": task["question"]}]
    for turn in range(3):
        answer = await client.chat.completions.create(model="policy", messages=messages, n=1 + turn % 2, stop=["zz"])
        messages += [answer.choices[-1].message, {"role": "user", "content": "And?"}]
    second = [{"role": "user", "content": "Is it " + str(answer.choices[0].message.content)}]
    stream = await client.chat.completions.create(model="policy", messages=second, stream=True, max_tokens=5)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    await client.chat.completions.create(model="policy", messages=second, temperature=0, max_tokens=5)
    return float(len(text))
"""


def test_the_requests_of_an_agents_programs_are_drawn_each(engine, run, folders, tokenizer, monkeypatch, tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)
    config = AskedSections(agent=f"{tmp_path}/agent.py:solve", temperature=run.temperature, agent_may_sample=True)
    agent = Agent(config, tokenizer, EOS, context=300, rows=64)
    with_agent = dataclasses.replace(run, agent=agent.describe())
    monkeypatch.setattr(engine, "run", with_agent)
    monkeypatch.setattr(engine, "turns", WorkerTools(agent, tokenizer))
    engine.load(folders["untied0"], 3)
    with closing(agent):
        agent.start()
        columns = [json.dumps({"question": text}) for text in ("2 + 3?", "A pen?")]
        tasks = [task_of(group, PROMPT, version=3, columns=text) for group, text in enumerate(columns)]
        with ThreadPoolExecutor(2) as threads:
            groups = [*threads.map(engine.draw, tasks)]
    policy = load(folders["untied0"])
    for task, group in zip(tasks, groups, strict=True):
        check_drawn(group, with_agent, task)
        for outcome, episode in zip(group.outcomes, group.episodes, strict=True):
            assert outcome.rewards["solve"] >= 0 and not outcome.failure
            assert len(episode.tree) == 6 and len(episode.branches) == 3 and not episode.tree[-1]["trained"]
            for branch in episode.branches:
                (scores,) = score(policy, branch.prompt_ids, [branch.completion_ids], run.temperature)
                pairs = zip(scores, branch.sampling_logprobs, branch.drawn, strict=True)
                assert max(abs(scored - logprob) for scored, logprob, is_drawn in pairs if is_drawn) < 1e-4


def test_a_server_that_ends_ends_the_episodes_too(make_fake, run, folders, tokenizer, tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)
    config = AskedSections(agent=f"{tmp_path}/agent.py:solve", temperature=run.temperature, agent_may_sample=True)
    agent, engine = Agent(config, tokenizer, EOS, context=300, rows=64), make_fake()
    engine.start(dataclasses.replace(run, agent=agent.describe()), folders["untied0"], 0, WorkerTools(agent, tokenizer))
    with closing(agent):
        agent.start()
        engine.close()
        with pytest.raises(EngineError):
            engine.draw(task_of(0, PROMPT, columns='{"question": "?"}'))


def test_a_server_that_waits_for_an_answer_is_not_one_that_hangs(make_fake, run, folders, tokenizer):
    engine, turns = make_fake(stall_seconds=1.5), Scripted(EOS, by_parity, delay=lambda drawn: 3.0, at_once=False)
    with_turns = dataclasses.replace(run, turns=TURNS, num_generations=2)
    engine.start(with_turns, folders["untied0"], 0, WorkerTools(turns, tokenizer))
    task = task_of(0, PROMPT)
    group = engine.draw(task)
    check_drawn(group, with_turns, task)
    count_answers(group)
    assert max(distances(task, group, run.temperature, {0: load(folders["untied0"])})) < 1e-4
    assert turns.dialogues[0].answered
    engine.close()


@pytest.mark.parametrize("name", ["cut", "tied1", "nowhere"])
def test_vllm_never_hears_of_a_file_that_it_cannot_load(engine, run, folders, name, tmp_path):
    engine.load(folders["untied0"], 0)
    with pytest.raises(EngineError, match=r"model\.safetensors: "):
        engine.load(folders.get(name, tmp_path), 1)
    assert distance_of_draw(engine, run, folders["untied0"], 0) < 1e-4


def test_a_group_may_be_larger_than_vllms_own_limit(make, run, folders, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "of another server")
    engine = make()
    engine.start(dataclasses.replace(run, num_generations=300, max_completion_length=2), folders["untied0"], 0)
    assert len(engine.draw(task_of(3, [5] * 4)).completions) == 300
    assert distance_of_probe(engine, folders["untied0"]) < 1e-4
    engine.close()


def test_a_prompt_that_does_not_fit_is_named(engine, run):
    with pytest.raises(WorkerFailed, match="^vllm_args: --max-model-len is 512, and group 3 needs 524 tokens"):
        engine.draw(task_of(3, [5] * 500))


def test_a_tied_head_that_a_reload_leaves_is_shown_by_the_probe_and_mended_by_a_restart(make, run, folders):
    """vLLM does so on a CPU."""
    engine = make("keeps_head")
    engine.start(run, folders["tied0"], 0)
    assert distance_of_probe(engine, folders["tied0"]) < 1e-4
    engine.load(folders["tied1"], 1)
    assert distance_of_probe(engine, folders["tied1"]) > 0.1
    engine.close()
    engine.start(run, folders["tied1"], 1)
    assert distance_of_probe(engine, folders["tied1"]) < 1e-4
    assert distance_of_draw(engine, run, folders["tied1"], 1) < 1e-4
    engine.close()


def test_versions_of_an_adapter_are_drawn_from_also_after_a_prompt_that_another_has_read(make, run, folders, tmp_path):
    folder, expected = shutil.copytree(folders["untied0"], tmp_path / "model"), []
    adapter = write_adapter(tmp_path / "first", folder, r=17, use_rslora=True)
    for version in range(2):
        by_hand(folder, adapter, torch.float32).save_pretrained(tmp_path / str(version))
        expected.append((adapter, tmp_path / str(version)))
        adapter = shutil.copytree(adapter, tmp_path / f"adapter{version}")
        move_file(adapter / "adapter_model.safetensors", seed=version)
    engine, run = make(), dataclasses.replace(run, base_weights="0" * 64)
    for version, (adapter, merged) in enumerate(expected):
        shutil.copytree(adapter, folder / "adapter", dirs_exist_ok=True)
        if version == 0:
            engine.start(run, folder, 0)
        else:
            assert distance_of_draw(engine, run, merged, version - 1) > 0.01  # the one before
            engine.load(folder, version)
        assert distance_of_probe(engine, merged) < 1e-4
        assert distance_of_draw(engine, run, merged, version) < 1e-4
    os.truncate(folder / "adapter/adapter_model.safetensors", 1000)
    with pytest.raises(EngineError, match=r"adapter/adapter_model\.safetensors: "):
        engine.load(folder, 2)
    assert distance_of_draw(engine, run, merged, 1) < 1e-4
    engine.close()


def move_file(path: Path, seed: int) -> None:
    torch.manual_seed(seed)
    weights = {name: weight + 0.1 * torch.randn_like(weight) for name, weight in load_file(path).items()}
    save_file(weights, path, {"format": "pt"})


def test_an_adapter_that_vllm_does_not_know_is_refused_before_it_starts(make_fake, run, folders, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(folders["untied0"], folder)
    write_adapter(folder / "adapter", folders["untied0"], use_dora=True)
    says = r"adapter_config\.json: vLLM knows no DoRA: draw with --engine transformers"
    with pytest.raises(WorkerFailed, match=says):
        make_fake("dies_at_start").start(dataclasses.replace(run, base_weights="0" * 64), folder, 0)


def test_a_worker_that_prepares_pictures_otherwise_ends_before_it_starts_vllm(make_fake, run, folders):
    with pytest.raises(WorkerFailed, match="^pictures are prepared otherwise here .not at all. than in run runs/a .ab"):
        make_fake("dies_at_start").start(dataclasses.replace(run, processor="ab"), folders["untied0"], 0)


class Pictured:
    """What draws and scores prompts with pictures: two with equal ids and another picture each, one with three."""

    def __init__(self, folder: Path, run: RunInfo):
        config = SharedConfig(model_name_or_path=str(folder))
        self.tokenizer = load_tokenizer(config)
        self.processor = load_processor(config, load_settings(config), self.tokenizer)
        self.run = dataclasses.replace(run, vocab_size=len(self.tokenizer), processor=self.processor.fingerprint)
        self.prompts = []
        for number, sizes in enumerate([[(40, 56)], [(40, 56)], [(72, 36), (20, 20), (90, 70)]]):
            files, text = [drawing(*size, seed=number) for size in sizes], f"see {self.processor.placeholder} "
            self.prompts.append(self.processor.encode(text * len(files), files, add_special_tokens=False))
        assert [*self.prompts[0]] == [*self.prompts[1]]

    def load(self, folder: Path) -> PreTrainedModel:
        return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()

    def answer(self, drawn: list[int], turn: int) -> list[int] | None:
        """Answer with a picture's id, for which there is no picture."""
        answer = by_parity(drawn, turn)
        return answer and [self.processor.token_id, *answer]

    def distance_of_draws(self, engine: VllmEngine, policy: PreTrainedModel, version: int) -> float:
        """Draw for each prompt, and one of text; return the largest difference of the log-probs from the policy's."""
        far = []
        for number, prompt in enumerate([*self.prompts, PROMPT]):
            task = task_of(number, prompt, version=version)
            drawn = engine.draw(task)
            check_drawn(drawn, engine.run, task)
            if engine.turns is not None:
                assert count_answers(drawn, self.answer) > 0
            far += distances(task, drawn, self.run.temperature, {version: policy}, self.processor)
        return max(far)

    def distance_of_probe(self, engine: VllmEngine, policy: PreTrainedModel) -> float:
        ids = [*range(10, 40)]
        (right,) = score(policy, self.prompts[0], [ids], 1.0, self.processor)
        values = engine.logprobs(Probe(prompt_ids=self.prompts[0], completion_ids=ids, logprobs=[0.0] * 30))
        return max(abs(a - b) for a, b in zip(values, right, strict=True))


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen2_vl", "qwen3_vl"])
def pictured_folders(request, tmp_path_factory) -> list[Path]:
    """Folders of a model that takes pictures: the second differs in the vision tower alone."""
    family = request.param
    made = [save(family, tmp_path_factory.mktemp(f"pictured{seed}"), seed, for_vllm(family)) for seed in range(2)]
    model, other = (AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32) for folder in made)
    for weight, new in zip(vision_parameters(model), vision_parameters(other), strict=True):
        weight.data.copy_(new.data)
    model.save_pretrained(made[1])
    return made


@pytest.fixture
def pictured_engine(make, request) -> VllmEngine:
    """An engine for a family; one family will do for the stand-in."""
    kinds = {*request.node.callspec.params.values()}
    if "fake" in kinds and "qwen2_5_vl" not in kinds:
        pytest.skip("one family will do for the stand-in")
    return make()


def test_what_is_drawn_after_pictures_has_the_policys_log_probs_and_a_new_tower_is_seen(
    pictured_engine, run, pictured_folders, request
):
    """Also after another picture with equal ids, after three, after answers, and of a tower that is new in the middle;
    a probe without a picture would not see the tower."""
    engine, pictured = pictured_engine, Pictured(pictured_folders[0], run)
    old, new = map(pictured.load, pictured_folders)
    engine.start(pictured.run, pictured_folders[0], 0)
    assert pictured.distance_of_draws(engine, old, 0) < 1e-4
    assert pictured.distance_of_probe(engine, old) < 1e-4 < 0.1 < pictured.distance_of_probe(engine, new)
    engine.load(pictured_folders[1], 1)
    assert pictured.distance_of_draws(engine, new, 1) < 1e-4
    assert pictured.distance_of_probe(engine, new) < 1e-4 < 0.1 < pictured.distance_of_probe(engine, old)
    engine.turns = WorkerTools(Scripted(EOS, pictured.answer), pictured.tokenizer)
    engine.run = dataclasses.replace(pictured.run, turns=TURNS, num_generations=8, max_completion_length=60)
    assert pictured.distance_of_draws(engine, new, 1) < 1e-4
    engine.turns = None
    length = 80 if "fake" in request.node.callspec.params.values() else 1500
    changes = {"eos_token_ids": [], "max_completion_length": length, "in_flight_weight_updates": True}
    engine.run, policies = dataclasses.replace(pictured.run, **changes), {1: new}
    for version in range(2, 14):  # as above: it may hear of the load too late
        policies[version], task = (old, new)[version % 2], task_of(9, pictured.prompts[0], version=version - 1)
        before = engine.server.count_tokens() + run.num_generations * len(task.prompt_ids)
        with ThreadPoolExecutor(1) as thread:
            drawing = thread.submit(engine.draw, task)
            wait_until(lambda before=before: engine.server.count_tokens() > before)
            engine.load(pictured_folders[version % 2], version)
            group = drawing.result()
        # After 1500 tokens float32 rounds by more than 1e-4; the other tower's log-probs differ by nats.
        of_two = {number: policies[number] for number in (version - 1, version)}
        assert max(distances(task, group, run.temperature, of_two, pictured.processor)) < 1e-2
        if [{*versions} for versions in group.versions] == [{version - 1, version}] * run.num_generations:
            break
    else:
        pytest.fail("no completion has tokens of both versions")
    ids, pictures = [*pictured.prompts[0]], pictured.prompts[0].pictures
    with pytest.raises(EngineError, match="^the ids of a prompt do not fit its pictures$"):
        engine.draw(task_of(0, PicturedPrompt(ids[:-6], pictures), version=version))
    with pytest.raises(EngineError, match="^a picture is no PNG or JPEG file$"):
        engine.draw(task_of(0, PicturedPrompt(ids, [b"no picture"]), version=version))
    engine.close()


def test_versions_of_an_adapter_on_the_tower_too_are_drawn_from(pictured_engine, run, pictured_folders, tmp_path):
    engine, pictured = pictured_engine, Pictured(pictured_folders[0], run)
    folder, policies = shutil.copytree(pictured_folders[0], tmp_path / "model"), []
    adapters = [write_adapter(tmp_path / "0", folder, AutoModelForImageTextToText, r=4, target_modules="all-linear")]
    adapters.append(shutil.copytree(adapters[0], tmp_path / "1"))
    weights = load_file(adapters[1] / "adapter_model.safetensors")
    assert any("visual" in name for name in weights)
    of_tower = {name: weight * 2 if "visual" in name else weight for name, weight in weights.items()}
    save_file(of_tower, adapters[1] / "adapter_model.safetensors", {"format": "pt"})
    policies = [by_hand(folder, adapter, torch.float32, AutoModelForImageTextToText).eval() for adapter in adapters]
    for version, (adapter, policy) in enumerate(zip(adapters, policies, strict=True)):
        shutil.copytree(adapter, folder / "adapter", dirs_exist_ok=True)
        if version == 0:
            engine.start(dataclasses.replace(pictured.run, base_weights="0" * 64), folder, 0)
        else:
            engine.load(folder, version)
        assert pictured.distance_of_probe(engine, policy) < 1e-4
        assert pictured.distance_of_probe(engine, policies[1 - version]) > 0.01
        assert pictured.distance_of_draws(engine, policy, version) < 1e-3  # the adapter makes large logits larger
    engine.close()


def test_a_killed_engine_says_so_and_starts_again(make, run, folders, request):
    engine, others = make(), {*psutil.Process().children()}  # a test before left an engine with the same folder
    engine.start(run, folders["untied0"], 0)
    [server] = [child for child in {*psutil.Process().children()} - others if "--port" in child.cmdline()]
    members = [server.pid, *(child.pid for child in server.children(recursive=True))]
    maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in members)
    segments = {Path(path) for path in re.findall(r"/dev/shm/psm_\w+", maps)}
    assert bool(segments) == ("vllm" in request.node.callspec.params.values())
    engine.run = dataclasses.replace(run, num_generations=64, eos_token_ids=[0], max_completion_length=400)
    threading.Timer(0.3, server.kill).start()
    with pytest.raises(EngineError, match=r"^vLLM was killed by signal 9; its log is .*vllm\.log$"):
        while True:
            engine.draw(task_of(0, PROMPT))
    engine.close()
    assert not left_of(members)
    wait_until(lambda: not any(path.exists() for path in segments))  # hundreds of MB for each start otherwise
    engine.start(run, folders["untied1"], 1)
    assert distance_of_draw(engine, run, folders["untied1"], 1) < 1e-4
    engine.close()


def test_an_engine_that_dies_at_its_first_request_gives_the_reason(make, run, model_folder):
    """vLLM on a CPU knows no heads of 16 numbers: it is healthy until a token is drawn."""
    engine = make("dies_at_draw")
    engine.start(run, model_folder, 0)
    with pytest.raises(EngineError, match="^vLLM ended with code .*: RuntimeError: Unsupported CPU attention conf"):
        engine.draw(task_of(0, PROMPT))
    engine.close()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("dies_at_start", "^vLLM ended with code 1: ValueError: Free memory on device"),
        ("loses_weights", "^/collective_rpc: vLLM answered 500"),
        ("keeps_cache", "^/reset_prefix_cache: vLLM keeps what"),
        ("hangs_at_draw", r"^vLLM drew no token for 1 s and was ended"),
        ("draws_nan", "^/inference/v1/generate: a log-prob of -9999.0"),
        ("mixes_weights", r"^/inference/v1/generate: completions of weights \[0, 6\]"),
    ],
)
def test_what_fails_and_a_draw_that_cannot_be_trusted_are_errors_with_a_reason(make_fake, run, folders, fault, message):
    engine = make_fake(fault, stall_seconds=1 if fault == "hangs_at_draw" else 30)
    with pytest.raises(EngineError, match=message):
        engine.start(run, folders["untied0"], 0)
        if fault in ("loses_weights", "keeps_cache"):
            engine.load(folders["untied1"], 1)
        else:
            engine.draw(task_of(0, PROMPT))
    engine.close()


@contextmanager
def close_once(happened, engine):
    """Close the engine from another thread once something has happened."""
    with ThreadPoolExecutor(1) as threads:
        closed = threads.submit(lambda: wait_until(happened) or engine.close())
        yield
        closed.result()


def test_close_ends_a_draw_from_another_thread(make_fake, run, folders):
    engine = make_fake("hangs_at_draw")
    engine.close()
    engine.start(run, folders["untied0"], 0)
    with close_once(lambda: engine.drawing, engine), pytest.raises(EngineError, match="^vLLM was killed by signal 15"):
        engine.draw(task_of(0, PROMPT))
    engine.close()


def test_close_ends_a_start_from_another_thread(run, model_folder, tmp_path):
    engine = VllmEngine(["sh", "-c", "sleep 1000 & sleep 1000"], tmp_path / "log")
    is_killed = pytest.raises(EngineError, match="^vLLM was killed by signal 15; its log is")
    with close_once(lambda: engine.server, engine), is_killed:
        engine.start(run, model_folder, 0)


def test_a_log_that_cannot_be_written_is_an_error_of_the_engine(tmp_path):
    with pytest.raises(EngineError, match="^.*/none/vllm.log: No such file or directory$"):
        VllmServer(["true"], os.environ, tmp_path / "none/vllm.log")


def test_whatever_vllm_started_ends_with_a_killed_worker(tmp_path):
    script = f"""
import sys, time
sys.path.insert(0, {str(REPOSITORY)!r})
from pathlib import Path
from grpo.workers.vllm_engine import VllmServer
server = VllmServer(["sh", "-c", "sleep 1000 & sleep 1000; exit 3", "sh"], {{"PATH": "/usr/bin:/bin"}}, Path("log"))
print("started", flush=True)
time.sleep(1000)
"""
    worker = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert worker.stdout.readline() == "started\n"
    below = lambda: psutil.Process(worker.pid).children(recursive=True)  # noqa: E731
    wait_until(lambda: [child.name() for child in below()].count("sleep") == 2)
    sleeping = [child.pid for child in below() if child.name() == "sleep"]
    worker.send_signal(signal.SIGKILL)
    worker.communicate()
    assert not left_of(sleeping)


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("(APIServer pid=1) WARNING 11-23 02:50:33 [base.py:380] ValueError: no tokenizer\n", ""),
        ("api_server.py: error: unrecognized arguments: --mad\n", "error: unrecognized arguments: --mad"),
        (
            "(Worker pid=3) ERROR 11-23 02:50:35 [e.py:1] torch.OutOfMemoryError: CUDA  out of memory.\n"
            "(EngineCore pid=2) ERROR 11-23 02:50:35 [core.py:1] RuntimeError: Worker failed with error 'CUDA'\n"
            "(APIServer pid=1) ERROR 11-23 02:50:36 [a.py:9] vllm.v1.engine.exceptions.EngineDeadError: EngineCore\n",
            "torch.OutOfMemoryError: CUDA out of memory.",
        ),
    ],
)
def test_the_reason_is_the_logs_first_error_that_is_no_consequence(log, reason, tmp_path):
    path = tmp_path / "log"
    path.write_text("ValueError: of an earlier start\n")
    server = VllmServer(["sh", "-c", 'printf "%s" "$0"; exit 1', log], os.environ, path)
    assert server.has_ended(10)
    assert server.reason() == reason
    server.end()
    server.end()
