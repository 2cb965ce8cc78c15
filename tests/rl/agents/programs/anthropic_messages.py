"""Anthropic's SDK: messages with a tool, first as one answer, then as a stream."""

import anthropic

TOOL = {
    "name": "add",
    "description": "Add two numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}
client = anthropic.Anthropic()
messages = [{"role": "user", "content": "What is 2 and 3?"}]
ask = {"model": "policy", "max_tokens": 200, "tools": [TOOL]}
first = client.messages.create(messages=messages, **ask)
(call,) = [block for block in first.content if block.type == "tool_use"]
result = {"type": "tool_result", "tool_use_id": call.id, "content": str(call.input["a"] + call.input["b"])}
messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
with client.messages.stream(messages=messages, **ask) as stream:
    text = "".join(stream.text_stream)
print(float("5" in text))
