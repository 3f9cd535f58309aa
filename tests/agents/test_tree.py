"""The tree of an episode: what goes on from what, and that each drawn token is trained on once."""

import hashlib
import json
import math
import random
from collections import Counter
from itertools import groupby

import numpy as np
import pytest
from requested import ADD, Asked, begun, make_request, seen_turns, sent_back, spelled, tool, unseen, user
from talks import call, ids_of, talker

from grpo.agents import tree
from grpo.agents.tree import Episode
from grpo.wire.tool_outcomes import Outcome

SYSTEM = {"role": "system", "content": "Add."}


@pytest.fixture
def asked() -> Asked:
    return Asked(talker())


@pytest.mark.parametrize(
    "changes", [{"content": "\n it is 15"}, {"reasoning_content": "what a client adds"}, {"name": "policy"}]
)
def test_messages_that_a_program_cannot_mean_otherwise_are_equal(asked, changes):
    first = asked.ask([SYSTEM, user("12 and 3?")], " it is 15 ")
    question = user("12 and 3?\n") | {"name": "me"}
    second = asked.ask([SYSTEM, question, sent_back(first, **changes), user("Sure?")], "yes")
    assert second.parent is first and begun(asked.episode) == {"new_conversation": 1}


def test_a_call_is_equal_by_id_name_and_the_value_of_its_arguments(asked):
    first = asked.ask([user("?")], call("add", a=1.0, b=[2, {"x": None, "y": "ä"}]), [ADD])
    [made] = first.reply["tool_calls"]
    assert first.reply["content"] is None and made["type"] == "function"

    def go_on(**changes) -> tree.Node:
        function = made["function"] | {"arguments": '{"b":[2,{"y":"\\u00e4","x":null}],"a":1}'}
        again = made | {"function": function | changes.pop("function", {})} | changes
        return asked.ask([user("?"), sent_back(first, tool_calls=[again]), tool(again["id"], "3")], "3", [ADD])

    assert go_on().parent is first
    for changes in ({"id": "call_0"}, {"function": {"name": "sub"}}, {"function": {"arguments": '{"a": 2}'}}):
        assert go_on(**changes).parent is None
    assert begun(asked.episode) == {"new_conversation": 1, "assistant_not_drawn": 3}


@pytest.mark.parametrize("arguments", ["", "{", "[1]", "1" * 5000, "NaN", "[" * 990 + "]" * 990, "[" * 9999])
def test_arguments_that_no_tool_takes_are_text(asked, arguments):
    made = {"id": "a", "type": "function", "function": {"name": "add", "arguments": arguments}}
    history = [user("?"), {"role": "assistant", "content": "", "tool_calls": [made]}, tool("a", "1")]
    assert arguments[:9] in asked.tokenizer.decode(asked.ask(history, "2", [ADD]).prompt_ids)
    assert begun(asked.episode) == {"assistant_not_drawn": 1}


@pytest.mark.parametrize(
    ("messages", "tools", "why"),
    [
        (lambda first, other: [user("Count.")], [], "new_conversation"),
        (lambda first, other: [user("2?"), first, user("Sure?")], [], "changed_history"),
        (lambda first, other: [SYSTEM, user("1?"), first, user("Sure?")], [], "changed_history"),
        (lambda first, other: [user("1?"), other, user("Sure?")], [], "changed_history"),
        (lambda first, other: [user("1?"), first, user("Sure?")], [ADD], "other_tools"),
        (lambda first, other: [user("1?"), first | {"content": "no"}, user("Sure?")], [], "assistant_not_drawn"),
        (lambda first, other: [user("1?"), first, user("?"), {"role": "assistant", "content": "a"}, user("b")], [],
         "assistant_not_drawn"),
        (lambda first, other: [user("1?"), first], [], "no_new_message"),
    ],
)  # fmt: skip
def test_any_other_request_begins_a_branch_which_is_rendered_whole(asked, messages, tools, why):
    first, other = asked.ask([user("1?")], spelled(asked.tokenizer, "one")), asked.ask([user("9?")], "nine")
    sent = messages(sent_back(first), sent_back(other))
    node = asked.ask(sent, "yes", tools)
    assert node.parent is None
    assert begun(asked.episode) == Counter({"new_conversation": 2}) + Counter({why: 1})
    whole = asked.tokenizer.apply_chat_template(sent, tools=tools or None, tokenize=False, add_generation_prompt=True)
    assert node.prompt_ids == ids_of(asked.tokenizer, whole, ends=False)
    assert len(asked.episode.branches()) == 3


