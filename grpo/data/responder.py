"""The interface between samplers and the tools or environment that answer the policy in a completion. The policy draws
a segment up to its eos. They answer with token ids, which follow that segment in the completion, and the policy draws
on after them: nothing that was drawn is tokenised again."""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from grpo.data.records import Example, Outcome, Rollout
from grpo.wire.tool_outcomes import cut_segments


class Dialogue(Protocol):
    """One completion, as its responder sees it. A sampler calls it from one thread at a time."""

    messages: list[dict[str, Any]]  # the messages so far, as in Outcome.messages
    outcome: Outcome | None  # None until the completion is over

    def answer(self, drawn: list[int], room: int) -> Future[list[int] | None] | None:
        """Answer the segment `drawn`, which ends with an eos or was cut, and may be followed by `room` more tokens. The
        future has the ids of the answer, fewer than `room`, or None if the completion is over, with its `outcome`. It
        raises RewardError if an environment of the user's fails. Returns None, which no speed may decide, if the
        segment alone says that the completion is over: a sampler then need not wait."""

    def close(self) -> None:
        """Free the completion's resources, such as its environment. Any number of times, in any state."""


class Responder(Protocol):
    """Answers the policy in all completions of a run."""

    tools: list[dict[str, Any]] | None
    """the JSON schemas of the policy's tools, for its chat template; None without tools"""

    def observe(self, columns: dict[str, Any]) -> str:
        """Return the environment's observation of a row before the first turn, the end of its prompt, or "". From any
        thread. Raises RewardError if the environment fails."""

    def begin(self, example: Example, name: tuple[int, int, int] | None = None) -> Dialogue:
        """Begin a completion of this example. The sampler closes it. Its random numbers, the answers' too, follow from
        `name`: seed, group, number in the group; None if greedy."""


def close_all(dialogues: Iterable[Dialogue]) -> None:
    """Close all dialogues, even if one fails. Ctrl-C ends that: each may wait for a call that hangs."""
    failure: Exception | None = None
    for dialogue in dialogues:
        try:
            dialogue.close()
        except Exception as error:  # a dialogue is the user's code
            failure = failure or error
    if failure is not None:
        raise failure


def show_answer(message: Mapping[str, Any]) -> str:
    """Return the text that shows a message of a tool or an environment to people."""
    return f"[{message.get('name', 'environment')}: {message['content']}]"


def make_rollout(
    tokenizer: PreTrainedTokenizerBase,
    eos_token_ids: Sequence[int],
    *,
    ids: list[int],
    logprobs: list[float],
    policy_version: int,
    drawn: list[bool] | None = None,
    outcome: Outcome | None = None,
) -> Rollout:
    """Make the record of a whole completion. `drawn` and `outcome` are None in a run without turns."""
    segments = [segment for is_drawn, segment in cut_segments(ids, drawn) if is_drawn]
    text = "\n".join(tokenizer.decode(segment, skip_special_tokens=True) for segment in segments)
    finished = ids[-1] in eos_token_ids if outcome is None else outcome.finished
    return Rollout(
        completion_ids=ids,
        finished=finished,
        text=text,
        sampling_logprobs=logprobs,
        policy_version=policy_version,
        drawn=drawn,
        outcome=outcome,
    )
