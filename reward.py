"""Reward functions: the file to edit.

A reward function turns texts into numbers. Its signature is TRL's. Add yours here and name it in `reward_funcs`:

    def brevity_reward(completions, **kwargs) -> list[float | None]:
        return [1.0 if len(completion) < 400 else 0.0 for completion in completions]

It returns a number for each completion, in a list, an array or a tensor; None adds nothing. Take what you need by name,
and `**kwargs` for the rest. These are lists with a value for each completion:

    prompts          the prompt as the model reads it: text with the chat template applied
    completions      text
    completion_ids   the completion's token ids
    answer           the gold answer, from `dataset_answer_column`: the text after the last ####, if it has one
    NAME             each column of the dataset by its name; a picture is a PIL image

If the dataset's prompts are lists of messages, `prompts` has these lists, `completions` has lists of one message,
[{"role": "assistant", "content": text}], and `prompt_texts` has the prompts' texts. A dataset's column `answer` that is
not `dataset_answer_column` stays `answer`. Three more arguments are no lists:

    trainer_state    an object with global_step, the number of updates done, and max_steps
    log_extra        log_extra(column, values) adds a column, a value for each completion, to completions.jsonl
    log_metric       log_metric(name, value) adds a metric to metrics.jsonl: the mean over all ranks

Evaluation reports the mean of each function and their weighted sum; of a function that declares itself a verdict also
accuracy, avg@k and pass@k, where a reward above 0 is a right answer:

    brevity_reward.is_verdict = True
"""

import atexit
import json
import logging
import re
import select
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from fractions import Fraction
from importlib.util import find_spec

TAGS = "think", "answer"
ENDING = re.compile(r"(?:\s|<\|im_end\|>|<\|endoftext\|>|<\|eot_id\|>|<\|end\|>|<end_of_turn>|<eos>|</s>)*")
NUMBER_IN_TEXT = re.compile(r"-?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?")
TAG_OR_TOKEN = re.compile(r"</?\w+>|<[|｜]|\[/?INST\]")


def correctness_reward(prompts, completions, answer, **kwargs) -> list[float | None]:
    r"""Return 2.0 if the last `<answer>...</answer>` holds the gold `answer`, 1.5 for the same value, else 0.0.

    Without an `<answer>`, the last `\boxed{...}` is the answer. The last `\boxed{...}` of a gold is the gold. The same
    value is the same number (see `to_number`) or, if the `math-verify` package is installed and text or gold is more
    than a number, an equal expression.
    """
    check_golds(answer)
    pairs = zip(completions, answer, strict=True)
    # In a mixture a dataset may have no answers.
    return [None if gold is None else score_answer(text_of(completion), gold) for completion, gold in pairs]


correctness_reward.is_verdict = True  # evaluation: an answer that earns anything is right


def format_reward(prompts, completions, prompt_texts=None, tags=TAGS, **kwargs) -> list[float | None]:
    """Return 0.2 for each of the four tags that occurs exactly once, after the tags already counted: 0.0 to 0.8.

    Only white space and end tokens may follow `</answer>`. Tags at the prompt's end count (see `find_opened_tags`).
    Other tags are named in `reward_funcs` itself: "format_reward(reasoning, answer)", not by a column of the dataset.

        <think>2+2</think> <answer>4</answer><|im_end|>   0.8
        <think>2+2</think> <answer>4</answer> Done!       0.6   text after the last tag
        <think>2+2 <answer>4</answer>                     0.6   a tag is missing
        <think><think>2+2</think> <answer>4</answer>      0.6   a tag is repeated
        <answer>4</answer> <think>2+2</think>             0.4   wrong order
    """
    pairs = zip(prompt_texts or prompts, completions, strict=True)
    tags = tags if isinstance(tags, tuple) else TAGS
    return [score_format(text_of(completion), text_of(prompt), tags) for prompt, completion in pairs]


format_reward.full_reward = 0.8  # evaluation: the share of answers that earn it is eval_format


def boxed_format_reward(prompts, completions, prompt_texts=None, **kwargs) -> list[float]:
    r"""Return 1.0 for `<think>...</think>` and a `\boxed{...}` after it, else 0.0, as EasyR1's math.py judges it. Tags
    at the prompt's end count (see `find_opened_tags`)."""
    texts = [
        (text_of(text), text_of(prompt)) for prompt, text in zip(prompt_texts or prompts, completions, strict=True)
    ]
    return [float(has_boxed_format(find_opened_tags(text, prompt) + text)) for text, prompt in texts]


