"""Checkpoints written by a thread while training goes on: the loop stands still only while the state is copied."""

from __future__ import annotations

import collections
import copy
import threading
from collections.abc import Callable
from typing import Any

import torch


def snapshot(tree: Any, reuse: Any = None) -> Any:
    """A copy of `tree` in host memory that training no longer changes, for `save_tree`.

    Args:
        tree: what `save_tree` takes. Tensors that share memory share it in the copy.
        reuse: an earlier snapshot of the same tree that nothing reads any more. Its memory is written over, which
            spares asking the system for fresh pages and is several times faster.
    """
    copier = _Copier()
    copied = copier.copy(tree, reuse)
    for device in {tensor.device for tensor, _ in copier.copies.values() if tensor.is_cuda}:
        torch.cuda.synchronize(device)  # copies into pinned memory are asynchronous
    return copied


class _Copier:
    def __init__(self) -> None:
        self.copies: dict[tuple, tuple[torch.Tensor, torch.Tensor]] = {}  # view -> (the tensor, its copy)
        self._taken: set[int] = set()

    def copy(self, tree: Any, reuse: Any) -> Any:
        if type(tree) in (torch.Tensor, torch.nn.Parameter):
            view = (tree.data_ptr(), tree.device, tree.dtype, tuple(tree.shape), tree.stride(), tree.is_conj())
            if view not in self.copies or not tree.numel():
                self.copies[view] = (tree, self._copy_tensor(tree.detach(), reuse))
            return self.copies[view][1]
        if type(tree) in (dict, collections.OrderedDict):
            old = reuse if isinstance(reuse, dict) else {}
            return {key: self.copy(item, old.get(key)) for key, item in tree.items()}
        if type(tree) in (list, tuple):
            old = reuse if isinstance(reuse, (list, tuple)) and len(reuse) == len(tree) else [None] * len(tree)
            return type(tree)(self.copy(item, before) for item, before in zip(tree, old, strict=True))
        return copy.copy(tree)  # an array or a Counter; what cannot be saved is refused by save_tree

    def _copy_tensor(self, tensor: torch.Tensor, reuse: Any) -> torch.Tensor:
        fits = type(reuse) is torch.Tensor and reuse.shape == tensor.shape and reuse.dtype == tensor.dtype
        if not fits or reuse.data_ptr() in self._taken:  # two tensors that were one in the earlier snapshot
            reuse = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._taken.add(reuse.data_ptr())
        return reuse.copy_(tensor, non_blocking=tensor.is_cuda)


class AsyncWriter:
    """Runs one job at a time in a thread. What a job raised is raised by the next call.

    The thread is not a daemon: a script that ends while a job runs waits for it.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._result: Any = None

    def submit(self, job: Callable[[], Any]) -> None:
        """Start `job`, after waiting for the one before it.

        Raises:
            Exception: what the job before raised; `job` is not started then.
        """
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(job,), name="checkpoint-writer")
        self._thread.start()

    def wait(self) -> Any:
        """Wait until nothing is being written.

        Returns:
            What the last job returned; None if there was none or it was returned before.

        Raises:
            Exception: what the last job raised, once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, result, self._error, self._result = self._error, self._result, None, None
        if error is not None:
            raise error
        return result

    @property
    def busy(self) -> bool:
        """Whether a job is running; submitting another would wait for it."""
        return self._thread is not None and self._thread.is_alive()

    def _run(self, job: Callable[[], Any]) -> None:
        try:
            self._result = job()
        except BaseException as error:
            self._error = error
