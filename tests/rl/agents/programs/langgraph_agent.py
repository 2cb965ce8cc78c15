"""langgraph: its ready-made agent with a tool, over OpenAI's chat completions as a stream."""

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


agent = create_react_agent(ChatOpenAI(model="policy", streaming=True), [add])
*_, last = agent.stream({"messages": [("user", "What is 2 and 3?")]}, stream_mode="values")
print(float("5" in last["messages"][-1].content))
