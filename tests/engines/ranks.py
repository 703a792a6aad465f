"""Program of the ranks of the rank tests: the same optimizer steps on 3, 2 and 1 ranks."""

from pathlib import Path

import torch
from torch import distributed

from flowrl.config import EngineConfig, OptimizerConfig
from flowrl.engines.parallel.rank_mesh import rank_mesh
from flowrl.engines.train.fsdp.engine import FsdpEngine
from tests.engines.losses import LOGPROBS, Bigram, bigram_loss, bigram_outputs
from tests.engines.tables import VOCABULARY, table, take_rows

SPLITS = {
    "three uneven": [[0, 1], [2, 3, 4, 5, 6, 7, 8], [9, 10]],
    "three with an empty one": [[4, 1, 0, 8, 9], [], [2, 3, 10, 7, 6, 5]],
    "two": [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9]],
    "one": [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]],
}
NUM_STEPS = 3


def train(rows: list[int], dtype: torch.dtype, group: distributed.ProcessGroup | None, max_tokens: int) -> dict:
    """Takes three steps on this rank's rows; a fourth step has no trained tokens on any rank."""
    model = Bigram(VOCABULARY, 16).to(dtype)
    optimizer = OptimizerConfig(lr=1e-2, eps=1e-3, weight_decay=0.1, max_grad_norm=0.5)
    engine = FsdpEngine(
        model,
        bigram_outputs,
        optimizer,
        EngineConfig(max_tokens_per_microbatch=max_tokens),
        mesh=rank_mesh(group, device="cpu"),
    )
    reports = []
    for step in range(NUM_STEPS + 1):
        part = take_rows(table(11, seed=step), torch.tensor(rows, dtype=torch.int64))
        if step == NUM_STEPS:
            part["tokens", "response_mask"] = torch.zeros_like(part["tokens", "response_mask"])
        report = engine.update(part, bigram_loss, LOGPROBS)
        reports.append({name: metric.result() for name, metric in report.items() if name != "loss"})
    return {"weights": {n: p.detach() for n, p in model.named_parameters()}, "reports": reports}


def main(rank: int, folder: Path) -> None:
    """Joins two other ranks through a file and writes the results of this rank."""
    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=3)
    groups = {size: distributed.new_group(list(range(size))) for size in (3, 2, 1)}
    results = {}
    for name, split in SPLITS.items():
        if rank < len(split):
            group = groups[len(split)]
            assert isinstance(group, distributed.ProcessGroup)
            for dtype in (torch.float32, torch.float64):
                results[name, dtype] = train(split[rank], dtype, group, max_tokens=20)
    torch.save(results, folder / f"{rank}.pt")
    distributed.destroy_process_group()
