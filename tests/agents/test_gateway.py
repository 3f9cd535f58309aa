"""The OpenAI API of a run: what the real client sends and gets, and that each drawn id is that of a direct draw."""

import concurrent.futures
import functools
import http.client
import json
import threading
import time
import types
from contextlib import ExitStack, closing
from dataclasses import replace
from urllib.parse import urlsplit

import bottle
import openai
import pytest
import requests
import torch
from desks import Desk, open_desk
from models import packed
from requested import begun
from rounding import assert_rounded
from servers import wait_until

from grpo.agents.gateway import EpisodeLimits, Gateway, RunningEpisode, find_scale
from grpo.agents.journal import RunJournal
from grpo.agents.requests import read_request
from grpo.agents.tree import Episode
from grpo.sampling.draw import draw, in_blocks

CONTEXT, LONGEST, TEMPERATURE = 400, 24, 0.9
ENDS = [*range(100, 130)]  # a model that has learnt nothing rarely ends a turn, so many ids do beside its own end
QUESTION = [{"role": "user", "content": "Tom has 3 apples."}]
LONG = [{"role": "user", "content": "many apples " * 300}]


@pytest.fixture(scope="module")
def desk(model, tokenizer):
    settings = {"ends": [tokenizer.eos_token_id, *ENDS], "context": CONTEXT, "longest": LONGEST}
    with open_desk(packed(model), tokenizer, temperature=TEMPERATURE, **settings) as desk:
        yield desk


def by_hand(desk: Desk, session: RunningEpisode, node) -> None:
    """Assert that a node's ids are those of a plain forward pass over all ids before each."""
    numbers = session.episode.numbers(node, len(node.ids))
    with torch.no_grad():
        logits = desk.model(torch.tensor([[*node.prompt_ids, *node.ids]])).logits[0, len(node.prompt_ids) - 1 : -1]
    tokens, logprobs = draw(in_blocks(logits.float() / TEMPERATURE), torch.from_numpy(numbers))
    assert node.ids == tokens.tolist()
    assert_rounded(torch.tensor(node.logprobs), logprobs)


def branches_hold_each_id_once(session: RunningEpisode) -> None:
    drawn = sorted(
        (token, logprob)
        for branch in session.episode.branches()
        for token, logprob, is_drawn in zip(branch.completion_ids, branch.sampling_logprobs, branch.drawn, strict=True)
        if is_drawn
    )
    nodes = session.episode.nodes
    assert drawn == sorted(pair for node in nodes for pair in zip(node.ids, node.logprobs, strict=True))


def test_a_conversation_goes_on_from_the_drawn_ids(desk):
    session, key = desk.begin()
    chat, messages = desk.client(key).chat.completions, [*QUESTION]
    for turn in range(4):
        answer = chat.create(model="policy", messages=messages, logprobs=True)
        choice = answer.choices[0]
        node = session.episode.nodes[turn]
        assert choice.message.content == desk.formats.tokenizer.decode(node.ids, skip_special_tokens=True)
        assert choice.finish_reason == ("stop" if node.ids[-1] in desk.ends else "length")
        assert [each.logprob for each in choice.logprobs.content] == node.logprobs
        usage = answer.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(node.prompt_ids), len(node.ids))
        messages += [choice.message, {"role": "user", "content": f"Sure, {turn}?"}]
    for node, after in zip(session.episode.nodes, session.episode.nodes[1:], strict=False):
        assert after.prompt_ids[: len(node.prompt_ids) + len(node.ids)] == [*node.prompt_ids, *node.ids]
    for node in session.episode.nodes:
        by_hand(desk, session, node)
    [branch] = session.episode.branches()
    assert branch.prompt_ids == session.episode.nodes[0].prompt_ids
    tree = session.episode.record(4).tree
    assert [(row["turn"], row["after"], row["begins"]) for row in tree] == [
        (0, None, "new_conversation"),
        *((turn, turn - 1, None) for turn in (1, 2, 3)),
    ]
    assert [row["tokens"] for row in tree] == [len(node.ids) for node in session.episode.nodes]
    times = [row[name] for row in tree for name in ("asked_at", "answered_at")]
    assert times == sorted(times) and times[-1] > 0
    branches_hold_each_id_once(session)


