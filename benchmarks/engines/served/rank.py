"""One data-parallel rank of vLLM: python -m benchmarks.engines.served.rank JOB, JOB a JSON file.

Each rank serves its part of each round of the load, and asks for the log-probability of each token
of the answers. Rank 0 says at the start of a round whether there is one: vLLM's ranks make their
forward passes together, so none may leave before the others.

Writes ``OUT/answers.RANK.npz``, ``OUT/steps.RANK.npz`` and ``OUT/rank.RANK.json``.
"""

from __future__ import annotations

import json
import random
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engines.served.incidents import cause_incident
from benchmarks.engines.served.load import Load

WAIT = timedelta(seconds=400)
CHECK_EVERY = 4  # rounds between two looks at the number of changed maps


class Board:
    """What the ranks tell each other between rounds."""

    def __init__(self, job: dict[str, Any]) -> None:
        from torch.distributed import TCPStore

        self.rank, self.ranks = job["rank"], job["ranks"]
        is_first = self.rank == 0
        self._store = TCPStore("127.0.0.1", job["board_port"], self.ranks, is_first, WAIT)

    def decide(self, name: str, choose: Any) -> str:
        """What rank 0 chose under a name; the others wait for it."""
        if self.rank == 0:
            self._store.set(name, choose())
        return str(self._store.get(name).decode())

    def meet(self, name: str) -> None:
        """Wait until all ranks are here."""
        if self._store.add(f"meet-{name}", 1) == self.ranks:
            self._store.set(f"met-{name}", "")
        self._store.wait([f"met-{name}"], WAIT)


def build_engine(job: dict[str, Any]) -> Any:
    """vLLM's engine, as the job asks."""
    from vllm import LLM

    options: dict[str, Any] = {
        "model": job["model"],
        "skip_tokenizer_init": True,
        "dtype": job["dtype"],
        "max_model_len": 1024,
        "max_num_seqs": job["sequences"],
        "max_num_batched_tokens": 4096,
        "enable_prefix_caching": False,
        "disable_log_stats": False,  # times of the first and last token of each answer
        "seed": 0,
        "enforce_eager": not job["graphs"],
        "worker_extension_cls": "benchmarks.engines.served.watch.Watch",
        **job.get("options", {}),
    }
    if job["graphs"]:
        sizes = sorted({1, 2, 4, 8, 16, 32, 64, 96, job["sequences"]})
        options["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [size for size in sizes if size <= job["sequences"]],
        }
    if job["ranks"] > 1:
        options["enable_expert_parallel"] = True
    if job["mode"] != "none":
        options["enable_eplb"] = True
        options["eplb_config"] = {
            "num_redundant_experts": job["redundant"],
            "window_size": job["interval"],
            "step_interval": job["interval"],
            "use_async": job["asynchronous"],
            "communicator": job["communicator"],
        }
    return LLM(**options)


