"""Makes an example with a tokenised prompt from a dataset's row."""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, time
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo.config.sampling_settings import AnsweringConfig, AnswerSection
from grpo.data import chat_template as chat
from grpo.data.dataset_pictures import PictureColumn, check_prompt
from grpo.data.records import Example, Responder
from grpo.model.pictures import PictureProcessor
from grpo.wire.picture_files import EncodedPicture

# The arguments of a reward function beside the columns, in this program or in TRL.
GIVEN_TO_REWARDS = {"prompts", "completions", "completion_ids", "prompt_texts"}
GIVEN_TO_REWARDS |= {"trainer_state", "log_extra", "log_metric"}

_MESSAGES_AS_TEXT = re.compile(r"""['"](?:role|from)['"]: ?['"](?:system|user|human|assistant|gpt)['"]""")
_TEMPLATES_BEGIN = re.compile(
    r"<[|｜](?:im_start|begin_of_text|start_header_id|begin▁of▁sentence|system|user|User)[|｜]>"
    r"|(?:<bos>)?<start_of_turn>|(?:<s>)? ?\[INST\]"
)  # ChatML, Llama, DeepSeek, Phi, Gemma, Mistral


def field_of(row: Mapping[str, Any], name: str) -> Any:
    """Return a row's value by a column's name or, dotted, by that of a field of a column of dicts; None without it."""
    if name in row:
        return row[name]
    column, dot, field = name.partition(".")
    return field_of(row[column], field) if dot and isinstance(row.get(column), Mapping) else None


def dotted_names(row: Mapping[str, Any]) -> list[str]:
    """Return the names of a row's columns, and those of the fields of columns that have dicts, for `field_of`."""
    names = []
    for name, value in row.items():
        fields = dotted_names(value) if isinstance(value, Mapping) else []
        names += [name, *(f"{name}.{field}" for field in fields)]
    return names


def make_example(
    config: AnsweringConfig,
    tokenizer: PreTrainedTokenizerBase,
    index: int,
    row: Mapping[str, Any],
    column: PictureColumn | None = None,
    processor: PictureProcessor | None = None,
    turns: Responder | None = None,
) -> Example | None:
    """Make an Example of a dataset row; None if its prompt, with the environment's observation, has neither text nor
    picture. Its columns have the row's values, and the gold answer, if there is one, as `answer`, unless the dataset
    has another column of that name. An answer that is a list or dict stays one there. Raises ConfigError, naming the
    row, for a value of a wrong type, or pictures without a `processor`; PictureError or PictureCountError if its
    pictures cannot be used; RewardError if an environment fails."""
    answer, prompt = field_of(row, config.dataset_answer_column), field_of(row, config.dataset_prompt_column)
    prompt = _without_nulls(prompt)
    place = f"row {index} (from 0)"
    _check_values(config, answer, prompt, place)
    columns, gold = _columns_for_rewards(config, row, answer), gold_answer(answer)
    if column is not None and row[column.name] and processor is None:
        reason = f"{place} of {config.dataset_name} has a picture in {column.name!r}, and this model takes text alone"
        config.refuse("model_name_or_path", f"{reason}: use another one, or set dataset_image_column to ''")
    pictures: list[EncodedPicture] = []
    if column is not None:
        columns[column.name] = value = column.read(row[column.name], index)
        pictures = value if isinstance(value, list) else [] if value is None else [value]
        check_prompt([picture.file for picture in pictures])
    count = None if column is None or processor is None else len(pictures)
    if turns is not None and (observation := turns.observe(columns)):
        prompt = chat.add_observation(prompt, observation)
    if not pictures and _is_blank(prompt):
        return None
    tools, system_prompt = None if turns is None else turns.tools, config.system_prompt
    if config.prompt_format == "raw" and isinstance(prompt, str):
        remedy = "pictures and tools have their place in a chat: use chat"
        config.check(not pictures and not tools, prompt_format=remedy)
        remedy = "prompt_format raw continues a text without it: leave it out, or use chat"
        config.check(system_prompt in ("", AnswerSection.system_prompt), system_prompt=remedy)
        rendered, system_prompt = prompt, ""
        prompt_ids = chat.tokenize_text(tokenizer, prompt)
    else:
        rendered = chat.render_prompt(
            tokenizer, prompt, system_prompt, config.chat_template_kwargs, place=place, pictures=count, tools=tools
        )
        prompt_ids = chat.tokenize_prompt(tokenizer, rendered, processor, [picture.file for picture in pictures])
    messages, conversation = chat.chat_messages(prompt, system_prompt), prompt if isinstance(prompt, list) else None
    if pictures:
        messages = chat.place_pictures(messages, count)
        conversation = conversation and _fill(chat.place_pictures(conversation, count), pictures)
    messages = chat.text_of_messages(messages)
    return Example(
        index=index,
        prompt=rendered,
        prompt_ids=prompt_ids,
        columns=columns,
        messages=messages,
        gold=gold,
        conversation=conversation,
    )


def _columns_for_rewards(config: AnsweringConfig, row: Mapping[str, Any], answer: Any) -> dict[str, Any]:
    """Return the row's values with its gold answer, if it has one, as `answer`. Reward functions are given the prompt
    under its column's name too, unless they are given another thing by it."""
    given = {config.dataset_prompt_column} & GIVEN_TO_REWARDS
    columns = {name: value for name, value in row.items() if name not in given}
    is_there = config.dataset_answer_column in row or answer is not None
    if is_there and (config.dataset_answer_column == "answer" or "answer" not in row):
        columns["answer"] = answer if isinstance(answer, list | dict) else gold_answer(answer)
    return columns


