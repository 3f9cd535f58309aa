"""The reward functions: the file to edit.

A reward function turns texts into numbers. Its signature is TRL's; add yours here and name it in `reward_funcs`:

    def brevity_reward(prompts, completions, **columns) -> list[float | None]:
        return [1.0 if len(completion) < 400 else 0.0 for completion in completions]

`prompts` and `completions` are lists of str. Every other column of the dataset comes as a keyword argument, a list of
the same length. None means that the reward does not apply to that completion, and adds nothing.
"""

import atexit
import json
import logging
import re
import select
import subprocess
import sys
import threading
from fractions import Fraction
from importlib.util import find_spec

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
ENDING = re.compile(r"(?:\s|<\|im_end\|>|<\|endoftext\|>|<\|eot_id\|>|<\|end\|>|<end_of_turn>|<eos>|</s>)*")


def correctness_reward(prompts, completions, answer, **columns) -> list[float | None]:
    """2.0 where the last `<answer>...</answer>` holds the gold `answer`, 1.5 where it holds the same value, else 0.0.

    The same value is the same number (see `to_number`) or, where the `math-verify` package is installed and the gold
    is mathematics beyond a number, an expression that it finds equal.
    """
    return [score_answer(completion, gold) for completion, gold in zip(completions, answer, strict=True)]


def format_reward(prompts, completions, **columns) -> list[float | None]:
    """0.2 for each of the four tags that stands exactly once, and after the tags already counted: 0.0 to 0.8.

    `</answer>` counts only if nothing but white space and end tokens follows it.

    Where the prompt ends in `<think>`, as chat templates of R1, QwQ and Qwen3-Thinking make it, that tag is there.

        <think>2+2</think> <answer>4</answer><|im_end|>   0.8
        <think>2+2</think> <answer>4</answer> Done!       0.6   text after the last tag
        <think>2+2 <answer>4</answer>                     0.6   a tag is missing
        <think><think>2+2</think> <answer>4</answer>      0.6   a tag is repeated
        <answer>4</answer> <think>2+2</think>             0.4   wrong order
    """
    return [score_format(completion, prompt) for prompt, completion in zip(prompts, completions, strict=True)]


def is_correct(completion: str, answer: str) -> bool:
    """Whether the completion earns any correctness reward. Evaluation counts these."""
    return score_answer(completion, answer) > 0


def has_format(completion: str, prompt: str = "") -> bool:
    """Whether the completion earns the whole format reward. Evaluation counts these."""
    return score_format(completion, prompt) == 0.8


def score_answer(completion: str, gold: str) -> float:
    """2.0, 1.5 or 0.0 as in `correctness_reward`. An empty answer is never correct, whatever the gold."""
    text, gold = last_answer(completion), gold.strip()
    if not text:
        return 0.0
    if text == gold:
        return 2.0
    return 1.5 if same_value(text, gold) else 0.0


def score_format(completion: str, prompt: str) -> float:
    if prompt.rstrip().endswith("<think>"):
        completion = "<think>" + completion
    ends_well = ENDING.fullmatch(completion.rpartition("</answer>")[2])
    counted, last = 0, -1
    for tag in TAGS if ends_well else TAGS[:-1]:
        if completion.count(tag) == 1 and completion.index(tag) > last:
            counted, last = counted + 1, completion.index(tag)
    return round(0.2 * counted, 1)


def last_answer(completion: str) -> str:
    """The stripped text of the last `<answer>` that is closed, of nested ones the innermost; "" if there is none."""
    for part in reversed(completion.split("<answer>")[1:]):
        text, closing_tag, _ = part.partition("</answer>")
        if closing_tag:
            return text.strip()
    return ""


