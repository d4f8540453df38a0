"""A checkpoint of DeepSeek-V3's size, opened and checked; experts of it read, against plain reads.

    python -m benchmarks.migration.checkpoints FOLDER [--records 12] [--runs 5]

The 163 weight files of 690 GB are sparse under FOLDER: real headers and index, holes for the data.
Twelve real experts (44 MB each, FP8 with scales) are repacked from the page cache. Figures are
processor time, because the host may be busy with other work.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path

import torch

from eplb.core.model import ModelShape
from runtime import Checkpoint, ExpertSchema, write_random_checkpoint
from runtime.checkpoints.model_config import CONFIG_FILE
from runtime.checkpoints.shards import INDEX_FILE

HIDDEN, INTERMEDIATE, EXPERTS, LAYERS, FIRST_MOE, FILES = 7168, 2048, 256, 61, 3, 163
SIZES = {"F8_E4M3": 1, "BF16": 2, "F32": 4}
CONFIG = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": LAYERS,
    "first_k_dense_replace": FIRST_MOE,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "hidden_size": HIDDEN,
    "moe_intermediate_size": INTERMEDIATE,
}

Named = tuple[str, str, list[int]]  # name, dtype, shape


def tensors() -> Iterator[Named]:
    """Names, types and shapes; the layer of multi-token prediction is the last."""
    for layer in range(LAYERS + 1):
        name = f"model.layers.{layer}"
        yield f"{name}.self_attn.o_proj.weight", "F8_E4M3", [HIDDEN, 16384]
        if layer < FIRST_MOE:
            yield f"{name}.mlp.gate_proj.weight", "F8_E4M3", [18432, HIDDEN]
            continue
        yield f"{name}.mlp.gate.weight", "BF16", [EXPERTS, HIDDEN]
        for expert in range(EXPERTS):
            for part in ("gate", "up", "down"):
                shape = [HIDDEN, INTERMEDIATE] if part == "down" else [INTERMEDIATE, HIDDEN]
                weight = f"{name}.mlp.experts.{expert}.{part}_proj.weight"
                yield weight, "F8_E4M3", shape
                yield f"{weight}_scale_inv", "F32", [size // 128 for size in shape]


def write_sparse(folder: Path) -> int:
    """Write config, index and files with holes; return the number of tensors."""
    everything, shard_of = list(tensors()), dict[str, str]()
    each = -(-len(everything) // FILES)
    for number in range(FILES):
        file = f"model-{number + 1:05d}-of-{FILES:06d}.safetensors"
        header, end = dict[str, object](), 0
        for name, dtype, shape in everything[number * each : (number + 1) * each]:
            start, end = end, end + SIZES[dtype] * prod(shape)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
            shard_of[name] = file
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as shard:
            shard.write(len(text).to_bytes(8, "little") + text)
            shard.truncate(8 + len(text) + end)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": shard_of}))
    (folder / CONFIG_FILE).write_text(json.dumps(CONFIG))
    return len(everything)


def cpu_seconds(run: Callable[[], object]) -> float:
    """Processor time of a call."""
    started = time.process_time()
    run()
    return time.process_time() - started


def largest_memory() -> int:
    """Most memory that this process had at a time, in kB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def rates(folder: Path, num_records: int, num_runs: int) -> Iterator[tuple[str, float]]:
    """GB for each second of processor time: records, and plain reads of as many bytes."""
    schema = ExpertSchema.swiglu_fp8(HIDDEN, INTERMEDIATE)
    model = ModelShape((0,), num_records, 8, hidden=HIDDEN, intermediate=INTERMEDIATE)
    write_random_checkpoint(folder, model, schema, vocabulary=64, seed=1)
    checkpoint = Checkpoint(folder)
    record = torch.zeros(schema.record_bytes, dtype=torch.uint8)
    where = checkpoint.range(0, 0, "gate_proj.weight")
    descriptor = os.open(folder / where.tensor.file, os.O_RDONLY)

    def repack() -> None:
        for expert in range(num_records):
            checkpoint.repack(0, expert, schema, record)

    def plain() -> None:
        for expert in range(num_records):
            os.preadv(descriptor, [record.numpy().data], expert * schema.record_bytes)

    num_bytes = num_records * schema.record_bytes
    for what, run in (("repack", repack), ("plain reads", plain)):
        run()  # the page cache and the record are warm from here on
        yield what, num_bytes / 1e9 / statistics.median(cpu_seconds(run) for _ in range(num_runs))
    os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--records", type=int, default=12)
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    scratch = Path(tempfile.mkdtemp(prefix="checkpoints-", dir=given.folder))
    try:
        (sparse := scratch / "sparse").mkdir()
        num_tensors, before = write_sparse(sparse), largest_memory()
        opened: list[Checkpoint] = []
        opening_s = cpu_seconds(lambda: opened.append(Checkpoint(sparse)))
        (checkpoint,), memory_mb = opened, (largest_memory() - before) / 1024
        shape = checkpoint.model_shape(include_mtp=True)
        schema = ExpertSchema.swiglu_fp8(HIDDEN, INTERMEDIATE)
        checking_s = cpu_seconds(lambda: checkpoint.check(shape, schema))
        print(f"{num_tensors} tensors in {FILES} files, {shape.num_layers} MoE layers, 1 of MTP")
        print(f"open {opening_s:.2f} s, {memory_mb:.0f} MB; check {checking_s:.2f} s")
        for what, rate in rates(scratch / "real", given.records, given.runs):
            print(f"{what} {rate:.1f} GB a second of processor time")
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