def test_the_last_answer_is_gone_on_from_though_the_program_went_back(asked):
    first = asked.ask([user("1?")], "one")
    second = asked.ask([user("1?"), sent_back(first), user("2?")], "two")
    again = asked.ask([user("1?"), sent_back(first), user("3?"), user("4?")], "four")
    third = asked.ask([user("1?"), sent_back(first), user("2?"), sent_back(second), SYSTEM, user("5?")], "five")
    assert [node.parent for node in (second, again, third)] == [first, first, second]
    longer, shorter = sorted(asked.episode.branches(), key=lambda branch: -sum(branch.drawn))
    assert longer.prompt_ids == first.prompt_ids and shorter.completion_ids == again.ids
    assert shorter.prompt_ids == again.prompt_ids
    assert begun(asked.episode) == {"new_conversation": 1}


def test_each_of_n_segments_is_its_own(asked):
    nodes = asked.episode.ask(make_request([user("1?")], [ADD], n=3))
    assert len({node.key for node in nodes}) == len({node.name for node in nodes}) == 3
    for node in nodes:
        asked.say(node, call("add", a=1))
    ids = [node.reply["tool_calls"][0]["id"] for node in nodes]
    assert len({*ids}) == 3 and all(each.startswith("call_") for each in ids)
    history = [user("1?"), sent_back(nodes[1]), tool(ids[1], "1")]
    assert asked.ask(history, "1", [ADD]).parent is nodes[1]
    assert len(asked.episode.branches()) == 3


def test_random_numbers_follow_from_names_alone():
    def numbers(name, *requests) -> list[tuple]:
        asked = Asked(talker(), name)
        nodes = [node for request in requests for node in asked.episode.ask(request)]
        return [tuple(asked.episode.numbers(node, 3).tolist()) for node in nodes]

    one, two = make_request([user("1?")]), make_request([user("2?")])
    seeded = [make_request([user("1?")], seed=seed) for seed in (0, 5, -5)]
    drawn = numbers((7, 3, 1), one, two, one, *seeded)
    assert len({*drawn}) == 6 and all(0 <= value < 1 for row in drawn for value in row)
    # The order of different requests changes nothing, and a count of numbers no number.
    assert sorted(numbers((7, 3, 1), *reversed(seeded), two, make_request([user("1?")], n=2))) == sorted(drawn)
    for name in ((8, 3, 1), (7, 4, 1), (7, 3, 2), (7 + (1 << 32), 3, 1)):
        assert not {*numbers(name, one, two)} & {*drawn}
    episode = Episode(Asked(talker()).episode.formats, None)
    [node] = episode.ask(one)
    assert episode.numbers(node, 3) is None
    [node] = Asked(talker()).episode.ask(one)
    longer = Asked(talker()).episode.numbers(node, 9)
    assert longer.dtype == np.float64 and tuple(longer[:3]) == drawn[0]


