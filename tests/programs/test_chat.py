"""`python -m grpo.chat` as a user talks to it: through a pipe, and at a terminal with Ctrl-C and Ctrl-D."""

import contextlib
import io
import json
import os
import pty
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time

import callers
import pictured
import pytest
import torch
from conftest import ENVIRONMENT, REPOSITORY, thinking_model
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import end_by_ctrl_c, left_of, processes_below, signal_another_thread, wait_for_file
from transformers import AutoModelForImageTextToText, AutoTokenizer, Phi3Config, Phi3ForCausalLM

from grpo.chat import AnswerPrinter, stopped_by_ctrl_c, talk
from grpo.config.command_line import parse_arguments
from grpo.config.errors import ConfigError
from grpo.config.sampling_settings import ChatConfig
from grpo.data.chat_template import render_prompt, tokenize_prompt
from grpo.data.records import Example
from grpo.model.load import load_settings, load_tokenizer
from grpo.model.pictures import Vision, load_processor
from grpo.sampling.generate import LocalSampler
from grpo.wire.picture_files import PicturedPrompt

HERE = {"cwd": REPOSITORY, "env": ENVIRONMENT}
SYSTEM = "Answer in one word."
SHORT_AND_GREEDY = ["--temperature", "0", "--max_completion_length", "24"]
LONG_AND_GREEDY = ["--temperature", "0", "--max_completion_length", "400"]


def command(model_folder, *options) -> list[str]:
    return [sys.executable, "-m", "grpo.chat", "--model", str(model_folder), "--system_prompt", SYSTEM, *options]


def piped(model_folder, text: str, *options) -> subprocess.CompletedProcess:
    words = command(model_folder, *options)
    return subprocess.run(words, **HERE, input=text.encode(), capture_output=True, timeout=120)


