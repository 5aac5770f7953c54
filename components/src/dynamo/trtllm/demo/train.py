"""Trains a demo model from nothing and evaluates it.

    python -m dynamo.trtllm.demo.train --out DIR [--audio] [--steps N] [--max-minutes M] [--device cuda]
    python -m dynamo.trtllm.demo.train --evaluate DIR [--device cuda] [--report FILE]

It can also be started by its path. DIR becomes a complete Hugging Face directory; a `tokenizer.json` that is
already there is kept. The rate and the curriculum follow the progress, which is the larger of steps taken /
steps and minutes taken / minutes; a training that starts from a model's weights gets dialogues as they are at
the curriculum's end.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[3])
    __package__ = "dynamo.trtllm.demo"

import torch
from safetensors.torch import load_file, save
from tokenizers import Tokenizer

from dynamo.trtllm.demo.evaluation import as_json
from dynamo.trtllm.demo.recipes import AUDIO, PICTURES, Recipe, recipe_of

_WARM_UP = 0.02
_LOG_EVERY = 50
_SAVE_EVERY_S = 60


def parse_arguments() -> argparse.Namespace:
    """The command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--out", type=Path, help="train, and write the model here")
    target.add_argument("--evaluate", type=Path, help="evaluate the model in this directory, train nothing")
    parser.add_argument("--audio", action="store_true", help="train the model that describes sounds")
    parser.add_argument("--steps", type=int, default=12_000)
    parser.add_argument(
        "--max-minutes", type=float, default=math.inf, help="finish in this time, whatever the steps"
    )
    parser.add_argument("--rows", type=int, default=96, help="dialogues in a batch")
    parser.add_argument("--rate", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--workers", type=int, default=max(0, (os.cpu_count() or 1) - 1), help="processes that draw"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--start", type=Path, help="go on from the weights of the model in this directory")
    parser.add_argument(
        "--pause-after-minutes", type=float, default=math.inf, help="write the checkpoint then, and stop"
    )
    parser.add_argument("--checkpoint", type=Path, help="written every minute; read first if it is there")
    parser.add_argument(
        "--cases", type=int, default=100, help="held-out cases of each kind; 0: do not evaluate"
    )
    parser.add_argument("--report", type=Path, help="write the evaluation here, with every answer")
    return parser.parse_args()


def main() -> None:
    """Trains and evaluates, or only evaluates, and prints the scores as JSON."""
    arguments = parse_arguments()
    if arguments.out:
        train(arguments)
    if arguments.cases:
        directory = arguments.evaluate or arguments.out
        report = evaluate_directory(directory, arguments.device, arguments.cases, arguments.seed)
        if arguments.report:
            arguments.report.write_text(json.dumps(report, indent=1), encoding="utf-8")
        print(json.dumps(_without_answers(report), indent=1))


def train(arguments: argparse.Namespace) -> None:
    """Trains from nothing, or from the checkpoint, and writes the model directory and the loss curve."""
    torch.manual_seed(arguments.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    out: Path = arguments.out
    recipe = AUDIO if arguments.audio else PICTURES
    tokenizer = _tokenizer(recipe, out, arguments.seed)
    model = recipe.new_model(out, arguments.start).to(arguments.device).train()
    run = _Run(recipe, model, tokenizer, arguments)
    for progress in run.steps():
        run.train_step(progress)
    if not run.is_complete:
        run.save()
        sys.exit()
    torch.backends.cuda.matmul.allow_tf32 = False
    save_weights(recipe, model, out)
    run.save()
    _plot(run.history, out)


class _Run:
    """The state of one training: optimiser, data, clock and history. `history` rows are (step, loss,
    accuracy)."""

    def __init__(
        self, recipe: Recipe, model: Any, tokenizer: Tokenizer, arguments: argparse.Namespace
    ) -> None:
        self._recipe, self._model, self._arguments = recipe, model, arguments
        self._device = torch.device(arguments.device)
        self._optimizer = _optimizer(model, arguments.rate)
        self.history: list[tuple[int, float, float]] = []
        self._step, self._minutes_before = 0, 0.0
        if arguments.checkpoint and arguments.checkpoint.exists():
            self._restore(arguments.checkpoint)
        self._progress: Synchronized[float] = multiprocessing.Value("d", self._step / arguments.steps)
        dataset = recipe.batches(tokenizer, arguments.rows, arguments.steps, arguments.seed, self._progress)
        self._data = _loader(dataset, self._step, arguments)
        self._started = self._saved = self._logged = time.monotonic()
        self._sums = torch.zeros(3, device=self._device)
        self._waited_s = 0.0

    def steps(self) -> Iterator[float]:
        """The progress (0..1) at the start of every step until the end or the pause; the drawing processes
        see it too."""
        pause_at = self._started + self._arguments.pause_after_minutes * 60
        while not self.is_complete and time.monotonic() < pause_at:
            progress = self._done()
            self._progress.value = 1.0 if self._arguments.start else progress
            yield progress

    @property
    def is_complete(self) -> bool:
        """Whether nothing of the training is left, in this call or a later one."""
        return self._done() >= 1.0

    def _done(self) -> float:
        done: float = max(self._step / self._arguments.steps, self._minutes() / self._arguments.max_minutes)
        return done

    def train_step(self, progress: float) -> None:
        """One batch: forward, backward, update; logs and saves now and then."""
        started = time.monotonic()
        batch = next(self._data).to(self._device)
        self._waited_s += time.monotonic() - started
        rate = self._arguments.rate * rate_factor(progress)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        loss, accuracy = self._recipe.losses(self._model, batch)
        self._optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0, foreach=True)
        self._optimizer.step()
        self._sums += torch.stack([loss.detach(), accuracy, torch.ones_like(accuracy)])
        self._step += 1
        if self._step % _LOG_EVERY == 0:
            self._log(progress, rate)
        if time.monotonic() - self._saved > _SAVE_EVERY_S:
            self.save()

    def _minutes(self) -> float:
        return self._minutes_before + (time.monotonic() - self._started) / 60

    def _log(self, progress: float, rate: float) -> None:
        loss, accuracy, count = self._sums.tolist()
        loss, accuracy = loss / count, accuracy / count
        self._sums.zero_()
        self.history.append((self._step, loss, accuracy))
        passed_s = time.monotonic() - self._logged
        self._logged += passed_s
        left_s = self._minutes() * 60 * (1 - progress) / max(progress, 1e-6)
        print(
            f"step {self._step} loss {loss:.5f} right {accuracy:.4f} rate {rate:.2e} "
            f"{count / passed_s:.1f} steps/s ({self._waited_s / passed_s:.0%} waiting for data) "
            f"done {progress:.1%} left {left_s:.0f} s",
            flush=True,
        )
        self._waited_s = 0.0

    def save(self) -> None:
        """Writes the checkpoint, if one was asked for, so that it is either the old one or the new one at any
        time."""
        path: Path | None = self._arguments.checkpoint
        if path is None:
            return
        self._saved = time.monotonic()
        state = {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "step": self._step,
            "minutes": self._minutes(),
            "history": self.history,
        }
        torch.save(state, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)

    def _restore(self, path: Path) -> None:
        state = torch.load(path, map_location=self._device, weights_only=True)
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._step, self._minutes_before = state["step"], state["minutes"]
        self.history = [tuple(row) for row in state["history"]]