@pytest.mark.parametrize("other_text", ["one", " one"])
def test_equal_answers_that_race_make_the_same_branches(other_text):
    """A program goes on from the first that it gets; only segments of other ids can tell which that was."""
    runs = []
    for order in ((0, 1), (1, 0)):
        asked = Asked(talker())
        racing = [asked.episode.ask(make_request([user("1?")], seed=seed))[0] for seed in (1, 2)]
        texts = ["one", other_text]
        asked.say(racing[order[0]], texts[order[0]])
        then = asked.ask([user("1?"), sent_back(racing[order[0]]), user("2?")], "two", seed=3)
        asked.say(racing[order[1]], texts[order[1]])
        assert then.parent is racing[order[0]]
        runs.append(asked.episode.branches())
        drawn = sum(len(node.ids) for node in (*racing, then))
        assert sum(sum(branch.drawn) for branch in runs[-1]) == drawn and len(runs[-1]) == 2
    assert (runs[0] == runs[1]) == (other_text == "one")


def test_what_no_program_saw_is_trained_on_nowhere(asked):
    lost = asked.ask([user("1?")], "one", seen=False)
    again = asked.ask([user("1?")], "one")
    [branch] = asked.episode.branches()
    assert branch.completion_ids == again.ids
    # Whoever goes on from a text has seen it: here from the answer that arrived.
    assert asked.ask([user("1?"), sent_back(lost), user("2?")], "two").parent is again
    assert unseen(asked.episode) == 1 and len(seen_turns(asked.episode)) == 2
    assert begun(asked.episode) == {"new_conversation": 1}
    gone = asked.ask([user("3?")], "three", seen=False)
    asked.ask([user("3?"), sent_back(gone), user("4?")], "four")
    assert gone.is_seen and unseen(asked.episode) == 1


def test_what_was_drawn_at_another_temperature_is_trained_on_nowhere(asked):
    plan = asked.ask([user("1?")], "one", scale=3.0)
    said = [user("1?"), sent_back(plan), user("2?")]
    second = asked.ask(said, "two")
    said += [sent_back(second), user("3?")]
    third = asked.ask(said, "three", scale=2.0)
    said += [sent_back(third), user("4?")]
    fourth = asked.ask(said, "four")
    fifth = asked.ask([*said, sent_back(fourth), user("5?")], "five", scale=2.0)
    asked.ask([user("Judge it.")], "well", scale=2.0)
    [branch] = asked.episode.branches()
    assert branch.prompt_ids == [*plan.prompt_ids, *plan.ids, *second.before]
    between = [*third.before, *third.ids, *fourth.before]
    assert branch.completion_ids == [*second.ids, *between, *fourth.ids]
    assert branch.drawn == [True] * len(second.ids) + [False] * len(between) + [True] * len(fourth.ids)
    assert [math.isnan(value) for value in branch.sampling_logprobs] == [not drawn for drawn in branch.drawn]
    record = asked.episode.record(4)
    assert record.completion_ids == [*second.ids, *fourth.ids] and record.drawn_tokens == len(record.sampling_logprobs)
    assert [turn["trained"] for turn in record.tree] == [False, True, False, True, False, False]
    assert "three" in record.text and fifth.is_seen
    only = Asked(asked.tokenizer)
    only.ask([user("1?")], "one", scale=2.0)
    assert only.episode.branches() == only.episode.record(4).completion_ids == []


def test_a_temperature_is_a_part_of_a_segments_name(asked):
    """So equal requests of two temperatures that race draw the same as in the other order."""
    first, second = (Asked(asked.tokenizer) for _ in range(2))
    hot = [each.ask([user("1?")], "one", scale=scale) for each, scale in ((first, 1.0), (first, 2.0))]
    cold = [second.ask([user("1?")], "one", scale=scale) for scale in (2.0, 1.0)]
    assert [node.name for node in hot] == [node.name for node in cold[::-1]] and hot[0].name != hot[1].name


def test_a_segment_that_is_not_drawn_yet_is_nowhere(asked):
    asked.episode.ask(make_request([user("1?")]))
    assert asked.episode.branches() == seen_turns(asked.episode) == [] and unseen(asked.episode) == 0
    assert asked.episode.record(4).outcome.messages == [] and asked.episode.record(4).finished


