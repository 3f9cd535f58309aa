r"""Compares an answer with the gold: as words and choices, as numbers with units, and by `math-verify` as expressions.

`correctness_reward` of reward.py asks `same_value`: Unicode is written in ASCII and LaTeX, delimiters are taken off,
words and choices are compared, then numbers. The rest are expressions, which `math-verify` compares in a process of its
own: this file, run as a script.
"""

import atexit
import json
import logging
import os
import re
import select
import signal
import subprocess
import sys
import threading
import unicodedata
from dataclasses import replace
from fractions import Fraction
from functools import partial
from importlib.util import find_spec

BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
BOX = re.compile(r"\\(?:boxed|fbox)\s*\{((?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})*)\}")
# "\boxed 5": up to a space, a dollar sign or the end of a sentence.
BARE_BOX = re.compile(
    r"\\(?:boxed|fbox)(?![A-Za-z])\s{0,9}(?!\s*\{)"
    r"((?:\\(?!boxed|fbox)[A-Za-z]+|\\[$%]|\{[^{}]*\}|[.,](?=[0-9])|[^\s\\{}$.,;:!?])+)"
)


def find_last_boxed(text: str) -> str:
    r"""Return the stripped content of the last closed `\boxed{...}`, of nested ones the innermost, or ""."""
    text = BARE_BOX.sub(r"\\boxed{\1}", text)
    begins, last_begin, content = [], -1, ""
    for match in BRACE.finditer(text):
        if match[0] == "{" or match[0].startswith((r"\boxed", r"\fbox")):
            begins.append(match.end() if match[0] != "{" else -1)
        elif match[0] == "}" and begins and (begin := begins.pop()) > last_begin:
            last_begin, content = begin, text[begin : match.start()].strip()
    return content


# Signs of Unicode's own: first those that are ASCII in all texts, then also those that are LaTeX.
ASCII = str.maketrans("−–—‒‑‐⁄∕∗、。’", "------//*,.'") | {0xFF01 + i: 0x21 + i for i in range(94)}
ASCII |= {ord(sign): " " + unicodedata.normalize("NFKC", sign).translate(ASCII) for sign in "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}
SIGNS = r"""° ^\circ º ^\circ ˚ ^\circ × \times · \cdot ⋅ \cdot ÷ \div ± \pm ∓ \mp ≤ \leq ⩽ \leq ≥ \geq ⩾ \geq ≠ \neq
    ≈ \approx ∞ \infty ∈ \in ∪ \cup ∩ \cap ∅ \emptyset ∠ \angle α \alpha β \beta γ \gamma θ \theta λ \lambda μ \mu
    π \pi Δ \Delta σ \sigma φ \phi ω \omega"""
LATEX = ASCII | {ord(sign): f"{latex} " for sign, latex in re.findall(r"(\S) (\S+)", SIGNS)}
LATEX |= str.maketrans({"∛": "√[3]", "∜": "√[4]"})
VULGAR = re.compile(r"(?<=[√^/÷⁄∕])\s*[0-9]*[¼-¾⅐-⅞]|[0-9]*[¼-¾⅐-⅞](?=[\w√(])")  # that need brackets
ROOT = re.compile(r"√(\[[34]\])?\s*(?:\(((?:[^()]|\([^()]*\))*)\)|([0-9]+(?:\.[0-9]+)?|[A-Za-z]|\\[a-z]+))")


def write_ascii(text: str) -> str:
    r"""Write Unicode's mathematics in ASCII and LaTeX: "x²" as "x^2", "2√5" as "2\sqrt{5}", "2½" as "2 1/2"."""
    if text.isascii():
        return text
    text = VULGAR.sub(lambda match: f"({match[0].strip()})", text)  # "½x" is not 1/(2x), and "3/½" is 6
    text = re.sub("[¹²³⁰ⁱ⁴-ⁿ]+", r"^{\g<0>}", re.sub("[₀-₎]+", r"_{\g<0>}", text))
    text = re.sub(r"([_^])\{(.)\}", r"\1\2", text)  # \text{ cm^2}
    text = unicodedata.normalize("NFKC", text.translate(LATEX)).translate(ASCII).replace("( ", "(")
    while ROOT.search(text):
        text = ROOT.sub(r"\\sqrt\1{\2\3}", text)
    return text


SYNONYMS = {  # of LaTeX
    r"\\(?:(?:display|text)style|[bB]igg?[lr]?)": "",
    r"\\([lg]e)qslant": r"\\\1q",
    r"\\varnothing": r"\\emptyset",
    r"\\[lr]vert": "|",
    r"(?<=[.0-9])\\(?:bar|dot)": r"\\overline",
    r"\\mathrm\s*\{([ei])\}": r"\1",
    r"(?<=[0-9])\\[,!](?=[0-9]{3}(?![0-9]))": ",",
}
SYNONYMS = {re.compile(rf"{written}(?![A-Za-z])"): latex for written, latex in SYNONYMS.items()}
LONGEST = 1000  # characters; anything longer can only be equal as a string
MATHEMATICS = re.compile(r"[0-9\\^_=<>+*/(\[{|]|\b[A-Za-z] ?- ?[A-Za-z]\b|^- ?[A-Za-z]\b")  # p-q, and not T-shirt
MARKDOWN = re.compile(r"(\*\*|__|[*_`])([^*_`]+)\1")
TEXT = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it)|mbox)\s*\{([^{}]*)\}")
NAME = r"(?:[A-Za-z]|[A-Z]{2})(?:_(?:\w|\{\w{1,3}\}))?(?:\([\w, ]{1,9}\))?"  # x_1, AB, f(2)
VARIABLE = re.compile(rf"{NAME}(?: ?[-+] ?{NAME})*\s*=(?!=)")
DELIMITERS = re.compile(r"\$\$?([^$]*)(?<!\\)\$\$?|\\\(((?:(?!\\[()]).)*)\\\)|\\\[((?:(?!\\[\[\]]).)*)\\\]", re.DOTALL)


