"""Runs an agent in the rollout process, where its episode asks that of the trainer, see `agents.agent.within`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from posttrain.core.errors import require
from posttrain.rl.rewards import background, process

ASKED = ("generate", "reward", "read")
"""The functions of the trainer's episode that one in the process calls."""


class RemoteEpisode:
    """Stands for the trainer's `posttrain.rl.agents.agent.Episode`, whose functions it calls; `read` gets an attribute
    of it.
    """

    def __init__(
        self, model: str, generate: Callable[..., Any], reward: Callable[[float], None], read: Callable[[str], Any]
    ) -> None:
        self.model, self.generate, self.reward, self._read = model, generate, reward, read

    def __getattr__(self, name: str) -> Any:
        if name not in ("base_url", "anthropic_base_url", "api_key"):
            raise AttributeError(f"An episode in the rollout process has no {name!r}.")
        return self._read(name)

    def client(self, **options: Any) -> Any:
        openai = require("openai", "openai", "episode.client()")
        return openai.AsyncOpenAI(base_url=self.base_url, api_key=self.api_key, **options)


async def called(run: Callable[..., Any], episode: Any, row: dict[str, Any]) -> Any:
    """What an agent, an async function or a plain one, returns."""
    is_async = background.is_async(run)
    return await background.outcome(run(episode, row) if is_async else background.awaited(run, episode, row))


class AgentThere:
    """The agent `run`, of row, model and the functions `ASKED`, as it is called in the process."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run, self.__name__ = run, background.name_of(run)

    async def __call__(self, row: dict[str, Any], model: str, **asked: Callable[..., Any]) -> Any:
        return await called(self.run, RemoteEpisode(model, **asked), row)


class RemoteAgent:
    """Stands for the agent `run`, which runs in the process, for so many seconds here. After some more it is
    interrupted there, or the process is ended.
    """

    def __init__(self, run: Callable[..., Any], there: process.RolloutProcess, seconds: float | None) -> None:
        limit = None if seconds is None else seconds + process.GRACE
        self.run, self.__name__ = there.function(AgentThere(run), limit, ASKED), background.name_of(run)

    async def __call__(self, episode: Any, row: dict[str, Any]) -> Any:
        read = partial(getattr, episode)
        return await self.run(row, episode.model, generate=episode.generate, reward=episode.reward, read=read)