@pytest.fixture
def chat(monkeypatch, capsys):
    """`chat(model, lines, *options)`: the program's output, in this process, without a system prompt."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(model_folder, lines: str, *options, interactive: bool = False, is_greedy: bool = True) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO(lines + "\n"))
        words = ["--model", str(model_folder), "--system_prompt", "", "--max_completion_length", "24", *options]
        words += ["--temperature", "0"] if is_greedy else []
        talk(parse_arguments(ChatConfig, "", words), interactive)
        return capsys.readouterr().out

    return run


def continued(model, tokenizer, text: str, length=24) -> str:
    """The greedy continuation by transformers alone."""
    ids = tokenizer(text, return_tensors="pt")
    answer = model.generate(**ids, do_sample=False, max_new_tokens=length)[0, ids["input_ids"].shape[1] :]
    return tokenizer.decode(answer, skip_special_tokens=True)


def greedy(model, tokenizer, messages, length=24, **template_kwargs) -> str:
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **template_kwargs)
    return continued(model, tokenizer, text, length)


def conversation(model, tokenizer, *questions) -> str:
    """What is printed for questions that see those before them."""
    messages, printed = [{"role": "system", "content": SYSTEM}], ""
    for question in questions:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": greedy(model, tokenizer, messages)})
        printed += messages[-1]["content"] + "\n"
    return printed


@pytest.mark.slow
def test_a_pipe_gets_the_answers_and_nothing_else(model_folder, model, tokenizer):
    first, second = "What is 2+2?", "And 3+3?"
    ended = piped(model_folder, f"{first}\n\n{second}\n/new\n{second}", *SHORT_AND_GREEDY)
    assert ended.returncode == 0, ended.stderr
    expected = conversation(model, tokenizer, first, second) + conversation(model, tokenizer, second)
    assert ended.stdout.decode() == expected
    assert b"Traceback" not in ended.stderr and b"Warning" not in ended.stderr


def printed(tokenizer, ids: list[int]) -> str:
    """What appears when the ids come one by one."""
    with contextlib.redirect_stdout(io.StringIO()) as screen:
        printer = AnswerPrinter(tokenizer.decode, [])
        for count in range(1, len(ids) + 1):
            assert printer(ids[:count]) is False
        printer.finish()
    return screen.getvalue()


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 511), max_size=40))
def test_any_tokens_one_by_one_are_shown_as_their_text(tokenizer, ids):
    assert printed(tokenizer, ids) == tokenizer.decode(ids, skip_special_tokens=True) + "\n"


def test_characters_of_several_tokens_are_shown_whole_until_the_answer_is_to_stop(tokenizer):
    text = "Grüße, 猫 und 🐈\nTom has 3"
    ids = tokenizer(text)["input_ids"]
    assert len(tokenizer("猫")["input_ids"]) == 3
    screen, stopped = io.StringIO(), []
    with contextlib.redirect_stdout(screen):
        printer = AnswerPrinter(tokenizer.decode, stopped)
        for count in range(1, len(ids) + 1):
            assert printer(ids[:count]) is False
            assert text.startswith(screen.getvalue())
        assert screen.getvalue() == text, "nothing waits for the end"
        stopped.append(signal.SIGINT)
        assert printer(ids) is True


def test_the_first_ctrl_c_stops_an_answer_and_the_second_the_program():
    before = signal.getsignal(signal.SIGINT)
    with stopped_by_ctrl_c(interactive=True) as stopped:
        signal.raise_signal(signal.SIGINT)
        assert stopped
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    with stopped_by_ctrl_c(interactive=False) as stopped, pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert not stopped


@pytest.fixture(scope="module")
def long_answer(model, tokenizer) -> tuple[str, str]:
    """A question and its greedy answer, which takes its time."""
    for question in (f"What is {number}+2?" for number in range(50)):
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        answer = greedy(model, tokenizer, messages, length=400)
        if len(tokenizer(answer)["input_ids"]) > 300:
            return question, answer
    raise AssertionError("every answer is short")


@pytest.mark.slow
def test_the_first_token_is_there_before_the_last_and_ctrl_c_ends_a_pipe(model_folder, long_answer):
    question, answer = long_answer
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen(command(model_folder, *LONG_AND_GREEDY), **HERE, **pipes)
    process.stdin.write(f"{question}\n".encode())
    process.stdin.flush()
    seen = os.read(process.stdout.fileno(), 1)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert b"Traceback" not in errors
    text = (seen + rest).decode(errors="ignore")
    assert 0 < len(text) < len(answer) and answer.startswith(text)


@pytest.mark.slow
def test_a_reader_who_leaves_is_no_disaster(model_folder, long_answer):
    chat = shlex.join(command(model_folder, *LONG_AND_GREEDY))
    line = f"echo '{long_answer[0]}' | {chat} | head -c 3 > /dev/null; echo ${{PIPESTATUS[@]}}"
    ended = subprocess.run(["bash", "-c", line], **HERE, capture_output=True, text=True, timeout=120)
    assert ended.stdout == "0 1 0\n"
    assert "Traceback" not in ended.stderr and "Exception ignored" not in ended.stderr


class Terminal:
    """The program at a pseudo-terminal."""

    def __init__(self, arguments: list[str], errors: int | io.TextIOWrapper):
        self.master, slave = pty.openpty()
        here = {"cwd": REPOSITORY, "env": ENVIRONMENT | {"TERM": "dumb"}, "start_new_session": True}
        self.process = subprocess.Popen(arguments, stdin=slave, stdout=slave, stderr=errors, **here)
        os.close(slave)

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def until(self, end: str, seconds: float = 60) -> str:
        """What is printed until it ends so."""
        deadline, seen = time.monotonic() + seconds, b""
        while not seen.replace(b"\r", b"").endswith(end.encode()):
            ready, _, _ = select.select([self.master], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"only {seen!r}"
            seen += os.read(self.master, 1)
        return seen.replace(b"\r", b"").decode(errors="replace")

    def press_ctrl_c(self, end: str) -> str:
        """Press it until the program answers: readline misses a signal that comes just before it waits for a key."""
        for _ in range(10):
            signal_another_thread(self.process, signal.SIGINT)
            if select.select([self.master], [], [], 5)[0]:
                break
        return self.until(end)


@pytest.fixture
def terminal(model_folder):
    started = []

    def run(*options, errors=subprocess.DEVNULL) -> Terminal:
        started.append(Terminal(command(model_folder, *options), errors))
        return started[-1]

    yield run
    for chat in started:
        chat.process.kill()
        chat.process.wait()
        os.close(chat.master)


@pytest.mark.slow
def test_at_a_terminal_ctrl_c_stops_the_answer_and_ctrl_d_ends(terminal, model, tokenizer, long_answer):
    question, answer = long_answer
    chat = terminal(*LONG_AND_GREEDY)
    assert "Ctrl-C stops an answer, Ctrl-D ends" in chat.until("\n> ")

    chat.press_ctrl_c("\n> ")  # at the prompt: another prompt

    chat.type(question + "\n")
    chat.until(question + "\n" + answer[:1])
    chat.process.send_signal(signal.SIGINT)
    shown = answer[:1] + chat.until("\n> ").removesuffix("\n> ")
    assert len(shown) < len(answer) and answer.startswith(shown)

    chat.type("/new\n")
    chat.until("/new\n> ")
    chat.type(question + "\n")
    whole = chat.until("\n> ").removeprefix(question + "\n").removesuffix("\n> ")
    assert whole in (answer, answer + "\n(cut off after 400 tokens)"), "the signal is gone, and the first try forgotten"

    chat.type("\x04")
    assert chat.process.wait(timeout=30) == 0


def test_questions_by_themselves_and_a_model_without_a_chat_template(chat, model_folder, model, tmp_path):
    folder = tmp_path / "plain"
    shutil.copytree(model_folder, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    for left in folder.glob("chat_template*"):
        left.unlink()
    tokenizer.save_pretrained(folder)
    expected = [continued(model, tokenizer, f"{SYSTEM}\n\n{question}\n\n") + "\n" for question in ("One?", "Two?")]
    assert chat(folder, "One?\nTwo?", "--no_keep_history", "--system_prompt", SYSTEM) == "".join(expected)


def test_the_template_is_told_what_the_settings_say(chat, model_folder, model, tmp_path):
    folder = thinking_model(model_folder, tmp_path / "thinking")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "What is 2+2?"}]
    off = {"enable_thinking": False}
    expected = [greedy(model, tokenizer, messages, **template_kwargs) + "\n" for template_kwargs in ({}, off)]
    assert expected[0] != expected[1]
    for option, answer in zip(([], ["--chat_template_kwargs", json.dumps(off)]), expected, strict=True):
        assert chat(folder, "What is 2+2?", *option) == answer


def test_an_answer_may_be_longer_than_a_batch_allows(chat, tokenizer, tmp_path):
    """With longrope positions a batch's rows depend on the longest from 32 tokens on; a batch of one has one row."""
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 32, "rope_theta": 1e4}
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "max_position_embeddings": 128, "original_max_position_embeddings": 32}
    rope |= {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 4.0, 6.0, 8.0]}
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    settings = Phi3Config(vocab_size=len(tokenizer), **shape, **ids, rope_parameters=rope, initializer_range=0.3)
    model = Phi3ForCausalLM(settings).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    question = "What is 2+2?" + " frog" * 8
    messages = [{"role": "user", "content": question}]
    asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert 32 < len(tokenizer(asked)["input_ids"]) < 100
    assert chat(tmp_path, question) == greedy(model, tokenizer, messages) + "\n"
    with pytest.raises(ConfigError, match="tokens, and the model takes at most 128: ask less at a time"):
        chat(tmp_path, question * 8)