LONGEST = 1000  # characters; anything longer can only be equal as a string
MATHEMATICS = re.compile(r"[0-9\\^_=<>+*/(\[{|]")
POWER = re.compile(r"-?[0-9]{1,4}(?:\^(?:[0-9]|\{-?[0-9]{1,4}\})|!)")
TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf)\{([^{}]*)\}")
CHOICE = re.compile(r"\(([A-Z])\)")
VARIABLE = re.compile(r"[A-Za-z]\s*=(?!=)")
NAME = re.compile(r"(?:[A-Za-z'\\\s]|_[0-9A-Za-z]|_\{[0-9A-Za-z]+\})*(?:\([^()]*\)\s*)?")  # x, a_1, f(x), \angle ABC
EQUALS = re.compile(r"(?<![<>!:=])=(?!=)")
THOUSANDS = re.compile(r"\{,\}|(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
BRACKETS = re.compile(r"(\\\{|[(\[]).*(\\\}|[)\]])", re.DOTALL)


def same_value(text: str, gold: str) -> bool:
    """Whether two texts are the same words, one number or, says `math-verify`, one expression.

    If the gold is a number and the text is not, only LaTeX, a power or a factorial gets the second chance: "18 or 20"
    is wrong for 18. A gold in plain words gets none: as products of letters, "seat" equals "east".
    """
    if max(len(text), len(gold)) > LONGEST:
        return False
    text, gold = plain(text), plain(gold)
    if text == gold:
        return True
    if "=" not in gold and (match := VARIABLE.match(text)):
        text = text[match.end() :]
    found, expected = to_number(text), to_number(gold, allow_unit=False)
    if expected is not None and (found is not None or not ("\\" in text or POWER.fullmatch(text))):
        return found == expected
    if not (MATHEMATICS.search(gold) and find_spec("math_verify") and same_shape(text, gold)):
        return False
    return all(math_process.equal(claim, gold) for claim in claims(text, gold))


def plain(text: str) -> str:
    r"""The words in \text{...}, and the letter of a choice in brackets."""
    if match := TEXT.fullmatch(text):
        text = match[1].strip()
    match = CHOICE.fullmatch(text)
    return match[1] if match else text


def same_shape(text: str, gold: str) -> bool:
    r"""Whether two lists may be equal: as many elements, and no \{1,2\} for (1,2). `math-verify` looks at neither."""
    brackets, commas = [], []
    for side in (text, gold):
        side = re.sub(r"\\(?:left|right|[,;!])|\s", "", re.sub(r"\\text\{\s*and\s*\}", ",", side))
        brackets.append(BRACKETS.fullmatch(side))
        # A comma between thousands looks like one between elements: each text has two readings.
        commas.append({side.count(","), THOUSANDS.sub("", side).count(",")})
    if all(brackets) and brackets[0].groups() != brackets[1].groups():
        return False
    return commas[0] == {0} or not commas[0].isdisjoint(commas[1])


def claims(text: str, gold: str) -> list[str]:
    """What the text says that the answer is: each side of its equality signs, but a name at its begin.

    `math-verify` looks at the last side alone, and so would take "1/3 = 1/2" for 1/2.
    """
    sides = EQUALS.split(THOUSANDS.sub("", text))
    if len(sides) == 1 or EQUALS.search(gold) or "," in "".join(sides):
        return [text]
    return sides[1:] if NAME.fullmatch(sides[0]) else sides


# [0-9] and not \d, which matches the digits of every script.
WHOLE = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)"
DECIMAL = rf"(?:{WHOLE}(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{{1,3}})?"
CURRENCY = r"(?:\\?[$€£¥₹])"
NOT_A_UNIT = r"(?!(?i:and|or|plus|minus|times|to|(?:hal(?:f|ve)|third|dozen|hundred|thousand|\w*illion)s?|pi)\b)"
LETTER = r"[^\W\d_\xb2\xb3\xb9\xbc-\xbe\u2070-\u2189]"  # \w has superscripts and fractions such as \xbd
NUMBER = re.compile(
    rf"""(?P<sign> (?: [-+]?[ ]?{CURRENCY}? | {CURRENCY}[ ]?[-+] ) [ ]? )
    (?: (?P<whole>{WHOLE}) [ ] (?=[0-9]+[ ]?/) )?  (?P<top>{DECIMAL})  (?: [ ]?/[ ]? (?P<bottom>{DECIMAL}) )?
    (?: [ ]? (?: \\?% | °[CF]? | {CURRENCY} ) )?
    (?P<unit> [ /]?{NOT_A_UNIT} (?: {LETTER}{{2,}} | (?<=[ ])[ghlms] ) (?: [ /-]{NOT_A_UNIT}{LETTER}+ )* [²³]? )?
    \.?""",
    re.VERBOSE,
)


