"""OpenAI's SDK: streamed answers, three requests beside each other, one twice, a sub-agent, a shortened history."""

import asyncio

import openai

ask = openai.AsyncOpenAI().chat.completions.create


async def said_to(*messages):
    """The conversation with the policy's next message, which is streamed."""
    text = ""
    async for chunk in await ask(model="policy", messages=messages, max_tokens=40, stream=True):
        text += chunk.choices[0].delta.content or ""
    return [*messages, {"role": "assistant", "content": text}]


def user(text):
    return {"role": "user", "content": text}


async def main():
    told = {"role": "system", "content": "Be short."}
    said = await said_to(told, user("What is 2 and 3?"))
    ways = await asyncio.gather(*(said_to(*said, user(f"Way {number}?")) for number in range(3)))
    for _ in range(2):
        await said_to(*ways[1], user("Twice?"))
    sub = await said_to({"role": "system", "content": "You help."}, user("What is 2 and 3?"))
    await said_to(*sub, user("Are you sure?"))
    await said_to(told, user(f"So far: {ways[1][-1]['content']}"))
    print(1.0)


asyncio.run(main())