PERIOD = re.compile(r"(?<!\\right)(?<=[\w})$\]*`])\.$")
WORDY = re.compile(r"[A-Za-z]{4}|\b(?:or|no)\b|\w \w")  # what names no unknown before "="


def same_value(text: str, gold: str) -> bool:
    """Tell whether two texts are the same words, the same number or, by `math-verify`, the same expression. For a gold
    number, `math-verify` sees only LaTeX and arithmetic: "18 or 20" is wrong for 18. It never sees a gold in plain
    words: as products of letters, "seat" equals "east"."""
    if max(len(text), len(gold)) > LONGEST:
        return False
    text, gold = (" ".join(write_ascii(side).split()) for side in (text, gold))
    for synonym, latex in SYNONYMS.items():
        text, gold = (synonym.sub(latex, side) for side in (text, gold))
    is_latex = "\\" in text
    text, gold = strip_delimiters(text), strip_delimiters(gold)
    if same_words(text, gold):
        return text != ""
    if "=" not in gold and (match := VARIABLE.match(text)) and not name_values(text):
        text = strip_delimiters(text[match.end() :].strip())
    written = text
    number, text, unit = read_value(text)
    # The m of a gold "5 m" may be a variable, if the text has no unit.
    gold_number, gold, gold_unit = read_value(gold, allow_unit=unit != "" or not re.search(" [a-z]$", gold))
    if units_differ(unit, gold_unit):
        return False
    first, *rest = split(text, "=")
    sides = rest if rest and not WORDY.search(first) and is_name(first) else [first, *rest]
    is_computed = is_latex or all(map(ARITHMETIC.fullmatch, sides))
    if gold_number is not None and (number is not None or not is_computed):
        return number == gold_number
    if not (MATHEMATICS.search(gold) and find_spec("math_verify")):
        return False
    text, gold = (IGNORED.sub("", IN_DEGREES.sub(r"\1{\\frac{\2\\pi}{180}}", side)) for side in (text, gold))
    connectives = [set(re.findall(r"\b(?:and|or)\b", side)) for side in (text, gold)]
    if INEQUALITY.search(gold) and all(connectives) and connectives[0] != connectives[1]:
        return False
    text, gold = (AND_OR.sub(" ,", side) for side in (text, gold))
    # A comma may separate thousands or elements: a text has two readings, one that was read as a number has a third.
    readings = [text, THOUSANDS.sub("", text)]
    if WHOLE_NUMBERS.fullmatch(written):
        readings.append(written.replace(",", ", "))
    return any(same_expression(reading, gold) for reading in dict.fromkeys(readings))


