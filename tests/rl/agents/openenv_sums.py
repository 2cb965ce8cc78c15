"""A session of OpenEnv with two tools, in OpenEnv's own harness and with its own client, which knows host and port."""

import os
from urllib.parse import urlsplit

from openenv.core.env_server.mcp_types import Tool
from openenv.core.harness import HarnessRunLimits, MCPHarnessAdapter, ResourceSession, ToolResult, VerifyResult
from openenv.core.harness.collect import build_model_step
from openenv.core.llm_client import OpenAIClient

NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
OF_TOOLS = {"add": lambda a, b: a + b, "double": lambda a, b=0: 2 * a}


class Sums(ResourceSession):
    reward = 0.0

    def initial_messages(self):
        return [{"role": "user", "content": "What is 2 and 3, twice?"}]

    def list_tools(self):
        return [Tool(name=name, description=f"To {name}.", input_schema=NUMBERS) for name in OF_TOOLS]

    def call_tool(self, name, arguments):
        return ToolResult(OF_TOOLS[name](**arguments))

    def verify(self, transcript, final_state=None):
        return VerifyResult(env_reward=float("10" in transcript[-1]["content"]), done=True)

    def close(self):
        pass


def main():
    """Run one episode, and print its reward."""
    address = urlsplit(os.environ["OPENAI_BASE_URL"])
    key, model = os.environ["OPENAI_API_KEY"], os.environ["OPENAI_MODEL"]
    client = OpenAIClient(f"http://{address.hostname}", address.port, model, key)
    session = Sums()
    done = MCPHarnessAdapter().run_white_box(build_model_step(client), session, HarnessRunLimits(max_turns=4))
    print(session.verify(done.messages).env_reward)


if __name__ == "__main__":
    main()
