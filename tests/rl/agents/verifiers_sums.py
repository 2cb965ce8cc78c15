"""A task of verifiers 0.4 with a server of tools, whose agent is one of verifiers' own: its program asks the policy.

python -m tests.rl.agents.verifiers_sums     # which verifiers starts: the server of tools
"""

import os

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: int


class SumTools(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)


class SumTask(vf.Task[SumData]):
    @classmethod
    def toolsets(cls, config):
        return [SumTools(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(str(self.data.answer) in trace.last_reply)


async def main():
    """Run the task once, and print its reward."""
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    config = vf.AgentConfig(
        harness={"id": "null"}, runtime=vf.SubprocessConfig(), model=os.environ["OPENAI_MODEL"], client=client
    )
    trace = await vf.make_agent(config).run(SumTask(SumData(prompt="What is 2 and 3?", answer=5)))
    if trace.errors:
        raise RuntimeError(trace.errors)
    print(trace.reward)


if __name__ == "__main__":
    SumTools.run()
