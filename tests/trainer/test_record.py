"""What is shown of a step."""

from grpo.trainer.record import _short, transcript


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


def test_the_numbers_of_the_last_evaluation_are_not_taken_for_the_steps():
    metrics = {"step_time": 3.42, "reward": 0.517, "kl": 0.0123, "tokens_per_second": 1234.0}
    rest = "kl 0.012, 1234 tokens/s"
    assert _short(metrics, {}) == f"3.4 s, reward 0.52, {rest}"
    accuracy = {"eval_accuracy": 0.875, "eval_reward": 1.5}
    assert _short(metrics, accuracy) == f"3.4 s, reward 0.52, held-out 87.5%, {rest}"
    assert _short(metrics, {"eval_reward": 1.5}) == f"3.4 s, reward 0.52, held-out 1.50, {rest}"