boxed_format_reward.full_reward = 1.0


def last_number_reward(completions, answer, **kwargs) -> list[float | None]:
    """Return 1.0 if the last number of the text has the gold's value, else 0.0: for answers without tags."""
    check_golds(answer)
    found = [NUMBER_IN_TEXT.findall(text_of(completion))[-1:] for completion in completions]
    values = [to_number(last[0]) if last else None for last in found]
    return [
        None if gold is None else float(value is not None and value == to_number(gold))
        for value, gold in zip(values, answer, strict=True)
    ]


last_number_reward.is_verdict = True


# From here on: how an answer is compared with the gold. Your own functions need nothing of it.


def text_of(text_or_messages: str | list[dict[str, str]]) -> str:
    """Return a text unchanged, and the last content of a list of messages."""
    return text_or_messages if isinstance(text_or_messages, str) else text_or_messages[-1]["content"]


def check_golds(answer: list) -> None:
    for gold in answer:
        if not isinstance(gold, str | None):
            raise TypeError(f"the gold answer {gold!r} is no text: change the dataset, or write your own reward")


def score_answer(completion: str, gold: str) -> float:
    """Return 2.0, 1.5 or 0.0 as `correctness_reward`. An empty answer is never correct."""
    text, gold = find_last_answer(completion), gold.strip()
    boxed = find_last_boxed(gold)
    if text and text in (gold, boxed):
        return 2.0
    return 1.5 if text and same_value(text, boxed or gold) else 0.0


def score_format(completion: str, prompt: str, tags: tuple[str, str] = TAGS) -> float:
    completion = find_opened_tags(completion, prompt) + completion
    first, second = tags
    marks, last_mark = (f"<{first}>", f"</{first}>", f"<{second}>"), f"</{second}>"
    ends_well = ENDING.fullmatch(completion.rpartition(last_mark)[2])
    counted, last = 0, -1
    for tag in [*marks, last_mark] if ends_well else marks:
        if completion.count(tag) == 1 and completion.index(tag) > last:
            counted, last = counted + 1, completion.index(tag)
    return round(0.2 * counted, 1)


def has_boxed_format(text: str) -> bool:
    thought, _, rest = text.lstrip().partition("</think>")
    return thought.startswith("<think>") and "}" in rest.partition("\\boxed{")[2]


def find_opened_tags(completion: str, prompt: str) -> str:
    """Return the thinking tags at the prompt's end, or "".

    A prompt may end in `<think>` (templates of R1, QwQ and Qwen3-Thinking), in an empty `<think> </think>` (Qwen3 with
    enable_thinking=false) or, prefilled, in `<think>`, a line break and the start of a thought. The last two count only
    if the tag begins a line or follows a template's token, no other tag or token follows, and, for an empty pair, the
    completion has no `<think>`.
    """
    before, tag, after = prompt.rpartition("<think>")
    if tag and not after.strip():
        return "<think>"
    if not tag or (before and before[-1] not in "\n>]"):
        return ""
    if after.strip().startswith("</think>"):
        is_empty_pair = after.strip() == "</think>" and "<think>" not in completion
        return "<think></think>" if is_empty_pair else ""
    return "<think>" if after.startswith("\n") and not TAG_OR_TOKEN.search(after) else ""


def find_last_answer(completion: str) -> str:
    r"""Return the stripped text of the last closed `<answer>`; without `<answer>`, of the last `\boxed{...}`."""
    if "<answer>" not in completion:
        return find_last_boxed(completion)
    closed = [part for part in completion.split("<answer>")[1:] if "</answer>" in part]
    return closed[-1].partition("</answer>")[0].strip() if closed else ""


BRACE = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)


def find_last_boxed(text: str) -> str:
    r"""Return the stripped content of the last closed `\boxed{...}`, of nested ones the innermost, or ""."""
    begins, last_begin, content = [], -1, ""
    for match in BRACE.finditer(text):
        if match[0] == "{" or match[0].startswith("\\boxed"):
            begins.append(match.end() if match[0] != "{" else -1)
        elif match[0] == "}" and begins and (begin := begins.pop()) > last_begin:
            last_begin, content = begin, text[begin : match.start()].strip()
    return content


