"""pydantic-ai: an agent with a tool over OpenAI's chat completions, and one over Anthropic's messages."""

from pydantic_ai import Agent

found = []
for model in ("openai-chat:policy", "anthropic:policy"):
    agent = Agent(model, system_prompt="Use the tool.")

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    found.append(agent.run_sync("What is 2 and 3?").output)
print(float(all("5" in text for text in found)))
