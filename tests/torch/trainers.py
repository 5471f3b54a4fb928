"""Others' trainers over Baton, unchanged: Lightning beside itself over Gloo, and what accelerate ships to test an installation.

accelerate takes Gloo on CPUs, by name: that name stands for Baton here, in memory. Its other scripts need a GPU, or hang over Gloo.
"""
import os
import runpy
import socket
import subprocess
import sys
import tempfile

import baton.torch  # noqa: F401
import torch
import torch.distributed as dist

RANKS = 2
SCRIPTS = ("test_sync", "test_script")


def lightning(backend):
    """Prints what the model is after a few steps."""
    from pytorch_lightning import Trainer, seed_everything
    from pytorch_lightning.demos.boring_classes import BoringModel
    from pytorch_lightning.strategies import DDPStrategy

    seed_everything(1)
    model = BoringModel()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(accelerator="cpu", devices=RANKS, strategy=DDPStrategy(process_group_backend=backend), max_epochs=2,
                          limit_train_batches=8, limit_val_batches=2, logger=False, enable_progress_bar=False,
                          enable_model_summary=False, default_root_dir=folder)
        trainer.fit(model)
        trainer.test(model, verbose=False)
        assert dist.get_backend() == backend, dist.get_backend()
        print("sum", sum(part.double().sum().item() for part in model.parameters()))


def accelerate(script):
    begin, begun = dist.init_process_group, []

    def over_baton(backend=None, **how):
        begin("baton" if backend == "gloo" else backend, **how)
        begun.append(dist.get_backend())

    dist.init_process_group = over_baton
    sys.argv = [script]
    runpy.run_module(f"accelerate.test_utils.scripts.{script}", run_name="__main__")
    assert begun and set(begun) == {"baton"}, begun


def ranks_of(*arguments):
    """Runs this file as all ranks; returns what rank 0 printed. Exits if one failed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    shared = {**os.environ, "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true", "PYTHONWARNINGS": "ignore"}
    processes = [subprocess.Popen([sys.executable, __file__, *arguments], env={**shared, "RANK": rank, "LOCAL_RANK": rank},
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                 for rank in map(str, range(RANKS))]
    said = [process.communicate(timeout=600)[0] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit("\n".join([f"FAILED  {' '.join(arguments)}", *said]))
    return said[0]


def main():
    sums = [line for backend in ("baton", "gloo") for line in ranks_of("lightning", backend).splitlines()
            if line.startswith("sum ")]
    assert len(sums) == 2 and sums[0] == sums[1], sums
    print("ok      Lightning: DDP trains to the same bits as over Gloo", flush=True)
    for script in SCRIPTS:
        ranks_of("accelerate", script)
        print(f"ok      accelerate: {script}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"lightning": lightning, "accelerate": accelerate}[sys.argv[1]](sys.argv[2]) if len(sys.argv) > 1 else main()