def test_many_at_a_time_draw_what_one_draws_and_a_seed_tells_races_apart(desk):
    def episode(number: int) -> RunningEpisode:
        session, key = desk.begin(number)
        chat = desk.client(key).chat.completions
        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            asked = [
                threads.submit(chat.create, model="policy", messages=QUESTION, seed=seed, n=2) for seed in range(3)
            ]
            first = asked[0].result().choices[0].message
        chat.create(model="policy", messages=[*QUESTION, first, {"role": "user", "content": "And?"}])
        chat.create(model="policy", messages=[{"role": "user", "content": f"It was: {first.content}"}])
        return session

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        sessions = [*threads.map(episode, range(8))]
    again = episode(0)
    for session in sessions:
        assert len(session.episode.nodes) == 8
        for node in session.episode.nodes:
            by_hand(desk, session, node)
        branches_hold_each_id_once(session)
        assert begun(session.episode) == {"new_conversation": 7}
    by_key = [{node.key: node.ids for node in each.episode.nodes} for each in (sessions[0], again)]
    assert by_key[0] == by_key[1]
    assert sessions[0].episode.nodes[0].ids != sessions[1].episode.nodes[0].ids


def test_a_stream_is_the_answer_in_pieces(desk):
    session, key = desk.begin()
    chat = desk.client(key).chat.completions
    texts, reasons, logprobs, usage = ["", ""], [None, None], [[], []], None
    options = {"stream": True, "stream_options": {"include_usage": True}, "logprobs": True}
    for chunk in chat.create(model="policy", messages=QUESTION, n=2, stop=["e"], **options):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            logprobs[choice.index] += choice.logprobs.content if choice.logprobs else []
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    nodes = session.episode.nodes
    assert texts == [node.reply["content"] for node in nodes]
    assert [[each.logprob for each in of] for of in logprobs] == [node.logprobs for node in nodes]
    assert not any("e" in text for text in texts)
    assert usage.completion_tokens == sum(len(node.ids) for node in nodes)
    decode = desk.formats.tokenizer.decode
    for node, reason in zip(nodes, reasons, strict=True):
        by_hand(desk, session, node)
        assert reason == ("stop" if node.ids[-1] in desk.ends or "e" in decode(node.ids) else "length")
        assert "e" not in decode(node.ids[:-1], skip_special_tokens=True)  # it ends where the stop text does


def test_a_stream_holds_back_a_stop_text_until_it_is_whole(desk):
    _, key = desk.begin(1)
    whole = desk.client(key).chat.completions.create(model="policy", messages=QUESTION).choices[0].message.content
    assert len(whole) > 5
    session, key = desk.begin(1)  # draws the same
    options = {"model": "policy", "messages": QUESTION, "stream": True, "stop": [whole]}
    pieces = [chunk.choices[0].delta.content or "" for chunk in desk.client(key).chat.completions.create(**options)]
    assert "".join(pieces) == session.episode.nodes[0].reply["content"] == ""


def test_a_retry_draws_nothing_again_and_a_lost_answer_is_not_trained_on(desk):
    session, key = desk.begin()
    body = json.dumps({"messages": QUESTION, "model": "policy"})
    ask = {"url": f"{desk.gateway.url}/chat/completions", "data": body, "headers": {"Authorization": f"Bearer {key}"}}
    first = requests.post(**ask).json()
    ask["headers"]["X-Stainless-Retry-Count"] = "1"
    assert requests.post(**ask).json() == first
    assert len(session.episode.nodes) == 1
    del ask["headers"]["X-Stainless-Retry-Count"]
    assert requests.post(**ask).json()["choices"] != first["choices"]
    ended = threading.Event()
    session.on_wait = functools.partial(waits_for_the_client_to_go, ended)
    impatient = desk.client(key, timeout=openai.Timeout(60, read=0.2))
    with pytest.raises(openai.APITimeoutError):
        impatient.chat.completions.create(model="policy", messages=QUESTION, seed=5)
    assert ended.wait(60)
    session.on_wait = desk.waits.append
    desk.client(key).chat.completions.create(model="policy", messages=QUESTION, seed=6)
    nodes = session.episode.nodes
    assert [node.is_seen for node in nodes] == [True, True, False, True]
    assert all(node.ids for node in nodes)
    trained = sum(sum(branch.drawn) for branch in session.episode.branches())
    assert trained == sum(len(node.ids) for node in nodes if node.is_seen)


def waits_for_the_client_to_go(ended: threading.Event, waits: bool) -> None:
    """Hold a request's answer back, in its thread, until the server knows that the client has hung up."""
    is_gone = bottle.request.environ["waitress.client_disconnected"]
    while waits and not is_gone():
        time.sleep(0.01)
    if not waits:
        ended.set()


def test_a_stream_that_breaks_off_is_had_whole_by_the_retry(desk):
    session, key = desk.begin()
    body = json.dumps({"messages": QUESTION, "model": "policy", "stream": True, "n": 3})
    ask = {"url": f"{desk.gateway.url}/chat/completions", "data": body, "headers": {"Authorization": f"Bearer {key}"}}
    with requests.post(**ask, stream=True) as broken:
        next(broken.iter_lines())
    ask["headers"]["X-Stainless-Retry-Count"] = "1"
    lines = [line[6:] for line in requests.post(**ask, timeout=20).text.split("\n") if line]
    assert lines.pop() == "[DONE]"
    texts = ["", "", ""]
    for chunk in map(json.loads, lines):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == [node.reply["content"] for node in session.episode.nodes]
    assert all(node.is_seen for node in session.episode.nodes)


