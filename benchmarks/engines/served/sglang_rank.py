"""One rank of SGLang, as a node of its own: python -m benchmarks.engines.served.sglang_rank JOB.

JOB is a JSON file. Ranks are nodes with one rank each (``--nnodes``), so that each has its own
environment: a GPU of its own, or one that it shares as NCCL's rank of another host.

Rank 0 serves the rounds. A round asks for the log-probability of each token of given texts, in one
prefill, and then decodes a greedy answer to each prompt. It writes ``OUT/answers.npz``: log-
probabilities of the given tokens [N, T], decoded tokens [N, D] and their log-probabilities [N, D].
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engines.served.load import Load


def options_of(job: dict[str, Any]) -> dict[str, Any]:
    """Options of the engine."""
    ranks, rank = job["ranks"], job["rank"]
    options: dict[str, Any] = {
        "model_path": job["model"],
        "skip_tokenizer_init": True,
        "dtype": job["dtype"],
        "tp_size": ranks,
        "ep_size": ranks,
        "port": job["port"] + 20 * (rank + 1),
        "max_total_tokens": 32768,
        "max_running_requests": 64,
        "chunked_prefill_size": 4096,
        "context_length": 1024,
        "disable_radix_cache": True,
        "disable_custom_all_reduce": True,
        "random_seed": 0,
        "expert_distribution_recorder_mode": "stat",
        "expert_distribution_recorder_buffer_size": job["interval"],
        "watchdog_timeout": 600,
        "log_level": "info",
        "sampling_backend": "pytorch",
        "disable_cuda_graph": not job["graphs"],
    }
    if job["device"] == "cuda":
        options |= {
            "attention_backend": "triton",
            "moe_runner_backend": "triton",
            "mem_fraction_static": 0.5,
            "cuda_graph_max_bs_decode": 64,
            "disable_prefill_cuda_graph": True,
        }
    else:
        options |= {"device": "cpu", "attention_backend": "torch_native"}
    if ranks > 1:
        address = f"127.0.0.1:{job['port']}"
        options |= {"nnodes": ranks, "node_rank": rank, "dist_init_addr": address}
    if job["mode"] != "none":
        options |= {
            "enable_eplb": True,
            "ep_num_redundant_experts": job["redundant"],
            "eplb_rebalance_num_iterations": job["interval"],
        }
    return options | job.get("options", {})


def serve_round(engine: Any, load: Load, numbers: list[int], decoded: int) -> list[Any]:
    """Log-probabilities of the texts, then tokens of the answers and their log-probabilities."""
    texts = [load.tokens_of(number) for number in numbers]
    given = engine.generate(
        input_ids=[prompt + answer for prompt, answer in texts],
        sampling_params={"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
        return_logprob=True,
        logprob_start_len=0,
    )
    answers = engine.generate(
        input_ids=[prompt for prompt, _ in texts],
        sampling_params={"temperature": 0, "max_new_tokens": decoded, "ignore_eos": True},
        return_logprob=True,
    )
    logs = [[told[0] for told in one["meta_info"]["input_token_logprobs"][1:]] for one in given]
    made = [one["meta_info"]["output_token_logprobs"] for one in answers]
    return [
        np.array(logs, dtype=np.float32),
        np.array([[told[1] for told in one] for one in made], dtype=np.int64),
        np.array([[told[0] for told in one] for one in made], dtype=np.float32),
    ]


def serve(job: dict[str, Any], engine: Any) -> None:
    """Serve the rounds, and write after each what has come so far."""
    load, out = Load(**job["load"]), Path(job["out"])
    parts: list[list[Any]] = []
    seconds = []
    for turn in range(job["rounds"]):
        begin = time.monotonic()
        parts.append(serve_round(engine, load, load.numbers_of(turn, 0, 1), job["decoded"]))
        seconds.append(time.monotonic() - begin)
        given, tokens, logs = (np.concatenate(part) for part in zip(*parts, strict=True))
        partial = out / "answers.partial.npz"
        np.savez(partial, given=given, tokens=tokens, logs=logs, seconds=np.array(seconds))
        partial.rename(out / "answers.npz")
        print(f"round {turn}: {seconds[-1]:.2f} s", flush=True)


def main() -> None:
    """Serve one job."""
    job = json.loads(Path(sys.argv[1]).read_text())
    import sglang

    begin = time.monotonic()
    engine = sglang.Engine(**options_of(job))  # a follower waits in here until it is ended
    print(f"the engine is up after {time.monotonic() - begin:.1f} s", flush=True)
    serve(job, engine)
    (Path(job["out"]) / "done").touch()


if __name__ == "__main__":  # the engine spawns processes, which import this file
    main()