def strip_delimiters(text: str) -> str:
    r"""Take the text out of $...$, \(...\), \[...\], \boxed{...}, \text{...}, **...** and `...`, and B out of (B). A
    period at the end, and a unit behind, may follow."""
    text = open_box(PERIOD.sub("", text))
    while match := DELIMITERS.match(text) or MARKDOWN.match(text):
        unit = text[match.end() :].strip()
        if unit and not is_unit(f" {unit}"):
            break
        text = open_box(PERIOD.sub("", f"{match[match.lastindex].strip()} {unit}".strip()))
    if match := TEXT.fullmatch(text):
        text = match[1].strip()
    match = re.fullmatch(r"\(([A-Z])\)", text)
    return match[1] if match else text


def open_box(text: str) -> str:
    r"""Take the answer out of a sentence: "So the length is \boxed{5} cm." is "5 cm". A text stays as it is that has a
    second box, a digit, a formula but "x =", a word such as "or", or more than a unit behind the box."""
    before, *parts = BOX.split(BARE_BOX.sub(r"\\boxed{\1}", text))
    if len(parts) == 2 and (sentence := SENTENCE.fullmatch(before)):
        unit = parts[1].strip(r" .,:;!?$*\)]")
        if not unit or is_unit(" " + unit):
            return f"{sentence[1]}{open_box(parts[0].strip())} {unit}".strip()
    return text


AND = re.compile(r"\s*,\s*(?:and\s+)?|\s+and\s+")
# A letter in what a choice stands for, such as the J of "0.05 J", is none.
ANOTHER_CHOICE = re.compile(
    r"\b[A-Ja-j](?:\)|[.:](?:\s|$))|^\W*(?![AI] [a-z])[A-J]\b"
    r"|(?:\b(?:or|nor|and|not|either|neither|maybe|perhaps)\b|[,;/&|?!])\W{0,9}(?:(?!A [a-z])[A-J]|[b-j](?! [a-z]))\b"
)
GOLD_CHOICE = re.compile(r"\(?([A-J])(?:\)|[.:](?=\\?\s*[-$\\(0-9]))\\?\s.+")  # with what it stands for
# Capitals matter in other golds, which may be names or variables.
ANY_CASE = re.compile(
    "[a-zß-ÿ]{3,}|[A-ZÀ-Þ]?[a-zß-ÿ]+(?: [a-zß-ÿ]+)+|(?i:true|false|yes|no|even|odd|none|both|neither)"
)


def same_words(text: str, gold: str) -> bool:
    """Tell whether a text is the gold, or each of its words or choices: "B,D" for "B, D"."""
    golds = [gold] if MATHEMATICS.search(gold) else AND.split(gold)
    words = AND.split(text) if len(golds) > 1 else [text]
    return len(words) == len(golds) and all(map(same_word, words, golds))


def same_word(text: str, gold: str) -> bool:
    """Tell whether a text is the gold word, as "Even." is "even", or names the gold choice and no other, as "b" and
    "B) 12" name "B"."""
    text, gold = text.removesuffix("."), gold.removesuffix(".")
    if re.fullmatch("[A-Ja-j]", gold):
        text = re.sub(r"\\[ ,]", " ", TEXT.sub(r"\1", text).replace("**", ""))
        match = re.fullmatch(rf"(?:\({gold}\)|[{gold}{gold.lower()}](?=[.:)]|$))(?:[.:)]|\s|$)(.*)", text)
        return bool(match) and not ANOTHER_CHOICE.search(match[1])
    if re.fullmatch("[A-Ja-j]", text) and (match := GOLD_CHOICE.fullmatch(TEXT.sub(r"\1", gold))):
        return text.upper() == match[1]
    return text == gold or bool(ANY_CASE.fullmatch(gold) and text.casefold() == gold.casefold())


