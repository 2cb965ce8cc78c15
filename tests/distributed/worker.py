"""Run by torchrun: trains one of the contract's trainers and writes what it led to."""

import json
import sys
from pathlib import Path

import torch

from tests.contract.trainers import TRAINERS, weights

if __name__ == "__main__":
    torch.set_num_threads(1)
    name, out, changes = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    trainer = TRAINERS[name](out, **changes)
    trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        torch.save(weights(trainer), out / "weights.pt")
        (out / "log.json").write_text(json.dumps({"log": trainer.state.log_history, "eval": metrics}))
    torch.distributed.destroy_process_group()