def test_a_program_that_ends_with_the_last_piece_of_a_stream_has_seen_it(desk):
    session, key = desk.begin()
    ended = threading.Event()

    def wait_at_the_end(waits: bool) -> None:
        """Hold the request's end back until the server knows that the client has hung up."""
        is_gone = bottle.request.environ["waitress.client_disconnected"]
        if not waits:
            wait_until(is_gone, 30)
            ended.set()

    session.on_wait = wait_at_the_end
    body = json.dumps({"messages": QUESTION, "model": "policy", "stream": True})
    ask = {"url": f"{desk.gateway.url}/chat/completions", "data": body, "headers": {"Authorization": f"Bearer {key}"}}
    with requests.post(**ask, stream=True) as answer:
        next(line for line in answer.iter_lines() if b'"finish_reason": "' in line)
    assert ended.wait(60)
    assert session.episode.nodes[0].is_seen
    branches_hold_each_id_once(session)


@pytest.mark.parametrize(
    ("fields", "status", "param", "code", "words"),
    [
        ({"temperature": 0.2}, 400, "temperature", None, "temperature: 0.2: the run draws with 0.9: leave it out"),
        ({"top_p": 0.5}, 400, "top_p", None, "top_p: 0.5: the run draws with 1: leave it out"),
        ({"messages": []}, 400, "messages", "invalid_value", "messages: no message was sent"),
        ({"functions": []}, 400, "functions", "unsupported_parameter", "functions: this field is not known here"),
        ({"messages": LONG}, 400, "messages", "context_length_exceeded", "with an answer may have 400: send fewer"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_the_clients_terms(desk, fields, status, param, code, words):
    session, key = desk.begin()
    with pytest.raises(openai.APIStatusError) as raised:
        desk.client(key).chat.completions.create(model="policy", messages=QUESTION, extra_body=fields)
    assert session.episode.record(4).tree == []
    assert (raised.value.status_code, raised.value.param, raised.value.code) == (status, param, code)
    assert words in raised.value.message


def test_a_request_may_have_another_temperature_where_the_run_allows_it(desk):
    session, key = desk.begin(may_sample=True)
    client = desk.client(key)
    ask = functools.partial(client.chat.completions.create, model="policy", messages=QUESTION, max_tokens=8)
    ask(temperature=0)
    ask(temperature=0.3, n=2)
    ask()
    ask(temperature=TEMPERATURE)
    for name, value in (("temperature", 2.1), ("temperature", -1), ("top_p", 0.5)):
        with pytest.raises(openai.BadRequestError) as raised:
            ask(**{name: value})
        assert raised.value.param == name
    evaluated = replace(session.limits, temperature=1.0, draw_temperature=0.5)  # by eval_temperature
    body = json.dumps({"messages": QUESTION, "temperature": 0.2}).encode()
    assert find_scale(read_request(body), evaluated) == 2.5
    greedy, *_ = nodes = session.episode.nodes
    assert [node.is_trained for node in nodes] == [False, False, False, True, True]
    with torch.no_grad():
        logits = desk.model(torch.tensor([[*greedy.prompt_ids, *greedy.ids]])).logits[0]
    assert greedy.ids == logits[len(greedy.prompt_ids) - 1 : -1].argmax(dim=1).tolist()
    for node in nodes[3:]:
        by_hand(desk, session, node)
    assert sum(sum(branch.drawn) for branch in session.episode.branches()) == sum(len(node.ids) for node in nodes[3:])


def test_the_runs_own_settings_are_taken_and_models_are_listed(desk):
    _, key = desk.begin()
    client = desk.client(key)
    client.chat.completions.create(model="any", messages=QUESTION, temperature=TEMPERATURE, top_p=1, max_tokens=3)
    assert [model.id for model in client.models.list()] == ["policy"]


def test_an_episode_has_its_turns_and_its_key_alone(desk):
    session, key = desk.begin(turns=2)
    chat = desk.client(key).chat.completions
    with pytest.raises(openai.BadRequestError, match="send fewer"):  # which costs no turn
        chat.create(model="policy", messages=LONG)
    assert session.refusal == "context_length_exceeded"
    chat.create(model="policy", messages=QUESTION, n=2)
    assert session.refusal == ""  # the program got over it: a later failure is another one
    with pytest.raises(openai.BadRequestError, match="has 2 turns, and may have 2"):
        chat.create(model="policy", messages=QUESTION)
    assert session.refusal == "max_turns"
    desk.gateway.close(key)
    for wrong in (key, "sk-none"):
        with pytest.raises(openai.AuthenticationError):
            desk.client(wrong).chat.completions.create(model="policy", messages=QUESTION)
    assert sum(bool(node.ids) for node in session.episode.nodes) == 2


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/chat/completions", b"{", 400),
        ("POST", "/chat/completions", b"\xff" * 10, 400),
        ("POST", "/chat/completions", b"[" * 100_000, 400),
        ("POST", "/chat/completions", b"x" * (5 << 20), 413),
        ("GET", "/chat/completions", None, 405),
        ("POST", "/responses", b"{}", 404),
    ],
)
def test_nonsense_gets_an_error_of_the_api_and_leaves_nothing(desk, method, path, body, status):
    session, key = desk.begin()
    answer = requests.request(method, desk.gateway.url + path, data=body, headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == status
    assert answer.json()["error"]["message"]
    assert session.episode.nodes == []


def test_what_an_ended_episode_waits_for_is_not_drawn(desk):
    closed = threading.Event()

    def keep(episode, request, drawn, done) -> None:
        """Hold the drawer at the first segment that it has drawn."""
        closed.wait(20)
        done.set_result(drawn)

    session, key = desk.begin(journal=types.SimpleNamespace(find=lambda *_: None, add=keep))
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        chat = desk.client(key).chat.completions
        asked = threads.submit(chat.create, model="policy", messages=QUESTION, n=64, max_tokens=LONGEST)
        while len(session.segments) < 64:
            pass
        desk.gateway.close(key)
        closed.set()
        assert sum(segment.done.cancelled() for segment in session.segments.values()) >= 63
        with pytest.raises(openai.BadRequestError, match="the episode is over"):
            asked.result()
    assert session.episode.branches() == []
    assert desk.waits.count(True) == desk.waits.count(False)


def test_no_programs_clock_runs_while_its_request_waits_for_another_programs(desk):
    gateway, waits, count, at_a_time = Gateway(episodes=150, segments=1), [], 150, 3
    drawer = types.SimpleNamespace(submit=lambda segment: None)  # whose rows are all in use
    temperatures = {"temperature": TEMPERATURE, "draw_temperature": TEMPERATURE}
    limits = EpisodeLimits(longest=LONGEST, context=CONTEXT, turns=at_a_time, **temperatures)
    keys = []
    for number in range(count):
        session = RunningEpisode(
            episode=Episode(desk.formats, (7, 3, number)), drawer=drawer, limits=limits, version=0, on_wait=waits.append
        )
        keys.append(gateway.open(session))
    body = json.dumps({"model": "policy", "messages": QUESTION}).encode()
    with ExitStack() as connections:
        for key in keys * at_a_time:
            connection = connections.enter_context(closing(http.client.HTTPConnection(urlsplit(gateway.url).netloc)))
            headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", body, headers)
        wait_until(lambda: waits.count(True) == count * at_a_time, 60)
        for key in keys:
            gateway.close(key)
    gateway.shut_down()


def test_what_was_drawn_before_a_kill_is_answered_again_and_only_the_rest_is_drawn(desk, tmp_path):
    def talk(turns: int) -> tuple[list, list]:
        journal = RunJournal(tmp_path, 0, run="run", oldest=lambda: 0)
        journal.begin(5, lambda: "0123")
        session, key = desk.begin(11, journal=journal)
        chat, messages, said = desk.client(key).chat.completions, [*QUESTION], []
        for turn in range(turns):
            answer = chat.create(model="policy", messages=messages, n=2, max_tokens=9, stop=["e"])
            said += [choice.message.model_dump() for choice in answer.choices]
            stream = chat.create(model="policy", messages=[{"role": "user", "content": f"{turn}"}], stream=True)
            said.append("".join(chunk.choices[0].delta.content or "" for chunk in stream))
            messages += [answer.choices[1].message, {"role": "user", "content": "Sure?"}]
        return said, session.episode.branches()

    said, before = talk(2)
    computed = desk.drawer.computed + desk.drawer.fed
    again, branches = talk(2)
    assert (again, branches) == (said, before)
    assert desk.drawer.computed + desk.drawer.fed == computed
    longer, _ = talk(3)
    assert longer[: len(said)] == said and len(longer) == len(said) + 3
    assert desk.drawer.computed + desk.drawer.fed > computed


def test_a_request_for_more_tokens_is_another_one(desk, tmp_path):
    journal = RunJournal(tmp_path, 0, run="run", oldest=lambda: 0)
    journal.begin(5, lambda: "0123")
    counts = []
    for tokens in (3, 5, 3):
        session, key = desk.begin(12, journal=journal)
        desk.client(key).chat.completions.create(model="policy", messages=QUESTION, max_tokens=tokens)
        counts.append(len(session.episode.nodes[0].ids))
    assert counts[0] == counts[2] == 3 < counts[1]
