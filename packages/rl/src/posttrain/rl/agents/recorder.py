"""Keeps what the policy writes for one agent, token for token.

    request -> tokens (recorded ones, and those of the new messages) -> engine -> turn -> reply

A request goes on with the longest recorded conversation that its own begins with: its tokens stay as they were sampled,
and the tokens of the new messages go behind them. Where the agent has changed its history, a branch begins.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from posttrain.core.data.samplers import mix
from posttrain.core.errors import DataError
from posttrain.lm.text.chat_template import encode_texts
from posttrain.rl.agents.messages import (
    Reply,
    ReplyCall,
    Request,
    RequestError,
    assistant,
    signature,
    with_names,
)
from posttrain.rl.generation.protocol import Sampling
from posttrain.rl.samples.prompts import PromptCodec
from posttrain.rl.tools.protocol import identifier

logger = logging.getLogger(__name__)

REPLIES = itertools.count(1)
ENDED = "This trajectory has ended."
LEAST = -9999.0
"""What agents get for a token with a lower log-probability or none, since JSON has no such numbers."""
FULL = "context_length_exceeded"
"""The code of errors about length, by which agents know them."""


@dataclass(frozen=True)
class Written:
    """A turn of the policy, behind the turn `before` it.

    Attributes:
        asked: the tokens between that turn and this one, or the prompt. ids: of the policy. logps, versions: of each.
        is_exact: see `posttrain.rl.generation.protocol.Completions`. finished: it ended by itself.
        history: the conversation up to and with this turn. num_asked: how much of it is before this turn.
        key: what a request must begin with to go on from here.
        routes: as in `posttrain.rl.generation.protocol.Completions`, of the tokens that the turn before has not read.
    """

    before: Written | None
    asked: list[int]
    ids: list[int]
    logps: list[float] | None
    versions: list[int] | None
    is_exact: bool
    finished: bool
    history: Any
    num_asked: int
    tools: tuple[dict[str, Any], ...]
    key: str | tuple[Any, ...]
    routes: torch.Tensor | None = None

    @property
    def path(self) -> list[Written]:
        """The turns up to this one, from the first."""
        found: list[Written] = []
        turn: Written | None = self
        while turn is not None:  # a trajectory may have more turns than calls may be nested
            found.append(turn)
            turn = turn.before
        return found[::-1]

    @property
    def tokens(self) -> list[int]:
        """Everything that was read and written up to the end of this turn."""
        return [token for turn in self.path for token in (*turn.asked, *turn.ids)]


class Recorder:
    """What the policy has written in one trajectory, and how it answers the next request.

    Args:
        codec: prompts to tokens. generate: ``(ids, sampling, seed)`` -> what the engine has written.
        sampling: how tokens are drawn, and how many a sequence may have behind its prompt.
        context: tokens that the model reads at most; None: any number.
        max_turns: of the policy; None: any number.

    Attributes:
        turns: in the order of their ends.
        cut: which bound has ended the trajectory, "turns", "tokens" or "seconds"; None: none has.
        error: of the engine, which is not the agent's.
    """

    def __init__(
        self,
        codec: PromptCodec,
        generate: Callable[[list[int], Sampling, int], Awaitable[Any]],
        sampling: Sampling,
        seed: int = 0,
        context: int | None = None,
        max_turns: int | None = None,
    ) -> None:
        self.codec, self.generate, self.sampling, self.seed = codec, generate, sampling, seed
        self.context, self.max_turns = context, max_turns
        self.turns: list[Written] = []
        self.cut: str | None = None
        self.error: Exception | None = None
        self._ended, self._begun = False, 0
        self._open: set[asyncio.Future[Any]] = set()
        self._numbers: dict[int, Written] = {}
        self._calls = itertools.count()  # of the trajectory: agents know calls by their ids, also of a history they cut

    async def reply(self, request: Request) -> Reply:
        """The policy's answer to `request`; a RequestError where the trajectory has ended or reached a bound, or the
        chat template refuses the conversation.
        """
        warn_of_ignored(request.ignored)
        if self._ended:
            raise RequestError(ENDED, 410)
        if self.max_turns is not None and self._begun >= self.max_turns and not request.counts:
            self.cut = "turns"
            raise RequestError(f"This trajectory has had its {self.max_turns} turns.", code="max_turns")
        try:
            request = self._whole(request)
            key: Any = _key(request.history)
            before, asked = self._continued(request, key)
        except (DataError, ValueError, TypeError, KeyError, AttributeError) as error:  # it comes as JSON of any kind
            why = str(error) if isinstance(error, (DataError, ValueError)) else f"{type(error).__name__}: {error}"
            raise RequestError(f"The conversation cannot be read: {why}") from error
        ids = [*(before.tokens if before is not None else ()), *asked]
        if request.counts:
            return Reply(next(REPLIES), 0, "", "", (), "stop", len(ids))
        sampling = self._with_room(request, before, asked, len(ids))
        number, self._begun = self._begun, self._begun + 1
        turn = asyncio.ensure_future(self.generate(ids, sampling, mix(self.seed, number) if number else self.seed))
        self._open.add(turn)
        try:
            done = await turn
        except asyncio.CancelledError:
            if not self._ended or (task := asyncio.current_task()) is None or task.cancelling():
                raise
        except Exception as error:
            self.error = error
            raise
        finally:
            self._open.discard(turn)
        if self._ended:
            raise RequestError(ENDED, 410)
        reply = self._read(request, ids, done)
        history: Any = request.history
        if isinstance(history, str):
            more: Any = reply.text
        else:
            more = done.ids if are_ids(history) else [assistant(reply.text, reply.calls, reply.thoughts)]
        num_read = len(ids) - len(asked) - 1 if before is not None else 0
        written = Written(
            before=before,
            asked=asked,
            ids=list(done.ids),
            logps=done.logps,
            versions=done.versions,
            is_exact=done.is_exact,
            finished=reply.finish != "length",
            history=history + more,
            num_asked=len(request.history),
            tools=request.tools,
            key=key + _key(more),
            routes=None if done.routes is None else done.routes[num_read:].clone(),  # without those of the whole text
        )
        self.turns.append(written)
        self._numbers[reply.number] = written
        return reply

    @property
    def is_asking(self) -> bool:
        """Whether the engine is writing a turn of it."""
        return bool(self._open)

    def end(self) -> None:
        """Refuse requests from now on, those among them that are being answered: no one may be there to do it later."""
        self._ended = True
        for turn in self._open:
            turn.cancel()

    def sequences(self) -> list[list[Written]]:
        """The turns of each sequence of the trajectory: first of that which ends with the last turn."""
        before = {id(turn.before) for turn in self.turns}
        leaves = [turn for turn in self.turns if id(turn) not in before]
        return [leaf.path for leaf in [*leaves[-1:], *leaves[:-1]]]

    # ------------------------------------------------------------------------------------------------ what is asked

    def _whole(self, request: Request) -> Request:
        """`request` with the conversation that it refers to, and names of tools in their answers."""
        history: Any = request.history
        tools = request.tools
        if request.previous is not None:
            number = request.previous.rpartition("_")[2]
            earlier = self._numbers.get(int(number)) if number.isdigit() else None
            if earlier is None:
                raise RequestError(f"{request.previous!r} is no answer of this trajectory.", 404, "not_found")
            before, first = earlier.history, int(request.instructed)
            if first and before[0]["role"] == "system":  # instructions stand in place of the former ones
                before = before[1:]
            history = [*history[:first], *before, *history[first:]]
            tools = earlier.tools if request.same_tools else tools
        if not isinstance(history, str) and not are_ids(history):
            history = with_names(history)
        return replace(request, history=history, tools=tools)

    def _continued(self, request: Request, key: Any) -> tuple[Written | None, list[int]]:
        """(the turn that `request` with this `key` goes on from, the tokens behind it)."""
        most = len(self.codec.tokenizer)
        if are_ids(request.history) and not all(type(token) is int and 0 <= token < most for token in request.history):
            raise RequestError(f"prompt holds something other than token ids, which are below {most}.")
        fitting = [
            turn
            for turn in self.turns
            if turn.tools == request.tools and len(turn.key) < len(key) and key[: len(turn.key)] == turn.key
        ]
        before = max(reversed(fitting), key=lambda turn: len(turn.key), default=None)
        if request.tools and request.calls_tools:
            self.codec.protocol(request.tools)  # by which the answer is read
        if before is None:
            first: Any = request.history
            return None, first if are_ids(first) else self.codec.encode(first, list(request.tools) or None)
        more: Any = request.history[len(before.history) :]
        if isinstance(more, str):
            return before, encode_texts(self.codec.tokenizer, [more])[0].ids
        return before, more if are_ids(more) else self.codec.next_ids(before.ids, more, request.tools)

    def _with_room(self, request: Request, before: Written | None, asked: list[int], length: int) -> Sampling:
        """How this turn is drawn, within what is left for its sequence."""
        most, used = self.sampling.max_new_tokens, 0
        if before is not None:
            used = len(asked) + sum(len(turn.asked) + len(turn.ids) for turn in before.path) - len(before.path[0].asked)
        room = most - used if self.context is None else min(most - used, self.context - length)
        if room < 1:
            self.cut = "tokens"
            raise RequestError(
                f"This conversation has {length} tokens, {used} of them behind its first prompt. max_completion_length "
                f"lets it have {most} there, and the model reads {self.context or 'any number'} in all.",
                code=FULL,
            )
        wanted = room if request.max_tokens is None else min(request.max_tokens, room)
        stop = tuple(dict.fromkeys((*self.sampling.stop, *request.stop)))
        return replace(self.sampling, max_new_tokens=max(wanted, 1), stop=stop)

    # ------------------------------------------------------------------------------------------------ what is answered

    def _read(self, request: Request, asked: list[int], done: Any) -> Reply:
        """What the policy has written behind `asked`, as the agent reads it."""
        tokenizer, thoughts = self.codec.tokenizer, ""
        calls: tuple[ReplyCall, ...] = ()
        history: Any = request.history
        if isinstance(history, str) or are_ids(history):
            text = tokenizer.decode(done.ids, skip_special_tokens=True)
        elif request.tools and request.calls_tools:
            turn = self.codec.protocol(request.tools).read(done.ids, request.tools, asked)
            text, thoughts = turn.message.get("content") or "", turn.message.get("reasoning_content") or ""
            calls = tuple(
                ReplyCall(
                    call.id or identifier(next(self._calls)), call.name, json.dumps(call.arguments, ensure_ascii=False)
                )
                for call in turn.calls
                if call.arguments is not None
            )
        else:
            (message,) = self.codec.decode(request.history, done.ids, asked)
            text, thoughts = message.get("content") or "", message.get("reasoning_content") or ""
        place, stop = min(
            ((place, stop) for stop in request.stop if (place := text.find(stop)) >= 0), default=(None, None)
        )
        text = text[:place]
        logged: dict[str, Any] = {}
        if request.wants_logprobs and done.logps is not None:
            logged["tokens"] = tuple(tokenizer.batch_decode([[token] for token in done.ids]))
            logged["logps"] = tuple(logp if logp > LEAST else LEAST for logp in done.logps)
        return Reply(
            number=next(REPLIES),
            created=int(time.time()),
            text=text,
            thoughts=thoughts,
            calls=calls,
            finish="tool_calls" if calls else "stop" if done.finished else "length",
            num_read=len(asked),
            num_written=len(done.ids),
            stop=stop,
            **logged,
        )


def _key(history: Any) -> str | tuple[Any, ...]:
    return (
        history if isinstance(history, str) else tuple(history) if are_ids(history) else tuple(map(signature, history))
    )


def are_ids(history: Any) -> bool:
    """Whether `history` is tokens."""
    return isinstance(history, list) and bool(history) and isinstance(history[0], int)


@functools.cache
def warn_of_ignored(names: tuple[str, ...]) -> None:
    """Log once which arguments of an agent's requests change nothing."""
    if names:
        logger.warning(
            "The agent sets %s, which changes nothing: the policy samples as the trainer's arguments say (temperature, "
            "top_p, ...), and no format of its answers is enforced.",
            ", ".join(names),
        )