def test_an_unreadable_call_stays_in_the_text_and_is_counted(asked):
    text = '<tool_call>{"name": "add", "argum</tool_call>'
    first = asked.ask([user("1?")], text + call("add", a=1), [ADD])
    assert first.reply["content"] == text
    assert [made["function"]["name"] for made in first.reply["tool_calls"]] == ["add"]
    second = asked.ask([user("1?"), sent_back(first), tool(first.reply["tool_calls"][0]["id"], "1")], text, [ADD])
    assert second.reply == {"role": "assistant", "content": text}
    record = asked.episode.record(4)
    assert (record.outcome.tool_calls, record.outcome.tool_failures) == (3, 2)


def test_a_cut_call_is_text(asked):
    cut = ids_of(asked.tokenizer, call("add", a=1), ends=False)
    node = asked.ask([user("1?")], cut, [ADD])
    assert "tool_calls" not in node.reply and not node.finished and not asked.episode.record(4).finished


def test_a_call_is_text_where_the_program_wants_none_and_its_ids_are_continued(asked):
    node = asked.ask([user("1?")], call("add", a=1), [ADD], may_call=False)
    assert node.finished and "tool_calls" not in node.reply
    assert json.loads(node.reply["content"].split("<tool_call>")[-1].split("</tool_call>")[0])["name"] == "add"
    after = asked.ask([user("1?"), sent_back(node), user("And?")], "so", [ADD])
    assert after.parent is node


@pytest.mark.parametrize("options", [{"max_tokens": 2}, {"stop": ["so"], "stop_at": 3}])
def test_a_segment_that_ended_as_the_program_wanted_is_not_cut(asked, options):
    node = asked.ask([user("2?")], ids_of(asked.tokenizer, "so", ends=False)[:2], **options)
    assert node.is_stopped and not node.finished and asked.episode.record(4).finished


def test_records_tell_what_was_said_once(asked):
    first = asked.ask([SYSTEM, user("1?")], call("add", a=1), [ADD])
    call_id = first.reply["tool_calls"][0]["id"]
    history = [SYSTEM, user("1?"), sent_back(first), tool(call_id, "1")]
    second = asked.ask(history, " one", [ADD])
    sub = asked.ask([user("Translate one.")], "eins")
    third = asked.ask([*history, sent_back(second), user("In German?")], "eins!", [ADD])
    asked.ask(history, "lost", [ADD], seen=False)
    record = asked.episode.record(4)
    assert record.outcome.messages == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": call_id, "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
        },
        tool(call_id, "1") | {"name": "add"},
        {"role": "assistant", "content": " one"},
        user("Translate one."),
        {"role": "assistant", "content": "eins"},
        user("In German?"),
        {"role": "assistant", "content": "eins!"},
    ]
    # A message before two segments is told once.
    asked.ask([*history, sent_back(second), user("In German?")], "zwei", [ADD])
    last = {"role": "assistant", "content": "zwei"}
    assert asked.episode.record(4).outcome.messages == [*record.outcome.messages, last]
    assert record.completion_ids == [*first.ids, *second.ids, *sub.ids, *third.ids]
    assert record.drawn_tokens == len(record.sampling_logprobs)
    assert record.text == f"{call('add', a=1)}\n one\neins\neins!"
    assert record.finished and begun(asked.episode) == {"new_conversation": 2}
    outcome = Outcome(finished=True, messages=record.outcome.messages, tool_calls=1)
    assert Outcome.of_json(outcome.to_json()) == outcome


def test_what_a_program_keeps_of_a_long_talk_is_told_once(asked):
    first = asked.ask([user("1?")], "one")
    second = asked.ask([user("1?"), sent_back(first), tool("a", "7"), user("on")], "two")
    third = asked.ask([tool("a", "7"), user("on"), sent_back(second), user("on")], "three")
    asked.ask([user("on"), sent_back(second), user("on"), sent_back(third), user("on")], "four")
    said = [(message["role"], message["content"]) for message in asked.episode.record(4).outcome.messages]
    on = ("user", "on")
    assert [each for each in said if each[0] != "assistant"] == [("tool", "7"), on, on, on]