def serve_round(
    engine: Any, load: Load, numbers: list[int], is_forced: bool, is_judged: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """[prompts, tokens] log-probabilities of the answers of these prompts, and their times.

    Times are [prompts, 2] in seconds: until the first token, and of each further token in the mean.
    ``is_forced``: the engine decodes along the answers (vLLM's trace replay, on GPUs). Else it may
    choose no token but the first of the answer, at each step. Without ``is_judged`` all are nan.
    """
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    prompts, settings, answers = [], [], []
    for number in numbers:
        prompt, answer = load.tokens_of(number)
        forced: dict[str, Any] = {"trace_decode_token_ids": answer}
        if not is_forced:
            answer = answer[:1] * len(answer)
            forced = {"allowed_token_ids": answer[:1]}
        prompts.append(TokensPrompt(prompt_token_ids=prompt))
        answers.append(answer)
        settings.append(
            SamplingParams(
                temperature=0,
                max_tokens=len(answer),
                ignore_eos=True,
                detokenize=False,
                logprobs=1 if is_judged else None,
                **forced,
            )
        )
    logs = np.full((len(numbers), load.answer_tokens), np.nan, dtype=np.float32)
    times = np.full((len(numbers), 2), np.nan)
    for row, output in enumerate(engine.generate(prompts, settings, use_tqdm=False)):
        (completion,) = output.outputs
        if list(completion.token_ids) != answers[row]:
            raise ValueError(
                f"prompt {numbers[row]}: the engine decoded {list(completion.token_ids)[:4]}..., "
                f"expected {answers[row][:4]}..."
            )
        for place, choices in enumerate(completion.logprobs if is_judged else ()):
            logs[row, place] = choices[answers[row][place]].logprob
        if (spent := output.metrics) is not None:
            decoded_s = spent.last_token_ts - spent.first_token_ts
            times[row] = spent.first_token_latency, decoded_s / max(1, load.answer_tokens - 1)
    return logs, times


class Rounds:
    """The rounds of one job."""

    def __init__(self, job: dict[str, Any], engine: Any, board: Board) -> None:
        self.job, self.engine, self.board = job, engine, board
        self.load = Load(**job["load"])
        self.numbers: list[int] = []
        self.logs: list[np.ndarray] = []
        self.times: list[np.ndarray] = []
        self.turn_s: list[float] = []  # of each round
        self.began = 0.0
        self.num_changes = 0

    def choose(self, turn: int) -> str:
        """Whether there is a round; rank 0 alone."""
        job = self.job
        if turn == 0:
            while not Path(job["go"]).exists():
                time.sleep(0.05)
            self.began = time.monotonic()
        is_late = time.monotonic() - self.began > job["at_most_s"]
        is_served = turn >= job["rounds"]
        if job["changes"] and turn % CHECK_EVERY == 0:
            (self.num_changes,) = self.engine.collective_rpc("watch_changes")
        is_enough = is_served and self.num_changes >= job["changes"]
        return "stop" if is_late or is_enough else "go"

    def serve(self) -> None:
        """Serve rounds until rank 0 stops them."""
        turn, board = 0, self.board
        while board.decide(f"turn-{turn}", lambda: self.choose(turn)) == "go":  # noqa: B023
            number = turn if self.job["order"] == "forward" else -1 - turn
            numbers = self.load.numbers_of(number, board.rank, board.ranks)
            if self.job["order"] != "forward":
                numbers = numbers[::-1]
            if name := self.job["incidents"].get(str(turn)):
                cause_incident(name, self.engine, board.rank)
                board.meet(f"incident-{turn}")
            began = time.monotonic()
            ways = self.job["forced"], self.job["is_judged"]
            logs, times = serve_round(self.engine, self.load, numbers, *ways)
            self.turn_s.append(time.monotonic() - began)
            self.logs.append(logs)
            self.times.append(times)
            self.numbers += numbers
            turn += 1
        self.num_rounds = turn

    def plant_faults(self) -> list[dict[str, Any]]:
        """Serve a probe with each planted fault, and one without; what was planted."""
        planted, drawn = [], random.Random(self.job["load"]["seed"])
        layers, places = self.engine.collective_rpc("watch_shape")[0]
        rank = self.board.rank
        for number in range(-1, self.job["faults"]):
            victim = drawn.randrange(self.board.ranks)
            layer, place = drawn.randrange(layers), drawn.randrange(places)
            source = (place + 1 + drawn.randrange(places - 1)) % places
            is_mine = number >= 0 and rank == victim
            refused = ""
            if is_mine:
                fault = layer, place, source
                (refused,) = self.engine.collective_rpc("watch_plant", args=fault)
            self.board.meet(f"planted-{number}")
            numbers = self.probe()
            logs, _ = serve_round(self.engine, self.load, numbers, self.job["forced"])
            self.board.meet(f"probed-{number}")
            if is_mine:
                self.engine.collective_rpc("watch_undo")
            slot = {"rank": victim, "layer": layer, "place": place, "source": source}
            probed = {"refused": refused, "numbers": numbers, "logs": logs.tolist()}
            planted.append({"number": number, **slot, **probed})
        return planted

    def probe(self) -> list[int]:
        """Prompts of all topics, this rank's part."""
        load, board = self.load, self.board
        every = max(1, load.num_prompts // self.job["probes"])
        return list(range(board.rank * every, load.num_prompts, every * board.ranks))


def main() -> None:
    """Serve a job, and write what came of it."""
    job = json.loads(Path(sys.argv[1]).read_text())
    out, rank = Path(job["out"]), job["rank"]
    began = time.monotonic()
    board, engine = Board(job), build_engine(job)
    loaded_s = time.monotonic() - began
    board.meet("loaded")
    if rank == 0:
        (out / "ready").write_text("")
    engine.collective_rpc("watch_begin")
    rounds = Rounds(job, engine, board)
    rounds.serve()
    served_s = time.monotonic() - rounds.began if rank == 0 else 0.0
    engine.collective_rpc("watch_write", args=(str(out / f"steps.{rank}.npz"),))
    logs = np.concatenate(rounds.logs) if rounds.logs else np.zeros((0, 0), dtype=np.float32)
    times = np.concatenate(rounds.times) if rounds.times else np.zeros((0, 2))
    np.savez_compressed(
        out / f"answers.{rank}.npz", numbers=np.array(rounds.numbers), logs=logs, times=times
    )
    board.meet("served")
    planted = rounds.plant_faults() if job["faults"] else []
    figures = {
        "rank": rank,
        "rounds": rounds.num_rounds,
        "loaded_s": loaded_s,
        "served_s": served_s,
        "turn_s": rounds.turn_s,
        "planted": planted,
    }
    (out / f"rank.{rank}.json").write_text(json.dumps(figures))
    board.meet("written")
    time.sleep(0.5 if rank else 1.5)  # rank 0 has the board


if __name__ == "__main__":
    main()
