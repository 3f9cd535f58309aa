"""The agent of `make demo-agent`: a program as its user would write it, with the `openai` package and nothing of ours.
It asks the policy, looks up what the policy wants to know in the demo's shops, and asks again."""

import json

from demo.shop import price, stock

FUNCTIONS = {"price": price, "stock": stock}
SHOP = {"type": "object", "properties": {"item": {"type": "string"}, "shop": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"Look up the {name}.", "parameters": SHOP}}
    for name in FUNCTIONS
]


async def solve(task, client):
    """Answer a question of the dataset; return 1.0 if the answer is right."""
    messages = [{"role": "user", "content": task["question"]}]
    for _ in range(3):
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        message = answer.choices[0].message
        if not message.tool_calls:
            return float((message.content or "").strip() == f"<answer>{task['answer']}</answer>")
        messages.append(message)
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": look_up(call.function)})
    return 0.0


def look_up(call):
    try:
        return str(FUNCTIONS[call.name](**json.loads(call.arguments)))
    except (KeyError, TypeError, ValueError, LookupError) as error:  # what the policy wrote may be wrong
        return json.dumps({"error": str(error)})