def test_a_history_is_hashed_once(asked, monkeypatch):
    """As many bytes for each message, however long the history is."""
    hashed, sha256 = Counter(), hashlib.sha256

    def ask(count: int) -> int:
        messages = [user("1?")]
        for place in range(count):
            messages += [{"role": "assistant", "content": f"a{place:06}"}, user(f"b{place:06}")]
        hashed.clear()
        asked.episode.ask(make_request(messages))
        return hashed["bytes"]

    def count_bytes(body: bytes):
        hashed["bytes"] += len(body)
        return sha256(body)

    monkeypatch.setattr(hashlib, "sha256", count_bytes)
    assert 1.8 < ask(400) / ask(200) < 2.2


TEXTS = [
    "It is 15.",
    " <think>\nso\n</think>\n\n7 \n",
    "",
    call("add", a=1, b=2.0),
    '\n<tool_call>{"name" :"add",  "arguments":{ "b":1.0,"a": 2}}</tool_call> ' + call("add", a=3),
    '<tool_call>{"name": "add", "argum</tool_call>',
]
CUT = ["It is", "<tool_call>"]


class Programs:
    """Programs that run at the same time, each of which follows from its name, and what their segments were given."""

    def __init__(self, case: int, history: str):
        self.asked = Asked(talker(), (case, 0, 0), history=history)
        self.history = history
        self.tokenizer, self.case = self.asked.tokenizer, case
        spell = [lambda text: ids_of(self.tokenizer, text), lambda text: spelled(self.tokenizer, text)]
        self.replies = [spell[place % 2](text) for place, text in enumerate(TEXTS)]
        self.replies += [spelled(self.tokenizer, text, ends=False) for text in CUT]
        self.seen: list[tuple[tuple, tuple, tuple]] = []  # ids before a segment, its own, their log-probs
        self.unseen = 0
        self.waiting = [self.follow(self.talk((), [user("How much?")], 3))]

    def run(self, order: random.Random) -> "Programs":
        """Take requests and answers in this order."""
        while self.waiting:
            step = order.choice(self.waiting)
            if next(step, None) is None:
                self.waiting.remove(step)
        return self

    def follow(self, program):
        """Draw what a program asks for, one segment at a time, so that others come between."""
        replies = None
        while True:
            try:
                request, expected, is_gone = program.send(replies)
            except StopIteration:
                return
            nodes = self.asked.episode.ask(request)
            prompt = nodes[0].prompt_ids
            if self.history == "drawn":
                assert (nodes[0].parent is not None) == bool(expected)
            assert prompt[: len(expected)] == expected if nodes[0].parent else prompt == self.render(request)
            yield True
            replies = []
            for node in nodes:
                replies.append((yield from self.draw(node, is_gone)))

    def draw(self, node, is_gone):
        prompt = node.prompt_ids
        numbers = self.asked.episode.numbers(node, 999)
        ids = self.replies[int(numbers[0] * len(self.replies))]
        logprobs = numbers[1 : len(ids) + 1].tolist()
        self.asked.episode.drew(node, ids, logprobs, version=2)
        yield True
        if is_gone:
            self.unseen += 1
        else:
            node.is_seen = True
            self.seen.append((tuple(prompt), tuple(ids), tuple(logprobs)))
        yield True
        return node.reply, prompt + ids

    def render(self, request) -> list[int]:
        messages = json.loads(json.dumps(request.messages))
        for made in (made for message in messages for made in message.get("tool_calls", [])):
            made["function"]["arguments"] = json.loads(made["function"]["arguments"])
        options = dict(tools=request.tools or None, tokenize=False, add_generation_prompt=True)
        text = self.tokenizer.apply_chat_template(messages, **options)
        return ids_of(self.tokenizer, text, ends=False)

    def talk(self, path: tuple, messages: list, depth: int, expected: list = (), tools: list = (ADD,)):
        """Ask some times. `expected`: the ids that were drawn, which the first request goes on from."""
        chance = random.Random(repr((self.case, path)))
        for turn in range(chance.randint(1, 3)):
            seed = chance.randrange(1 << 40)
            request = make_request(messages, tools, n=chance.choice([1, 1, 1, 3]), seed=seed)
            while chance.random() < 0.2:  # the client gives up, and asks again
                yield request, expected, True
            answers = yield request, expected, False
            for number, (reply, ids) in enumerate(answers):
                if depth and chance.random() < 0.4:
                    place = *path, turn, number
                    follow_up = [*messages, self.send_back(reply), *self.respond(reply, place)]
                    self.waiting.append(self.follow(self.talk(place, follow_up, depth - 1, ids, tools)))
            if depth and chance.random() < 0.3:
                place, others = (*path, turn, "other"), chance.choice([(), (ADD,)])
                self.waiting.append(self.follow(self.talk(place, [user(repr(place))], depth - 1, (), others)))
            reply, expected = chance.choice(answers)
            messages = [*messages, self.send_back(reply), *self.respond(reply, (*path, turn))]
            if chance.random() < 0.2:
                messages, expected = [user(f"In short: {path} {turn}"), *messages[1:]], ()

    def send_back(self, reply: dict) -> dict:
        sent = reply | {"content": (reply["content"] or "").strip()}
        for made in sent.get("tool_calls", []):
            again = json.dumps(json.loads(made["function"]["arguments"]), indent=1, sort_keys=True)
            sent["tool_calls"] = [
                each | {"function": each["function"] | {"arguments": again}} if each is made else each
                for each in sent["tool_calls"]
            ]
        return sent

    def respond(self, reply: dict, place: tuple) -> list[dict]:
        return [tool(made["id"], repr(place)) for made in reply.get("tool_calls", [])] or [user(repr(place))]


