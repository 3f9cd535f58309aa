"""What tests/messages.py reads from source."""

import pytest
from messages import stable_part, stable_parts


@pytest.mark.parametrize(
    ("message", "part"),
    [
        ("num_generations=…: a group of one has no relative advantage: use 2 or more", "num_generations"),
        ("seed=7: use a number below 3", "seed"),
        ("reward_funcs names …, a file", "reward_funcs"),
        ("… serves …, whose tokenizer is not that of …", "serves"),
        ("…: no such option…; see --help", "no such option"),
        ("out of memory in …: …; …", "out of memory"),
        ("the … could not be saved to …", "could not be"),
        ("…=…: use a finite number", ""),
        ("…: …", ""),
    ],
)
def test_a_message_is_known_by_its_setting_or_its_first_words(message, part):
    assert stable_part(message) == part


def test_the_messages_of_a_file_are_found(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(
        """
class OwnError(ValueError): ...

def work(x, reason):
    require(x > 0, "size", x, "use 1 or more")
    require(x > 0, reason, x, "use 1 or more")
    if x > 2:
        raise OwnError(f"place={x!r}: it is {reason}") from None
    if x > 1:
        raise ProtocolError(HTTPStatus.CONFLICT, f"too_many_{reason}", "words that may change")
    say_once(f"{x} was given" + " up: " + reason)
    log.warning(f"{x} is only in the log")
    raise OwnError(reason)
"""
    )
    assert stable_parts([path]) == {
        "size": "program.py:5",
        "place": "program.py:8",
        "too_many_": "program.py:10",
        "was given up": "program.py:11",
    }