def test_pictures_go_with_the_next_question_and_stay_in_the_conversation(chat, tmp_path):
    folder = pictured.save("qwen2_5_vl", tmp_path / "model")
    pictures = [pictured.drawing(32, 24, 0), pictured.drawing(24, 40, 1, "JPEG")]
    for name, data in zip(("a.png", "b c.jpg", "bad.png"), [*pictures, pictures[0][:60]], strict=True):
        (tmp_path / name).write_bytes(data)
    lines = f"""
        /image nowhere.png
        /image {tmp_path}/bad.png
        /image {tmp_path}/a.png
        What is <image> or <image>?
        What is it?
        Is <image> text?
        /image '{tmp_path}/b c.jpg'
        Is <image> it?
        /new
        What is it?"""
    banner, _, shown = chat(folder, lines, interactive=True).partition("\n> ")
    assert "/image PATH adds a picture, /new begins" in banner

    config = ChatConfig(model_name_or_path=str(folder))
    tokenizer, processor = load_tokenizer(config), load_processor(config, load_settings(config), load_tokenizer(config))
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    image = {"type": "image"}

    def answer(*messages, pictures) -> str:
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = processor.encode(prompt, pictures, False) if pictures else tokenizer(prompt)["input_ids"]
        ids = torch.tensor([[*ids]])
        seen = Vision(processor, model).for_generate([PicturedPrompt(ids[0], pictures)], ids) if pictures else {}
        drawn = model.generate(input_ids=ids, **seen, do_sample=False, max_new_tokens=24)[0, ids.shape[1] :]
        return tokenizer.decode(drawn, skip_special_tokens=True)

    def asked(*parts) -> dict:
        content = [part if isinstance(part, dict) else {"type": "text", "text": part} for part in parts]
        return {"role": "user", "content": content}

    messages, expected = [], []
    questions = asked(image, "What is it?"), asked("Is <image> text?"), asked("Is ", image, " it?")
    for question, count in zip(questions, (1, 1, 2), strict=True):
        expected.append(answer(*messages, question, pictures=pictures[:count]))
        messages += [question, {"role": "assistant", "content": [{"type": "text", "text": expected[-1]}]}]
    expected.append(answer(asked("What is it?"), pictures=[]))
    cut = "\n(cut off after 24 tokens)\n"
    for line in (
        "(the picture nowhere.png cannot be used (No such file or directory))\n",
        f"(the picture {tmp_path}/bad.png cannot be used (is damaged (",
        "(the question has other places than pictures (places for pictures: 2, pictures: 1): ask it again)\n",
        *(text + "\n" for text in expected),
    ):
        before, found, shown = shown.partition(line)
        assert found and before.replace("> ", "").replace(cut.lstrip("\n"), "").count("\n") <= 1, (line, before, shown)


