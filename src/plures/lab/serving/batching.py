"""Predict the images of simultaneous requests in batches, with a run that is loaded once."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from plures.lab.evaluation.predict import Answer
from plures.lab.runs.open import Run
from plures.lab.serving.requests import Limits, Refused

Item = TypeVar("Item")
Reply = TypeVar("Reply")


@dataclass(frozen=True)
class _Waiting(Generic[Item, Reply]):
    item: Item
    answer: asyncio.Future[Reply]


class Batcher(Generic[Item, Reply]):
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
        run: Callable[[Sequence[Item]], Sequence[Reply]],
        limits: Limits,
        told: Callable[[int], None] = lambda size: None,
    ) -> None:
        self.run = run
        self.limits = limits
        self.told = told
        self._queue: asyncio.Queue[_Waiting[Item, Reply]] = asyncio.Queue()
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

    async def ask(self, items: Sequence[Item]) -> list[Reply]:
        """Wait for the answers, or refuse at once where too many wait already."""
        if self.waiting + len(items) > self.limits.queue:
            raise Refused(503, f"{self.waiting} images are already waiting: try again in a moment")
        loop = asyncio.get_running_loop()
        asked = [_Waiting[Item, Reply](item, loop.create_future()) for item in items]
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

    async def _answer(self, batch: list[_Waiting[Item, Reply]]) -> None:
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


@dataclass(frozen=True)
class Row:
    """What the ensemble says of one picture, as class numbers."""

    label: int
    confidence: float
    epistemic: float
    total: float
    votes: list[int]


class Model:
    """Answer batches of prepared pictures with a finished run.

    model = Model(open_run("runs/birds"))
    model.answer_many([pixels])[0].confidence
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.info = run.info
        ensemble = run.ensemble
        self.device = next((parameter.device for parameter in ensemble.parameters()), torch.device("cpu"))
        self.predictor = ensemble.engine()

    def answer_many(self, pictures: Sequence[npt.NDArray[np.uint8]]) -> list[Row]:
        """Answer pictures that are prepared: uint8 [size, size, channels]."""
        inputs = self.info.normalise(torch.from_numpy(np.stack(pictures))).to(self.device)
        found = self.predictor.predict(inputs)
        columns = (found.label, found.confidence, found.epistemic, found.total, found.members.argmax(-1).T)
        return [Row(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]

    def as_json(self, name: str, row: Row, abstain_below: float | None) -> dict[str, Any]:
        """Word an answer as `plures predict --json` does."""
        names = self.info.classes
        undecided = abstain_below is not None and row.confidence < abstain_below
        answer = Answer(
            file=name,
            label=None if undecided else names[row.label],
            confidence=row.confidence,
            epistemic=row.epistemic,
            total=row.total,
            votes=[names[vote] for vote in row.votes],
        )
        return vars(answer)  # asdict copies every value, which takes as long as all the rest
