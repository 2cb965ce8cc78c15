"""OpenAI's SDK: responses with a tool, first as a stream, then as one answer."""

import json

import openai

TOOL = {
    "type": "function",
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}
client = openai.OpenAI()
items = [{"role": "user", "content": "What is 2 and 3?"}]
with client.responses.stream(model="policy", input=items, tools=[TOOL]) as stream:
    kinds = [event.type for event in stream]
    first = stream.get_final_response()
assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
(call,) = first.output
arguments = json.loads(call.arguments)
items += [call, {"type": "function_call_output", "call_id": call.call_id, "output": str(sum(arguments.values()))}]
print(float("5" in client.responses.create(model="policy", input=items, tools=[TOOL]).output_text))
