"""OpenAI's SDK: chat completions with a tool, first as one answer, then as a stream."""

import json

import openai

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
client = openai.OpenAI()
messages = [{"role": "user", "content": "What is 2 and 3?"}]
first = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL]).choices[0].message
(call,) = first.tool_calls
arguments = json.loads(call.function.arguments)
answer = {"role": "tool", "tool_call_id": call.id, "content": str(arguments["a"] + arguments["b"])}
stream = client.chat.completions.create(
    model="policy",
    messages=[*messages, first, answer],
    tools=[TOOL],
    stream=True,
    stream_options={"include_usage": True},
)
text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
print(float("5" in text))