@pytest.mark.parametrize("history", ["drawn", "rendered"])
@pytest.mark.parametrize("case", range(12))
def test_each_drawn_token_is_in_one_branch_whatever_the_order_of_answers(case, history):
    runs = [Programs(case, history).run(random.Random(order)) for order in range(3)]
    for run in runs:
        branches = run.asked.episode.branches()
        trained = []
        for branch in branches:
            assert len(branch.completion_ids) == len(branch.drawn) == len(branch.sampling_logprobs)
            assert branch.drawn[0] and branch.drawn[-1]
            place = 0
            for is_drawn, values in groupby(branch.drawn):
                end = place + len([*values])
                logprobs = branch.sampling_logprobs[place:end]
                assert is_drawn or np.isnan(logprobs).all()
                if is_drawn:
                    before = branch.prompt_ids + branch.completion_ids[:place]
                    trained.append((tuple(before), tuple(branch.completion_ids[place:end]), tuple(logprobs)))
                place = end
        assert Counter(trained) == Counter(run.seen) and len(run.seen) > 0
        record = run.asked.episode.record(4)
        assert (len(seen_turns(run.asked.episode)), unseen(run.asked.episode)) == (len(run.seen), run.unseen)
        assert Counter(record.completion_ids) == Counter(i for _, ids, _ in run.seen for i in ids)
        assert branches == runs[0].asked.episode.branches()


def test_the_programs_of_the_last_test_do_what_they_should():
    runs = [Programs(case, "drawn").run(random.Random(0)) for case in range(12)]
    episodes = [run.asked.episode for run in runs]
    reasons = sum(map(begun, episodes), Counter())
    assert {"new_conversation", "changed_history"} <= {*reasons}
    branches = sum(len(run.asked.episode.branches()) for run in runs)
    assert sum(len(seen_turns(episode)) for episode in episodes) > branches + 50
    assert branches >= sum(reasons.values()) > 0 and sum(map(unseen, episodes)) > 20
    assert sum(episode.record(4).outcome.tool_failures for episode in episodes) > 10
