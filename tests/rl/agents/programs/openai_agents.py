"""openai-agents: its runner, over responses and over chat completions."""

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


set_tracing_disabled(True)
found = []
for model in ("policy", OpenAIChatCompletionsModel("policy", AsyncOpenAI())):
    agent = Agent(name="Adder", instructions="Use the tool.", tools=[add], model=model)
    found.append(Runner.run_sync(agent, "What is 2 and 3?").final_output)
print(float(all("5" in text for text in found)))