# [0-9] and not \d, which matches the digits of every script.
WHOLE = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)"
DECIMAL = rf"(?:{WHOLE}(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{{1,3}})?"
CURRENCY = r"(?:\\?[$€£¥₹¢])"
LATIN, LETTER = "[A-Za-zÀ-ÖØ-öø-ÿ]", "[A-Za-zÀ-ÖØ-öø-ÿ぀-鿿]"
WORDS = rf"{LETTER}+(?:[ /-]{LETTER}+)*"
SQUARED = r"(?:\^[23]|\^\{[23]\})?"
NUMBER = re.compile(
    rf"""(?!.*[$€£¥₹¢].*[ ]mm?\b)  # "$5 m" is millions
    (?P<sign> (?: [-+]?[ ]?{CURRENCY}? | {CURRENCY}[ ]?[-+] ) [ ]? )
    (?: (?P<whole>{WHOLE}) [ ] (?=[0-9]+[ ]?/) )?  (?P<top>{DECIMAL})  (?: [ ]?/[ ]? (?P<bottom>{DECIMAL}) )?
    (?: [ ]? (?P<mark> \\?% | {CURRENCY} | \^(?:\\circ|\{{\\circ\}})[ ]?[CF]? ) )?
    (?P<unit> [ /]?{WORDS}{SQUARED} )?
    \.?""",
    re.VERBOSE,
)
NUMBER_IN_TEXT = re.compile(  # a minus sign behind a word, a digit or a bracket is none
    rf"(?:(?<![\w)\]}}])-)?{CURRENCY}?(?:[0-9]+ (?=[0-9]+/[0-9]))?"
    rf"(?:{WHOLE}(?:\.[0-9]+)?|(?<![\w.])\.[0-9]+)(?:[eE][-+]?[0-9]{{1,3}}(?![0-9]))?(?:/[0-9]+)?"
)
MIXED = re.compile(r"(?<![\w.,}])([0-9]+) ([0-9]+/[0-9]*[1-9][0-9]*)(?![\w.])")
FACTOR = rf"(?:-|(?:-?\()+-?)?{DECIMAL}(?:!|\^(?:[0-9]|\{{-?[0-9]{{1,4}}\}}))?\)*"
ARITHMETIC = re.compile(rf"\s*{FACTOR}(?: ?(?:[-+*/] ?|(?=\()){FACTOR})*\s*")
# A unit is one of these symbols, a word of three letters and more, or a measure word, but none of CHANGES.
UNIT = re.compile(
    rf"[ ][aghlms]|/[dghlms]|[ /-]?{LATIN}{{3,}}|[ /-]?(?i:of|an|at|on|in|us|uk|st|nd|rd|th|km|cm|mm|nm|mi|ft|yd|sq|cu"
    r"|kg|mg|lb|oz|ml|cl|dl|hr|ms|wk|mo|yr|am|pm|kb|mb|gb|tb|kw|hz|pt|qt|ct|cc|tv|cd|pc)"
    r"|[ ]?(?:[个個只隻名位人元円块分秒时時天日周月年岁歳米克斤升吨度张枚支枝条件台辆棵朵颗把杯瓶盒箱袋本页题次间层つ]"
    rf"|小时|[厘毫千][米克升]|公[里斤]|[美欧]元|平方[厘千]?米|立方厘?米){LETTER}*"
)
ANOTHER = r"and|not|nor|neither|never|but|else|instead|rather|otherwise|maybe|perhaps|wrong|incorrect|unless|exclu\w+"
CHANGES = re.compile(
    rf"""  # numbers, shares and multiples; operations; signs and limits; other answers
      (?: zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|fif|eigh|nin|twelf|third|half|halve
        | (?:twen|thir|fou?r|fif|six|seven|eigh|nine)t(?:een|y|ie)|hundred|thousand|dozen )+ (?:s|d|th|ths|ish)?
    | \w*(?:illion|illiard|fold)s?(?:th|ths)?|mil(?:lionen|liarden|lones|hões|hão|ion[ie]?|iard[io]?)|billion(?:en|es)
    | tausend|hundert|dutzend|mio|mrd|lakhs?|crores?|mill?e?|mln|bil|bln|thou|doz|grand|gross|scores?|pairs?
    | quarters?|single|once|twice|thrice|(?:doubl|trebl|tripl|\w+upl)\w{{1,3}}|mega|giga|tera|micro|nano|milli|basis
    | pp[mbt]|bps|infinit[ey]|none|tau|phi|[abcxyz]{{3,}}
    | times|plus|over|into|(?:multipli?|divid|subtract|add|increas|decreas|reduc)(?:y|ed?|ing)?|squared?|cubed?|powers?
    | exponent|mod|modul[ou]s?|roots?|sqrt|factorial|prime|remainder|choose|permute|log|exp|sin|cos|tan|inverse
    | reciprocal|base|binary|octal|hex\w*al|hex|repeating|recurring|periodic
    | minus|negati\w+|negated|opposite|imaginary|less|fewer|lower|off|short|below|under|beneath|above|beyond|loss|debt
    | deficit|least|most|minimum|max(?:imum)?|upwards?|odd|ish|some(?:thing)?|between|about|almost|nearly|approx\w*
    | except|without|versus|tops|roughly|{ANOTHER}
    | \w* (?: 千(?![米克升]) | [半多余餘几幾零一二三四五六七八九十百万萬亿億兆倍折幂之以不]
        | 方(?!厘?千?米) | [左右上下内前后後約约近至或和加减乘除] ) \w*""",
    re.VERBOSE | re.IGNORECASE,
)
OF_UNIT = re.compile(  # where some of those words change nothing
    r"\bsquare (?=\w)|(?<=left) over|\b(units|feet|foot|ft|inches|in|yards|miles|\w*met[er]{2}s|\w?m) (?:squared|cubed)"
)
LATEX_UNIT = re.compile(
    rf"(?<=[0-9A-Za-z}})])(?:(?:\s|\\[,;: ]|~)*{TEXT.pattern}{SQUARED}(?!\s*\^)|[ ]+({LETTER}{WORDS}){SQUARED}$)"
)
# What may stand before a box, and the name of its value, "x = ".
SENTENCE = re.compile(
    rf"(?i)(?!.*\b(?:or|no|minus|negative|plus|times|{ANOTHER})\b)"
    r"(?:\b[^\W\d_]{2,}\b|\b[ai]\b|[\s.,:;!?'*$]|\\[(\[])*((?:[a-z] ?= ?)?)\$?"
)


