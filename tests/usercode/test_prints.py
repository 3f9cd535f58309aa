"""The limit on what the user's code prints."""

from conftest import run_python

PRINT = """
import sys, threading
from grpo.usercode.prints import PRINTS

class Stream:
    def write(self, text):
        is_printing.set()
        has_ended.wait()
        print(text, end="", file=sys.__stdout__)
        others.extend(object() for _ in range(1000))  # in the memory of what is gone

    def flush(self):
        pass

def call():
    with PRINTS.limited():
        has_begun.set()
        is_printing.wait()
    has_ended.set()

has_begun, is_printing, has_ended = (threading.Event() for _ in range(3))
sys.stdout, others = Stream(), []
threading.Thread(target=call).start()
has_begun.wait()
print("one", "two", "three")
"""


def test_a_print_goes_on_while_a_call_of_another_thread_ends():
    assert run_python("-c", PRINT, check=True).stdout == "one two three\n"
