"""What is shown of a step."""

from grpo.trainer.record import transcript


def test_a_completion_with_answers_is_shown_turn_by_turn():
    call = {"type": "function", "function": {"name": "price", "arguments": {"item": "stylo à bille"}}}
    messages = [
        {"role": "assistant", "content": "I ask.", "tool_calls": [call]},
        {"role": "tool", "name": "price", "content": "7"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "user", "content": "Enough!"},
        {"role": "assistant", "content": "It is 7."},
    ]
    assert transcript({"completion": "drawn", "messages": messages}).splitlines() == [
        "I ask.",
        'price({"item": "stylo à bille"})',
        "[price: 7]",
        'price({"item": "stylo à bille"})',
        "[environment: Enough!]",
        "It is 7.",
    ]
    assert transcript({"completion": "drawn"}) == "drawn"