def is_unit(text: str) -> bool:
    """Tell whether words after a number, with the space before them, cannot change its value: " cups of tea"."""
    text = OF_UNIT.sub(r"\1", text)
    words = re.findall(rf"[ /-]?{LETTER}+", text)
    is_known = all(UNIT.fullmatch(word) and not CHANGES.fullmatch(word.lstrip(" /-")) for word in words)
    return bool(re.fullmatch(rf"[ /]?{WORDS}{SQUARED}", text)) and is_known


def to_number(text: str, allow_unit: bool = True) -> Fraction | None:
    """Return the exact value of a text that is one number and nothing else, or None.

    Numbers: "1,080" "$1,080.00" "-$10" "50%" (is 50) "3/4" "2 1/2" "2½" ".5" "1e3" "18 apples" "$12/hour" "18 = 18.0"
    None: "18 or 20" "7+3=10" "3-4" "1,2,3" "12:30" "3/0" "2x" "2 million" "about 18" "1e1000" (three digits at most)
    """
    return read_number(text, allow_unit)[0]


def read_number(text: str, allow_unit: bool = True) -> tuple[Fraction | None, str]:
    r"""Return the value of `to_number`, and its unit: 12 and "$/hour" of "\$12\text{/hour}"."""
    if len(text) > LONGEST:  # Python refuses integers of more than 4300 digits
        return None, ""
    text = re.sub(r"\\[,;: ]|~", " ", write_ascii(text.replace("{,}", ",")))
    text = " ".join(TEXT.sub(r"\1", text).split())
    values, unit = set(), ""
    for part in text.split("="):
        match = NUMBER.fullmatch(part.strip())
        if not match or (match["unit"] and not (allow_unit and is_unit(match["unit"]))):
            return None, ""
        digits = (match["whole"] or "0", match["top"], match["bottom"] or "1")
        whole, top, bottom = (Fraction(number.replace(",", "")) for number in digits)
        if bottom == 0:
            return None, ""
        value = whole + top / bottom
        values.add(-value if "-" in match["sign"] else value)
        signs = match["sign"].strip(" +-\\") + (match["mark"] or "")
        unit = signs.replace("$$", "") + (match["unit"] or "")  # $5$ is LaTeX
    return (values.pop(), unit) if len(values) == 1 else (None, "")


def read_value(side: str, allow_unit: bool = True) -> tuple[Fraction | None, str, str]:
    r"""Return a side's number or None, its expression and its unit: None, "9\pi " and "cm^2" of "9\pi\text{cm}^2"."""
    number, unit = read_number(side, allow_unit)
    if number is not None:
        return number, side if "%" in side else write_value(number), unit
    found = [match for match in LATEX_UNIT.finditer(side) if is_unit(" " + match[match.lastindex].strip())]
    # A few bare letters after an expression may be variables, unless they are a known unit.
    is_sure = [match[1] is not None or re.search("[A-Za-z]{4}", match[0]) or read_unit(match[0])[0] for match in found]
    found = [match for match, sure in zip(found, is_sure, strict=True) if sure]
    for match in reversed(found):
        side = f"{side[: match.start()]} {side[match.end() :]}"
    side = MIXED.sub(lambda match: write_value(int(match[1]) + Fraction(match[2])), side)
    return None, side, " ".join(dict.fromkeys(TEXT.sub(r"\1", match[0]).strip() for match in found))