def test_a_text_model_takes_no_picture(chat, model_folder):
    with pytest.raises(ConfigError, match="^the picture a.png is not taken: .* takes text alone"):
        chat(model_folder, "/image a.png\nWhat?")


def test_an_answer_too_long_for_the_memory_is_said_with_the_setting_to_lower(chat, model_folder, monkeypatch):
    def no_room(*_, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.25 GiB")

    monkeypatch.setattr("transformers.GenerationMixin.generate", no_room)
    with pytest.raises(ConfigError, match="^max_completion_length=24: out of memory: use a smaller one"):
        chat(model_folder, "What is 2+2?")


def test_without_a_temperature_answers_are_samples_as_in_training(chat, model_folder, model, tokenizer):
    shown = chat(model_folder, "What?\nWhat?", "--seed", "7", "--no_keep_history", is_greedy=False)
    prompt = render_prompt(tokenizer, "What?", "")
    example = Example(index=0, prompt=prompt, prompt_ids=tokenize_prompt(tokenizer, prompt), columns={})
    sampler = LocalSampler(model, tokenizer, [tokenizer.eos_token_id], 24)
    answers = [sampler.sample([example], 1, 1.0, seed)[0][0].text for seed in (7, 8)]
    assert answers[0] != answers[1] and shown == "".join(f"{answer}\n" for answer in answers)


@pytest.mark.slow
@pytest.mark.parametrize("at", ["terminal", "pipe"])
@pytest.mark.parametrize("hangs", ["tool", "tool beside an environment", "method"])
def test_a_call_that_hangs_does_not_keep_the_program_from_its_end(terminal, tmp_path, hangs, at):
    shop = callers.write(tmp_path)
    file, begun, log = shop / "tools.py", shop / "begun", shop / "errors"
    code = file.read_text().replace("return PRICES[item]", f"import time; open({str(begun)!r}, 'w'); time.sleep(600)")
    file.write_text(code if hangs != "tool beside an environment" else code.replace("    def price(", "    def other("))
    words = ["--model", str(shop / "model"), "--max_completion_length", "60", "--temperature", "0"]
    words += ["--tool_timeout", "300"]
    words += ["--tools", f"{file}:price"] if hangs != "method" else []
    words += ["--environment", f"{file}:Shop"] if hangs != "tool" else []
    question = json.dumps({"question": "How much is a pen?", "answer": "7"}) if hangs != "tool" else "How much?"

    with open(log, "w") as errors:
        if at == "terminal":
            chat = terminal(*words, errors=errors)
            chat.until("\n> ")
            chat.type(question + "\n")
            wait_for_file(begun, chat.process)
            chat.press_ctrl_c("\n> ")
            below = processes_below(chat.process)
            chat.type("\x04")
            assert chat.process.wait(timeout=30) == 0
        else:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": errors}
            with subprocess.Popen(command(shop / "model", *words), **HERE, **pipes) as chat:
                chat.stdin.write(question.encode() + b"\n")
                chat.stdin.flush()
                below = end_by_ctrl_c(chat, begun)
    assert below and not left_of(below)
    assert not [word for word in ("Traceback", "ERROR", "lost its process", "cannot") if word in log.read_text()]


@pytest.mark.slow
@pytest.mark.parametrize("program", ["chat", "evaluate"])
def test_ctrl_c_while_the_hub_is_silent_is_a_line(program):
    with socket.create_server(("127.0.0.1", 0)) as hub:
        silent = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}"}
        command = [sys.executable, "-m", f"grpo.{program}", "--model", "org/model"]
        streams = {"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, cwd=REPOSITORY, env=ENVIRONMENT | silent, **streams) as process:
            hub.settimeout(60)
            connection, _ = hub.accept()
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=30)
            connection.close()
    assert process.returncode == 130 and errors.endswith("interrupted before the start\n") and "Trace" not in errors