LONGEST = 1000  # characters; anything longer can only be equal as a string
MATHEMATICS = re.compile(r"[0-9\\^_=<>+*/(\[{|]")
MARKDOWN = re.compile(r"(\*\*|__|[*_`])([^*_`]+)\1")
TEXT = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it)|mbox)\s*\{([^{}]*)\}")
CHOICE = re.compile(r"\(([A-Z])\)")
VARIABLE = re.compile(r"[A-Za-z]\s*=(?!=)")
DELIMITERS = re.compile(
    r"\$\$?([^$]*)(?<!\\)\$\$?|\\\(((?:(?!\\[()]).)*)\\\)|\\\[((?:(?!\\[\[\]]).)*)\\\]"
    r"|\\(?:boxed|fbox)\{((?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})*)\}",
    re.DOTALL,
)
EQUALS = re.compile(r"(?<![<>!:=])=(?!=)|\\equiv(?![A-Za-z])")
IGNORED = re.compile(r"\\(?:left|right)(?![A-Za-z])|\{,\}|\\!|\^\s*(?:\\circ|\{\s*\\circ\s*\})$")
AND_OR = re.compile(r",?\s*(?:\\text\{\s*(?:and|or)\s*\}|\b(?:and|or)\b)")
THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
BRACKETS = re.compile(r"(\\\{|[(\[]).*(\\\}|[)\]])", re.DOTALL)
# A power, an index, a function's argument, an environment: no values.
ATTACHED = re.compile(r"[_^]\s*(?:\{[^{}]*\}|\\[A-Za-z]+|.)|(?<=[A-Za-z'])\([^()]*\)|\\(?:begin|end)\{[^{}]*\}")
# math-verify computes these, and passes over others, which a text may have only if the gold has them.
COMPUTED = (
    r"\\(?:[dtc]?frac|sqrt|[dt]?binom|c?dot|times|div|pm|pi|infty|log|ln|exp|(?:arc)?(?:sin|cos|tan)|cot|sec|csc"
    r"|[lg]eq?|in|cup|cap|overline|text|begin|end|[,;:! %${}|])(?![A-Za-z])"
)
PASSED_OVER = re.compile(
    rf"{TEXT.pattern}|(?:(?!{COMPUTED})\\(?:[A-Za-z]+|.))|['\"]|[0-9]\s*_|(?<![_^])[0-9](?:\s|\\[,;: ]|~)+[0-9]"
)
UNKNOWN = re.compile(
    r"\\(?:var)?(?:alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|rho|sigma|tau|phi|chi|psi"
    r"|omega|ell|Gamma|Delta|Theta|Lambda|Sigma|Phi|Psi|Omega)(?![A-Za-z])|(?<!\\)[A-Za-z]"
)
COMMAND = re.compile(r"\\[A-Za-z]+")


def same_value(text: str, gold: str) -> bool:
    """Tell whether two texts are the same words, the same number or, by `math-verify`, the same expression. For a gold
    number, `math-verify` sees only LaTeX and arithmetic: "18 or 20" is wrong for 18. It never sees a gold in plain
    words: as products of letters, "seat" equals "east"."""
    if max(len(text), len(gold)) > LONGEST:
        return False
    is_latex = "\\" in text
    text, gold = (strip_delimiters(" ".join(side.split())) for side in (text, gold))
    if text == gold:
        return True
    if "=" not in gold and (match := VARIABLE.match(text)):
        text = strip_delimiters(text[match.end() :].strip())
    number, gold_number = to_number(text), to_number(gold, allow_unit=False)
    is_computed = is_latex or all(map(ARITHMETIC.fullmatch, text.split("=")))
    if gold_number is not None and (number is not None or not is_computed):
        return number == gold_number
    if not (MATHEMATICS.search(gold) and find_spec("math_verify")):
        return False
    text, gold = (AND_OR.sub(" ,", strip_unit(IGNORED.sub("", side))) for side in (text, gold))
    # A comma may separate thousands or elements: a text has two readings.
    return any(same_expression(reading, gold) for reading in dict.fromkeys([text, THOUSANDS.sub("", text)]))