# Names of units, each with the other ways to write it.
UNIT_NAMES = """second s sec|minute min|hour h hr|day|week wk|month mo|year yr|metre m meter|centimetre cm centimeter
|millimetre mm millimeter|kilometre km kilometer|inch in inches|foot ft feet|yard yd|mile mi|gram g gm|kilogram kg kilo
|milligram mg|pound lb £|ounce oz|ton tonne|litre l liter|millilitre ml milliliter|gallon gal|cup|quart qt|pint pt|unit
|dollar $ usd buck|cent ct ¢|euro €|rupee ₹|percent|degree °|celsius c|fahrenheit f|radian rad
|kilometre/hour kmh kph|mile/hour mph"""
UNIT_NAMES = {word: names.split()[0] for names in UNIT_NAMES.split("|") for word in names.split()}
NO_UNIT = r"\b(?:of|the|on|at|to|st|nd|rd|th|left|over|total|all|each|more|away|old)\b|\bin |\b[个個]\b"
UNIT_WORD = re.compile(rf"(?:(/|\bper\b|\ban?\b) ?)?((?!{NO_UNIT})\b[^\W\d_]+|[$¢€£₹°])(?:\^\{{?([23]))?")


def units_differ(unit: str, gold_unit: str) -> bool:
    """Tell whether two units are two measures or, in words, share no word: "red apples" and "apples" do. A sign
    contradicts no word: "$5" and "5 apples"."""
    (measure, words), (gold_measure, gold_words) = read_unit(unit), read_unit(gold_unit)
    if measure and gold_measure and measure != gold_measure:
        return True
    return bool(words and gold_words) and words.isdisjoint(gold_words)


def read_unit(unit: str) -> tuple[str, set[str]]:
    """Return a unit's known measures, "mile/hour" for "mph", and its words without the endings of plurals."""
    unit = re.sub(r"\^\{?\\circ\}?", "° ", unit.casefold())
    unit = re.sub(r"\b(?:square|sq) (\w+)|\b(\w+) squared\b", r"\1\2^2", unit)
    unit = re.sub(r"\b(?:cubic|cu) (\w+)|\b(\w+) cubed\b", r"\1\2^3", unit)
    measure, words = "", set()
    for per, word, power in UNIT_WORD.findall(unit):
        name = UNIT_NAMES.get(word) or UNIT_NAMES.get(word.removesuffix("s"))
        full = ("/" if per else "") + (name or word.rstrip("eisyvf") or word) + power
        if name and name not in ("celsius", "fahrenheit"):  # "25°" is less than "25 °C", and not another
            measure += full
        if word.isalpha() and name != "degree":
            words.update(re.findall(r"/?\w+", full))
    return measure, words


EQUALS = re.compile(r"(?<![<>!:=])=(?!=)|\\equiv(?![A-Za-z])")
IGNORED = re.compile(r"\\(?:left|right)(?![A-Za-z])|\{,\}|\\!|\^\s*(?:\\circ|\{\s*\\circ\s*\})$")
INEQUALITY = re.compile(r"[<>]|\\[lg]eq?(?![A-Za-z])")
AND_OR = re.compile(r",?\s*(?:\\text\{\s*(?:and|or)\s*\}|\b(?:and|or)\b)")
THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
SPACES = re.compile(r"\\(?:q?quad(?![A-Za-z])|[,;: ])|~")
WHOLE_NUMBERS = re.compile("[1-9][0-9]*(?:,[1-9][0-9]*)+")
IN_DEGREES = re.compile(  # math-verify computes in radians
    r"(\\(?:sin|cos|tan|cot|sec|csc)(?:\^[0-9]|\^\{[0-9]\})?\s*(?:\\left)?\s*\(?\s*)([0-9]+(?:\.[0-9]+)?)"
    r"\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})"
)
BASE = re.compile(r"[0-9]\s*_\s*\{?\s*([0-9]+)")  # of a numeral
BRACKETS = re.compile(r"(\\\{|[(\[]).*(\\\}|[)\]])", re.DOTALL)
# A power, an index, a function's argument, an environment: no values.
ATTACHED = re.compile(r"[_^]\s*(?:\{[^{}]*\}|\\[A-Za-z]+|.)|(?<=[A-Za-z'])\([^()]*\)|\\(?:begin|end)\{[^{}]*\}")
# math-verify computes these, and passes over others, which a text may have only if the gold has them.
COMPUTED = (
    r"\\(?:[dtc]?frac|sqrt|[dt]?binom|c?dot|times|div|pm|pi|infty|log|ln|exp|(?:arc)?(?:sin|cos|tan)|cot|sec|csc"
    r"|[lg]eq?|in|cup|cap|overline|text|begin|end|[,;:! %${}|])(?![A-Za-z])"
)
PASSED_OVER = re.compile(
    rf"{TEXT.pattern}|(?!{COMPUTED})\\(?:[A-Za-z]+|.)|.\\$|['\"]|==|[^ -~]|[0-9]\s*_"
    r"|(?<![_^])[0-9](?:\s|\\[,;: ]|~)+[0-9]"
)
UNKNOWN = re.compile(
    r"\\(?:var)?(?:alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|rho|sigma|tau|phi|chi|psi"
    r"|omega|ell|Gamma|Delta|Theta|Lambda|Sigma|Phi|Psi|Omega)(?![A-Za-z])|(?<!\\)[A-Za-z]"
)
COMMAND = re.compile(r"\\[A-Za-z]+")