def _check_values(config: AnsweringConfig, answer: Any, prompt: Any, place: str) -> None:
    """Raise ConfigError for a gold answer or a prompt of a wrong type in this row."""
    if isinstance(answer, bytes):
        reason = f"{place} has {str(answer)[:80]}: a gold answer is text, a number, a list or a dict"
        config.refuse("dataset_answer_column", f"{reason}: name a column of such")
    if not (isinstance(prompt, str) or (isinstance(prompt, list) and prompt and all(map(_is_message, prompt)))):
        fields = [*prompt] if isinstance(prompt, dict) else []
        field = f", as {config.dataset_prompt_column}.{fields[0]}" if fields else ""
        config.refuse(
            "dataset_prompt_column",
            f"{place} has {str(prompt)[:80]}: a prompt is text, or a list of messages whose content is text or a list "
            f'of parts, {{"type": "text", "text": ...}} or {{"type": "image"}}: mend it, or name another column{field}',
        )


def doubt_prompts(config: AnsweringConfig, tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example]) -> str:
    """Return a sure fault of the first prompts, with the remedy; "" if they seem right."""
    first, some = examples[0], examples[:8]
    text = "\n".join(message["content"] for message in first.messages if message["role"] == "user").strip()
    if first.conversation is None and text.startswith(("[", "{")) and _MESSAGES_AS_TEXT.search(text):
        return "the first prompt is the text of a list of messages, which is asked as it stands: store the list itself"
    is_rendered = tokenizer.chat_template is not None and (config.prompt_format == "chat" or first.conversation)
    if is_rendered and (mark := _mark_of_template(tokenizer, text, first.prompt)):
        remedy = "store the question alone, or use prompt_format raw"
        return f"the first prompt has {mark}, and the chat template writes the marks of a chat itself: {remedy}"
    if all(example.messages[-1]["role"] == "assistant" for example in some):
        ends = [example.messages[-1]["content"] for example in some]
        golds = [rf"(?<!\w){re.escape(example.gold)}(?!\w)" for example in some]
        # The begin of an answer, the same in each prompt, is meant.
        has_golds = all(re.search(gold, end) for gold, end in zip(golds, ends, strict=True))
        if has_golds if first.gold else len({*ends}) == len(ends) > 1:
            return "the prompts end with the assistant's answer, which the model continues: leave that message out"
    return ""


def _mark_of_template(tokenizer: PreTrainedTokenizerBase, text: str, rendered: str) -> str:
    """Return a token in the user's text that the chat template writes too, or the begin of another template's."""
    added = tokenizer.added_tokens_decoder.values()
    tokens = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
    for token in sorted(tokens):
        is_written = rendered.count(token) > text.count(token) > 0
        if is_written and (len(token) > len("</s>") or text.startswith(token)):  # HTML has <s>, too
            return token
    return found[0] if (found := _TEMPLATES_BEGIN.match(text)) else ""


def gold_answer(answer: Any) -> str:
    """Return the part of GSM8K's "solution #### answer" after the last "####"; elsewhere the whole column. It is JSON
    of a list or dict, and empty without an answer: null or pandas' NaN, white space, an empty list or dict."""
    if isinstance(answer, list | dict):
        return json.dumps(answer, ensure_ascii=False, default=str) if answer else ""
    if answer is None or answer != answer:
        return ""
    if isinstance(answer, float) and answer.is_integer():  # a column of whole numbers, of which one is missing
        answer = int(answer)
    if isinstance(answer, datetime) and answer.time() == time():  # `datasets` makes it of a date in JSON
        answer = answer.date()
    return str(answer).rsplit("####", 1)[-1].strip()


def _without_nulls(prompt: Any) -> Any:
    """Drop null at any depth of a chat: Arrow gives each message, and each call of a tool, the fields of all. A turn of
    calls alone gets an empty content."""
    if isinstance(prompt, list):
        return [_without_nulls(each) for each in prompt]
    if not isinstance(prompt, dict):
        return prompt
    kept = {name: _without_nulls(value) for name, value in prompt.items() if value is not None}
    return {"content": ""} | kept if "tool_calls" in kept else kept


def _fill(messages: list[chat.PartMessage], pictures: Sequence[EncodedPicture]) -> list[chat.PartMessage]:
    """Return the messages with the pictures in their parts, as TRL's prepare_multimodal_messages does."""
    rest = iter(pictures)

    def fill(part: dict[str, Any]) -> dict[str, Any]:
        return part | {"image": next(rest)} if part["type"] == "image" else part

    return [message | {"content": [*map(fill, message["content"])]} for message in messages]


def _is_message(message: Any) -> bool:
    match message:
        case {"role": str(), "content": str()}:
            return True
        case {"role": str(), "content": [*parts]}:
            return all(map(_is_part, parts))
    return False


def _is_part(part: Any) -> bool:
    """Tell whether it is a text, or the place of a picture of the dataset's column."""
    match part:
        case {"type": "text", "text": str()}:
            return True
        case {"type": "image", **others}:
            return not others
    return False


def _is_blank(prompt: str | list[chat.PartMessage]) -> bool:
    """Tell whether only the system says anything."""
    messages = chat.text_of_messages(chat.chat_messages(prompt, ""))
    spoken = [message for message in messages if message["role"] != "system"] or messages
    return not any(message["content"].strip() for message in spoken)
