"""Anthropic's SDK: its tool runner, which names the conversation by its last answer and sends what is new alone."""

import anthropic


@anthropic.beta_tool
def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return str(a + b)


messages = [{"role": "user", "content": "What is 2 and 3?"}]
ask = {"model": "policy", "max_tokens": 200, "system": "Use the tool.", "tools": [add]}
last = anthropic.Anthropic().beta.messages.tool_runner(messages=messages, **ask).until_done()
print(float("5" in last.content[0].text))
