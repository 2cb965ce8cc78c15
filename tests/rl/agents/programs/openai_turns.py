"""OpenAI's SDK: two turns of a conversation without tools."""

import openai

client = openai.OpenAI()
messages = [{"role": "user", "content": "What is 2 and 3?"}]
for question in ("Are you sure?", ""):
    answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=40).choices[0].message
    messages += [answer, {"role": "user", "content": question}]
print(1.0)