def rate_factor(progress: float) -> float:
    """The learning rate as a share of the highest: a linear warm-up, then half a cosine down to zero."""
    if progress < _WARM_UP:
        return (progress + 1e-4) / _WARM_UP
    return 0.5 * (1 + math.cos(math.pi * (progress - _WARM_UP) / (1 - _WARM_UP)))


def save_weights(recipe: Recipe, model: Any, directory: Path) -> None:
    """Writes `model.safetensors` in float32 under the names of the published checkpoints."""
    tensors = {
        published: tensor.float().cpu().contiguous()
        for name, tensor in model.state_dict().items()
        if (published := recipe.published_name(name)) is not None
    }
    content = save(tensors, metadata={"format": "pt"})
    if len(content) > recipe.max_weights_bytes:
        raise ValueError(f"the weights take {len(content)} bytes, more than {recipe.max_weights_bytes}")
    (directory / "model.safetensors").write_bytes(content)


def evaluate_directory(directory: Path, device: str, cases: int, seed: int) -> dict[str, Any]:
    """The scores on the CPU and, if `device` is another one, there too, with the number of answers that
    differ."""
    result: dict[str, Any] = {
        "parameters": sum(tensor.numel() for tensor in load_file(directory / "model.safetensors").values()),
        "weights_bytes": (directory / "model.safetensors").stat().st_size,
    }
    for place in dict.fromkeys((device, "cpu")):
        started = time.monotonic()
        scores = recipe_of(directory).scores(directory, place, cases, seed)
        result[place] = {"seconds": round(time.monotonic() - started, 1), "scores": as_json(scores)}
    if device != "cpu":
        result["answers_that_differ"] = sum(
            mine != other
            for kind, score in result[device]["scores"].items()
            for mine, other in zip(score["answers"], result["cpu"]["scores"][kind]["answers"], strict=True)
        )
    return result


def _without_answers(report: dict[str, Any]) -> dict[str, Any]:
    """The report as it is printed: of every score the numbers and the mistakes."""
    return {
        key: _without_answers(value) if isinstance(value, dict) else value
        for key, value in report.items()
        if key != "answers"
    }


def _tokenizer(recipe: Recipe, out: Path, seed: int) -> Tokenizer:
    """The tokenizer in `out`, or a new one; every other file of the directory but the weights is written
    anew."""
    path = out / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path)) if path.exists() else recipe.new_tokenizer(seed)
    recipe.write_artifacts(out, tokenizer)
    return tokenizer


def _optimizer(model: Any, rate: float) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.01},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=True)


def _loader(dataset: Any, first: int, arguments: argparse.Namespace) -> Iterator[Any]:
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_size=None,
        sampler=range(first, len(dataset)),
        num_workers=arguments.workers,
        prefetch_factor=3 if arguments.workers else None,
        pin_memory=arguments.device != "cpu",
        worker_init_fn=_one_thread,
    )
    return iter(loader)


def _one_thread(_worker: int) -> None:
    torch.set_num_threads(1)


def _plot(history: list[tuple[int, float, float]], out: Path) -> None:
    """Writes the loss curve as `loss.png` beside the directory's other files, if matplotlib is there."""
    try:
        from matplotlib import pyplot
    except ImportError:
        return
    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.semilogy([row[0] for row in history], [row[1] for row in history])
    axes.set(xlabel="step", ylabel="loss", title="demo model")
    figure.savefig(out / "loss.png", dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