def same_expression(text: str, gold: str) -> bool:
    """Tell whether `math-verify` finds the text's value equal to the gold. The value of "A = B = C" is its last side,
    for each element of a list. `math-verify` would take "1/3 = 1/2" for 1/2: so all sides before must equal the last,
    but those that name the unknown ("x", "|z|")."""
    if BASE.search(text) and BASE.findall(text) != BASE.findall(gold):
        return False
    is_equation, is_gold_equation = (bool(EQUALS.search(side)) for side in (text, gold))
    if is_equation and is_gold_equation and ("'" in text) != ("'" in gold):  # y' = 2x
        return False
    if not is_equation and (named := name_values(gold)):  # math-verify would take a set
        text = text if BRACKETS.fullmatch(text) else f"({text})"
        gold = f"({', '.join(named[name] for name in sorted(named))})"
    chains = []
    if is_equation and not is_gold_equation:
        named = name_values(text)
        if named and named.keys() <= {*"xyz"}:  # of other letters nobody knows the gold's order
            text = ", ".join(f"{name} = {named[name]}" for name in sorted(named))
        chains = [split(element, EQUALS.pattern) for element in split(text, ",")]
        chains = [[*sides, strip_delimiters(value.strip())] for *sides, value in chains]
        text = ", ".join(chain[-1] for chain in chains)
        if EQUALS.search(text):
            return False
    values = [(side, chain[-1]) for chain in chains for side in chain[:-1] if not is_name(side)]
    if any(match[0] not in gold for side, _ in [(text, gold), *values] for match in PASSED_OVER.finditer(side)):
        return False
    return same_shape(text, gold) and all(math_process.equal(*pair) for pair in [(text, gold), *values])


def name_values(side: str) -> dict[str, str]:
    """Return the value of each letter of "x = 1, y = 2"; none for any other text, also "x = 1, x = 2"."""
    side = SPACES.sub(" ", side)
    pairs = [[part.strip() for part in split(element, EQUALS.pattern)] for element in split(side, ",")]
    is_named = len(pairs) > 1 and all(len(pair) == 2 and re.fullmatch("[A-Za-z]", pair[0]) for pair in pairs)
    named = dict(pairs) if is_named else {}
    return named if len(named) == len(pairs) else {}


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
    if to_number(side) is not None or side.lstrip().startswith("-"):
        return False
    side = ATTACHED.sub("", side)
    unknowns = len(UNKNOWN.findall(COMMAND.sub(lambda match: "x" if UNKNOWN.fullmatch(match[0]) else " ", side)))
    return unknowns > 1 or (unknowns == 1 and not re.search("[0-9]", side))


def same_shape(text: str, gold: str) -> bool:
    r"""Tell whether two lists may be equal: as many elements, no \{1,2\} for (1,2). `math-verify` checks neither."""
    text, gold = (re.sub(r"\\[,;! ]|\s", "", side) for side in (text, gold))
    brackets = [BRACKETS.fullmatch(side) for side in (text, gold)]
    if all(brackets) and r"\cup" not in gold and brackets[0].groups() != brackets[1].groups():
        return False
    size, *gold_sizes = (side.count(",") + side.count(r"\pm") for side in (text, gold, THOUSANDS.sub("", gold)))
    return size == 0 or size in gold_sizes