def strip_delimiters(text: str) -> str:
    r"""Take the text out of $...$, \(...\), \[...\], \boxed{...}, \text{...}, **...** and `...`, and B out of (B)."""
    while match := DELIMITERS.fullmatch(text) or MARKDOWN.fullmatch(text):
        text = match[match.lastindex].strip()
    if match := TEXT.fullmatch(text):
        text = match[1].strip()
    match = CHOICE.fullmatch(text)
    return match[1] if match else text


def same_expression(text: str, gold: str) -> bool:
    """Tell whether `math-verify` finds the text's value equal to the gold. The value of "A = B = C" is its last side,
    for each element of a list. `math-verify` would take "1/3 = 1/2" for 1/2: so all sides before must equal the last,
    but those that name the unknown ("x", "|z|")."""
    chains = []
    if EQUALS.search(text) and not EQUALS.search(gold):
        chains = [split(element, EQUALS.pattern) for element in split(text, ",")]
        chains = [[*sides, strip_delimiters(value.strip())] for *sides, value in chains]
        text = ", ".join(chain[-1] for chain in chains)
        if EQUALS.search(text):
            return False
    values = [(side, chain[-1]) for chain in chains for side in chain[:-1] if not is_name(side)]
    if any(match[0] not in gold for side, _ in [(text, gold), *values] for match in PASSED_OVER.finditer(side)):
        return False
    return same_shape(text, gold) and all(math_process.equal(*pair) for pair in [(text, gold), *values])


def split(text: str, separator: str) -> list[str]:
    """Split the text at each separator that is in no bracket."""
    parts, depth, begin = [], 0, 0
    for match in re.finditer(rf"[(\[{{]|[)\]}}]|{separator}", text):
        if match[0] in "([{)]}":
            depth += 1 if match[0] in "([{" else -1
        elif depth == 0:
            parts.append(text[begin : match.start()])
            begin = match.end()
    return [*parts, text[begin:]]


def is_name(side: str) -> bool:
    r"""Tell whether a side of an equation names the unknown value, such as x, f(2), AB^2 or \frac{a}{b}. One unknown
    among numbers is no name ("x/2 = 5" is not solved), and "20 km" is a number."""
    if to_number(side) is not None:
        return False
    side = ATTACHED.sub("", side)
    unknowns = len(UNKNOWN.findall(COMMAND.sub(lambda match: "x" if UNKNOWN.fullmatch(match[0]) else " ", side)))
    return unknowns > 1 or (unknowns == 1 and not re.search("[0-9]", side))


def same_shape(text: str, gold: str) -> bool:
    r"""Tell whether two lists may be equal: as many elements, no \{1,2\} for (1,2). `math-verify` checks neither."""
    text, gold = (re.sub(r"\\[,;! ]|\s", "", side) for side in (text, gold))
    brackets = [BRACKETS.fullmatch(side) for side in (text, gold)]
    if all(brackets) and brackets[0].groups() != brackets[1].groups():
        return False
    size, *gold_sizes = (side.count(",") + side.count(r"\pm") for side in (text, gold, THOUSANDS.sub("", gold)))
    return size == 0 or size in gold_sizes