def to_number(text: str, allow_unit: bool = True) -> Fraction | None:
    """The exact value of a text that is one number and nothing else, or None.

    Numbers: "1,080" "$1,080.00" "-$10" "50%" (is 50) "3/4" "2 1/2" ".5" "1e3" "18 apples" "$12/hour" "18 = 18.0"
    None: "18 or 20" "7+3=10" "3-4" "1,2,3" "12:30" "3/0" "2x" "2 million" "about 18" "1e1000" (three digits at most)
    """
    text = " ".join(text.replace("\N{MINUS SIGN}", "-").replace("\N{EN DASH}", "-").replace("{,}", ",").split())
    values = set()
    for part in text.split("="):
        match = NUMBER.fullmatch(part.strip())
        if not match or (match["unit"] and not allow_unit):
            return None
        digits = (match["whole"] or "0", match["top"], match["bottom"] or "1")
        whole, top, bottom = (Fraction(number.replace(",", "")) for number in digits)
        if bottom == 0:
            return None
        value = whole + top / bottom
        values.add(-value if "-" in match["sign"] else value)
    return values.pop() if len(values) == 1 else None


class MathProcess:
    """Asks `math-verify` in a process of its own: in a thread it finds nothing equal, and 9^{9^9} takes it for ever.

    The first question starts the process. An answer that takes longer than `deadline` seconds is no, and the process is
    killed; the next question starts another. It ends with its parent, when its stdin closes.
    """

    def __init__(self, command: list[str], deadline: float):
        self.command, self.deadline = command, deadline
        self.process: subprocess.Popen | None = None
        self.lock = threading.Lock()

    def equal(self, text: str, gold: str) -> bool:
        """Whether the two expressions are equal. RuntimeError if the process cannot start."""
        reply = ""
        with self.lock:
            try:
                if self.process is None or self.process.poll() is not None:
                    self.start()
                print(json.dumps([text, gold]), file=self.process.stdin, flush=True)
                in_time, _, _ = select.select([self.process.stdout], [], [], self.deadline)
                reply = self.process.stdout.readline() if in_time else ""
            finally:
                if not reply:  # too late, dead or interrupted: the next question must not read this one's reply
                    self.stop()
        return reply == "true\n"

    def start(self) -> None:
        self.stop()
        self.process = subprocess.Popen(  # in a session of its own, since Ctrl-C is for the parent
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        if self.process.stdout.readline() != "ready\n":
            raise RuntimeError("math-verify is installed but does not start: repair it or uninstall it.")

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


math_process = MathProcess([sys.executable, __file__], deadline=4.0)
atexit.register(math_process.stop)


def answer_questions() -> None:
    """What the process does: for each line of JSON [text, gold] on stdin, a line "true" or "false" on stdout."""
    from math_verify import LatexExtractionConfig, parse, verify

    def expression(text):
        return parse("$" + re.sub(r"\\?\$|\\[()\[\]]", "", text) + "$", [LatexExtractionConfig()])

    logging.disable()
    replies, sys.stdout = sys.stdout, sys.stderr  # a library that prints must not print among the replies
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        text, gold = json.loads(line)
        print(json.dumps(verify(expression(gold), expression(text))), file=replies, flush=True)


if __name__ == "__main__":
    answer_questions()
