"""Gather pictures of many requests into batches: a network answers many at once in little more time than one."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from plures.lab.serving.limits import Limits, Refused

Item = TypeVar("Item")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class _Waiting(Generic[Item, Answer]):
    item: Item
    answer: asyncio.Future[Answer]


class Batcher(Generic[Item, Answer]):
    """Answer single items by a function of many; one batch runs at a time, in a thread of its own.

        batcher = Batcher(answer_many, Limits())
        batcher.start()
        answers = await batcher.ask([pixels])
        await batcher.stop()

    A batch starts when it is full, or `wait` seconds after its first item. Items of requests that ended meanwhile are
    left out.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Item]], Sequence[Answer]],
        limits: Limits,
        told: Callable[[int], None] = lambda size: None,
    ) -> None:
        self.run = run
        self.limits = limits
        self.told = told
        self._queue: asyncio.Queue[_Waiting[Item, Answer]] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1, "plures-network")
        self._task: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """How many items wait for the network."""
        return self._queue.qsize()

    def start(self) -> None:
        """Begin to gather; call it in the event loop that asks."""
        self._task = asyncio.create_task(self._gather())

    async def stop(self) -> None:
        """Answer what waits, then end."""
        await self._queue.join()
        if self._task is not None:
            self._task.cancel()
        self._thread.shutdown()

    async def ask(self, items: Sequence[Item]) -> list[Answer]:
        """Wait for the answers, or refuse at once where too many wait already."""
        if self.waiting + len(items) > self.limits.queue:
            raise Refused(503, f"{self.waiting} pictures are waiting already: try again in a moment")
        loop = asyncio.get_running_loop()
        asked = [_Waiting[Item, Answer](item, loop.create_future()) for item in items]
        for one in asked:
            self._queue.put_nowait(one)
        try:
            return list(await asyncio.gather(*(one.answer for one in asked)))
        finally:
            for one in asked:
                one.answer.cancel()  # of a client that left: no batch shall carry it

    async def _gather(self) -> None:
        while True:
            batch = [await self._queue.get()]
            try:
                async with asyncio.timeout(self.limits.wait):
                    while len(batch) < self.limits.batch:
                        batch.append(await self._queue.get())
            except TimeoutError:
                pass
            await self._answer([one for one in batch if not one.answer.done()])
            for _ in batch:
                self._queue.task_done()

    async def _answer(self, batch: list[_Waiting[Item, Answer]]) -> None:
        if not batch:
            return
        self.told(len(batch))
        loop = asyncio.get_running_loop()
        try:
            answers = await loop.run_in_executor(self._thread, self.run, [one.item for one in batch])
        except Exception as error:  # the network's own: those who asked are told, and the next batch is answered
            for one in batch:
                if not one.answer.done():
                    one.answer.set_exception(error)
            return
        for one, answer in zip(batch, answers, strict=True):
            if not one.answer.done():
                one.answer.set_result(answer)
