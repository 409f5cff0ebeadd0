"""Predict the images of simultaneous requests in batches, with a run that is loaded once."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from plures.answers import Prediction
from plures.calibration import NumberCalibration
from plures.lab.evaluation.evaluate import device_of
from plures.lab.evaluation.predict import Wanted, image_predictions
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

    A batch starts when it is full, or `wait` seconds after its first item. Items of requests that were cancelled are
    left out. `observe` receives the size of every batch.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Item]], Sequence[Reply]],
        limits: Limits,
        observe: Callable[[int], None] = lambda size: None,
    ) -> None:
        self.run = run
        self.limits = limits
        self.observe = observe
        self._queue: asyncio.Queue[_Waiting[Item, Reply]] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1, "plures-network")
        self._task: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """The number of items that wait for the network."""
        return self._queue.qsize()

    def start(self) -> None:
        """Start to collect batches; call it in the event loop that asks."""
        self._task = asyncio.create_task(self._collect())

    async def stop(self) -> None:
        """Answer what is waiting, then stop."""
        await self._queue.join()
        if self._task is not None:
            self._task.cancel()
        self._thread.shutdown()

    async def ask(self, items: Sequence[Item]) -> list[Reply]:
        """Return the answers; raise `Refused` at once if too many items are waiting."""
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
                one.answer.cancel()  # the client has left: leave it out of the next batch

    async def _collect(self) -> None:
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
        self.observe(len(batch))
        loop = asyncio.get_running_loop()
        try:
            answers = await loop.run_in_executor(self._thread, self.run, [one.item for one in batch])
        except Exception as error:  # of the network: these requests fail, the next batch is answered
            for one in batch:
                if not one.answer.done():
                    one.answer.set_exception(error)
            return
        for one, answer in zip(batch, answers, strict=True):
            if not one.answer.done():
                one.answer.set_result(answer)


class Model:
    """Predict batches of prepared images with a finished run.

    model = Model(open_run("runs/birds"))
    model.answers(["wren.png"], model.probabilities([pixels]), Wanted())[0]["label"]
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.info = run.info
        self.device = device_of(run.ensemble)
        self.predictor = run.ensemble.engine()

    def probabilities(self, images: Sequence[npt.NDArray[np.uint8]]) -> list[Tensor]:
        """Return the members' probabilities, [members, classes], for each image, uint8 [size, size, channels]."""
        inputs = self.info.normalise(torch.from_numpy(np.stack(images))).to(self.device)
        return list(self.predictor.predict(inputs).members.cpu().unbind(1))

    def answers(self, names: Sequence[str], rows: Sequence[Tensor], wanted: Wanted) -> list[dict[str, Any]]:
        """Return answers in the format of `plures predict --json`."""
        if not rows:
            return []
        calibration = self.predictor.calibration
        assert not isinstance(calibration, NumberCalibration)  # networks for images classify
        prediction = Prediction.from_members(torch.stack(list(rows), dim=1), wanted.abstain_below, calibration)
        found = image_predictions(prediction, names, self.info.classes, wanted)
        return [vars(one) for one in found]  # asdict copies every value, which takes as long as all the rest