# Before a bracket or a fraction, where math-verify adds as in a mixed number: it would take 4(5) for 9.
GAP, OPENS = r"(?:\s|\\[,;: !])*", r"(?:\\left\s*)?\("
PRODUCT = re.compile(
    rf"(?<![\w.^_])(?<![_^]\{{)(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?={GAP}{OPENS})|\)(?={GAP}(?:{OPENS}|\\[dt]?frac))"
)
LATEX_DECIMAL = re.compile(
    r"(?=\.?[0-9])([0-9]*(?:\.([0-9]*))?)(?:\\overline\s*\{([0-9]+)\})?(?:[eE]([-+]?[0-9]{1,3}))?(\s*\\?%)?"
)


def write_fraction(match: re.Match) -> str:
    r"""Write a decimal as "{\frac{1}{4}}". As floats, `math-verify` would take 0.333333 for 1/3."""
    digits, places, repeated, exponent, percent = match.groups()
    if places is None and (repeated or not exponent):  # a whole number
        return match[0]
    value = Fraction(f"0{digits}")
    if repeated:
        value += Fraction(int(repeated), (10 ** len(repeated) - 1) * 10 ** len(places))
    value *= Fraction(10) ** (int(exponent or 0) - 2 * bool(percent))
    return write_value(value)


def write_value(value: Fraction) -> str:
    return str(value) if value.denominator == 1 else rf"{{\frac{{{value.numerator}}}{{{value.denominator}}}}}"


CPU_SECONDS = 4.0  # not of the clock: what earns a reward must not depend on how busy the machine is


class MathProcess:
    """A process that runs `math-verify`, which finds nothing equal in a thread, and computes 9^{9^9} for ever. A
    question starts it if there is none. It ends with its parent, when its stdin closes, and at a question that takes
    CPU_SECONDS or, if it waits for something else, `deadline` seconds, which means no. A fork of the parent starts one
    of its own."""

    def __init__(self, command: list[str], deadline: float):
        self.command, self.deadline = command, deadline
        self.process: subprocess.Popen | None = None
        self.lock = threading.Lock()
        os.register_at_fork(after_in_child=self.forget)

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

    def forget(self) -> None:
        """Leave the process and the lock to the parent of this fork."""
        self.lock = threading.Lock()
        if self.process is not None:
            nothing = os.open(os.devnull, os.O_RDWR)
            for pipe in (self.process.stdin, self.process.stdout):
                os.dup2(nothing, pipe.fileno(), inheritable=False)
            os.close(nothing)
            self.process.returncode = 0  # it is no child of this one
            self.process = None

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


math_process = MathProcess([sys.executable, "-P", __file__], deadline=120.0)
atexit.register(math_process.stop)


def answer_questions() -> None:
    """Answer each line of JSON [text, gold] on stdin by "true" or "false" on stdout."""
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
    from math_verify import LatexExtractionConfig, grader, parse, parser, verify
    from sympy import Expr, PrecisionExhausted, Rational, UnevaluatedExpr

    config = LatexExtractionConfig()
    config = replace(config, normalization_config=replace(config.normalization_config, units=False))  # 3t is not 3

    def parse_expression(text):
        text = PRODUCT.sub(r"\g<0>\\cdot ", text)
        text = LATEX_DECIMAL.sub(write_fraction, text)
        text = re.sub(r"\\?\$|\\[()\[\]]", "", text)
        return parse(f"${text}$", [config], parsing_timeout=0)  # 0 is none

    def check(are_equal):
        """Let `are_equal` also compare a thousand digits: it takes 1e-15 for 0, and log(1+1e-20) for log(1)."""

        def are_equal_in_size(one, other, *precision):
            if not are_equal(one, other, *precision):
                return False
            if not (isinstance(one, Expr) and isinstance(other, Expr)):
                return True  # a matrix, whose elements were compared
            difference = one - other
            if difference.has(UnevaluatedExpr):
                return True  # a percentage
            values = {symbol: Rational(37 + 2 * i, 41) for i, symbol in enumerate(difference.free_symbols)}
            try:
                return difference.subs(values).evalf(300, maxn=1000, strict=True).is_zero is not False
            except PrecisionExhausted:
                return True

        return are_equal_in_size

    parser.latex2sympy = partial(latex2sympy, conversion_config=ConversionConfig(lowercase_symbols=False))  # R is not r
    grader.sympy_numeric_eq = check(grader.sympy_numeric_eq)
    grader.sympy_symbolic_eq = check(grader.sympy_symbolic_eq)
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