# [0-9] and not \d, which matches the digits of every script.
WHOLE = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)"
DECIMAL = rf"(?:{WHOLE}(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{{1,3}})?"
CURRENCY = r"(?:\\?[$€£¥₹])"
LETTER = "[A-Za-zÀ-ÖØ-öø-ÿ]"
WORDS = rf"{LETTER}+(?:[ /-]{LETTER}+)*"
SQUARED = r"(?:[²³]|\^[23]|\^\{[23]\})?"
NUMBER = re.compile(
    rf"""(?!.*[$€£¥₹].*[ ]mm?\b)  # "$5 m" is millions
    (?P<sign> (?: [-+]?[ ]?{CURRENCY}? | {CURRENCY}[ ]?[-+] ) [ ]? )
    (?: (?P<whole>{WHOLE}) [ ] (?=[0-9]+[ ]?/) )?  (?P<top>{DECIMAL})  (?: [ ]?/[ ]? (?P<bottom>{DECIMAL}) )?
    (?: [ ]? (?: \\?% | °[CF]? | {CURRENCY} ) )?
    (?P<unit> [ /]?{WORDS}{SQUARED} )?
    \.?""",
    re.VERBOSE,
)
FACTOR = rf"(?:-|(?:-?\()+-?)?{DECIMAL}(?:!|\^(?:[0-9]|\{{-?[0-9]{{1,4}}\}}))?\)*"
ARITHMETIC = re.compile(rf"\s*{FACTOR}(?: ?[-+*/] ?{FACTOR})*\s*")
# A unit is one of these symbols, or words of three letters and more, but none of CHANGES.
UNIT = re.compile(
    rf"[ ][aghlms]|/[dghlms]|[ /-]?{LETTER}{{3,}}|[ /-]?(?i:of|an|at|on|in|us|uk|st|nd|rd|th|km|cm|mm|nm|mi|ft|yd|sq|cu"
    r"|kg|mg|lb|oz|ml|cl|dl|hr|ms|wk|mo|yr|am|pm|kb|mb|gb|tb|kw|hz|pt|qt|ct|cc|tv|cd|pc)"
)
CHANGES = re.compile(
    r"""  # numbers, shares and multiples; operations; signs and limits; other answers
      (?: zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|fif|eigh|nin|twelf|third|half|halve
        | (?:twen|thir|fou?r|fif|six|seven|eigh|nine)t(?:een|y|ie)|hundred|thousand|dozen )+ (?:s|d|th|ths|ish)?
    | \w*(?:illion|illiard|fold)s?(?:th|ths)?|lakhs?|crores?|mill?e?|mln|bil|bln|thou|doz|grand|gross|scores?|pairs?
    | quarters?|single|once|twice|thrice|(?:doubl|trebl|tripl|\w+upl)\w{1,3}|mega|giga|tera|micro|nano|milli|basis
    | pp[mbt]|bps|infinit[ey]|none|tau|phi|[abcxyz]{3,}
    | times|plus|over|into|(?:multipli?|divid|subtract|add|increas|decreas|reduc)(?:y|ed?|ing)?|squared?|cubed?|powers?
    | exponent|mod|modul[ou]s?|roots?|sqrt|factorial|prime|remainder|choose|permute|log|exp|sin|cos|tan|inverse
    | reciprocal|base|binary|octal|hex\w*al|hex|repeating|recurring|periodic
    | minus|negati\w+|negated|opposite|imaginary|less|fewer|lower|off|short|below|under|beneath|above|beyond|loss|debt
    | deficit|least|most|minimum|max(?:imum)?|upwards?|odd|ish|some(?:thing)?|between|about|almost|nearly|approx\w*
    | and|not|nor|neither|never|but|else|instead|rather|otherwise|maybe|perhaps|wrong|incorrect|unless|except|exclu\w+
    | without|versus|tops|roughly""",
    re.VERBOSE | re.IGNORECASE,
)
OF_UNIT = re.compile(  # where some of those words change nothing
    r"\bsquare (?=\w)|(?<=left) over|\b(units|feet|foot|ft|inches|in|yards|miles|\w*met[er]{2}s|\w?m) (?:squared|cubed)"
)
LATEX_UNIT = re.compile(
    rf"(?<=[0-9A-Za-z}})])(?:(?:\s|\\[,;: ])*{TEXT.pattern}{SQUARED}|[ ]+({LETTER}{WORDS}){SQUARED}$)"
)


def is_unit(text: str) -> bool:
    """Tell whether words after a number, with the space before them, cannot change its value: " cups of tea"."""
    text = OF_UNIT.sub(r"\1", text)
    words = re.findall(rf"[ /-]?{LETTER}+", text)
    is_known = all(UNIT.fullmatch(word) and not CHANGES.fullmatch(word.lstrip(" /-")) for word in words)
    return bool(re.fullmatch(rf"[ /]?{WORDS}{SQUARED}", text)) and is_known


def strip_unit(side: str) -> str:
    r"""Take units from an expression such as "9\pi \text{ cm}^2" or "9\pi cm"."""
    return LATEX_UNIT.sub(lambda match: " " if is_unit(" " + match[match.lastindex].strip()) else match[0], side)


