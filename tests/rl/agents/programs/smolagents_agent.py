"""smolagents: an agent that calls tools, the last of which gives its answer."""

import os

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


model = OpenAIModel("policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
agent = ToolCallingAgent(tools=[add], model=model, max_steps=4, verbosity_level=0)
print(float("5" in str(agent.run("What is 2 and 3?"))))