def to_number(text: str, allow_unit: bool = True) -> Fraction | None:
    """Return the exact value of a text that is one number and nothing else, or None.

    Numbers: "1,080" "$1,080.00" "-$10" "50%" (is 50) "3/4" "2 1/2" ".5" "1e3" "18 apples" "$12/hour" "18 = 18.0"
    None: "18 or 20" "7+3=10" "3-4" "1,2,3" "12:30" "3/0" "2x" "2 million" "about 18" "1e1000" (three digits at most)
    """
    text = " ".join(text.replace("\N{MINUS SIGN}", "-").replace("\N{EN DASH}", "-").replace("{,}", ",").split())
    if len(text) > LONGEST:  # Python refuses integers of more than 4300 digits
        return None
    values = set()
    for part in text.split("="):
        match = NUMBER.fullmatch(part.strip())
        if not match or (match["unit"] and not (allow_unit and is_unit(match["unit"]))):
            return None
        digits = (match["whole"] or "0", match["top"], match["bottom"] or "1")
        whole, top, bottom = (Fraction(number.replace(",", "")) for number in digits)
        if bottom == 0:
            return None
        value = whole + top / bottom
        values.add(-value if "-" in match["sign"] else value)
    return values.pop() if len(values) == 1 else None


LATEX_DECIMAL = re.compile(
    r"(?=\.?[0-9])([0-9]*(?:\.([0-9]*))?)(?:\\overline\s*\{([0-9]+)\})?(?:[eE]([-+]?[0-9]{1,3}))?"
)


def write_fraction(match: re.Match) -> str:
    r"""Write a decimal as "{\frac{1}{4}}". As floats, `math-verify` would take 0.333333 for 1/3."""
    digits, places, repeated, exponent = match.groups()
    if match[0].isdigit() or (repeated and places is None):
        return match[0]
    value = Fraction(f"0{digits}")
    if repeated:
        value += Fraction(int(repeated), (10 ** len(repeated) - 1) * 10 ** len(places))
    value *= Fraction(10) ** int(exponent or 0)
    return rf"{{\frac{{{value.numerator}}}{{{value.denominator}}}}}"


CPU_SECONDS = 4.0  # not of the clock: what earns a reward must not depend on how busy the machine is


class MathProcess:
    """A process that runs `math-verify`, which finds nothing equal in a thread, and computes 9^{9^9} for ever. A
    question starts it if there is none. It ends with its parent, when its stdin closes, and at a question that takes
    CPU_SECONDS or, where it waits for something else, `deadline` seconds, which means no."""

    def __init__(self, command: list[str], deadline: float):
        self.command, self.deadline = command, deadline
        self.process: subprocess.Popen | None = None
        self.lock = threading.Lock()

    def equal(self, text: str, gold: str) -> bool:
        """Tell whether the two expressions are equal. Raises RuntimeError if the process cannot start."""
        reply = ""
        with self.lock:
            try:
                if self.process is None or self.process.poll() is not None:
                    self.start()
                print(json.dumps([text, gold]), file=self.process.stdin, flush=True)
                if select.select([self.process.stdout], [], [], self.deadline)[0]:
                    reply = self.process.stdout.readline()
            finally:
                if not reply:  # too late, ended or interrupted: the next question must not read this reply
                    self.stop()
        return reply == "true\n"

    def start(self) -> None:
        self.stop()
        self.process = subprocess.Popen(  # in a session of its own: Ctrl-C is for the parent
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        if self.process.stdout.readline() != "ready\n":
            raise RuntimeError("math-verify is installed but does not start: repair it or uninstall it.")

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


math_process = MathProcess([sys.executable, __file__], deadline=120.0)
atexit.register(math_process.stop)


def answer_questions() -> None:
    """Answer each line of JSON [text, gold] on stdin by "true" or "false" on stdout."""
    from math_verify import LatexExtractionConfig, parse, verify

    config = LatexExtractionConfig()
    config = replace(config, normalization_config=replace(config.normalization_config, units=False))  # 3t is not 3

    def parse_expression(text):
        text = LATEX_DECIMAL.sub(write_fraction, text)
        text = re.sub(r"\\?\$|\\[()\[\]]", "", text)
        return parse(f"${text}$", [config], parsing_timeout=0)  # 0 is none

    logging.disable()
    replies, sys.stdout = sys.stdout, sys.stderr  # for libraries that print
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        text, gold = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # SIGPROF then ends this process
        is_equal = verify(parse_expression(gold), parse_expression(text), timeout_seconds=0)
        print(json.dumps(is_equal), file=replies, flush=True)


if __name__ == "__main__":
    answer_questions()
