"""Training over Baton beside the same over Gloo: equal losses, to the last digit at two ranks, of DDP (and its hooks), FSDP2, tensor parallel,
a pipeline in 1F1B order, ZeRO's optimizer, and checkpoints that another number of ranks reads."""
import math
import os
import tempfile

import torch
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import ranks
from ranks import run

WIDTH, STEPS = 32, 4


def model(layers=4):
    torch.manual_seed(1)
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())))


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(8, WIDTH, generator=generator)


def train(net, optimizer, rank):
    losses = []
    for step in range(STEPS):
        loss = net(batch(rank, step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def ddp(rank, size, hook):
    net = DistributedDataParallel(model(), bucket_cap_mb=0.01)
    if hook:
        net.register_comm_hook(None, getattr(default_hooks, hook))
    return train(net, torch.optim.SGD(net.parameters(), lr=0.1), rank)


def zero(rank, size):
    net = DistributedDataParallel(model())
    return train(net, ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=0.01), rank)


def sharded(size):
    net = model()
    mesh = init_device_mesh("cpu", (size,))
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def fsdp(rank, size, folder=None):
    net = sharded(size)
    losses = train(net, torch.optim.AdamW(net.parameters(), lr=0.01), rank)
    if folder:
        checkpoint.save({"net": net.state_dict()}, checkpoint_id=folder)
    return losses


def loaded(rank, size, folder):
    net = sharded(size)
    state = {"net": net.state_dict()}
    checkpoint.load(state, checkpoint_id=folder)
    net.load_state_dict(state["net"])
    return sum(p.full_tensor().double().sum().item() for p in net.parameters())


def tensor_parallel(rank, size):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    parallelize_module(net, init_device_mesh("cpu", (size,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return train(net, torch.optim.SGD(net.parameters(), lr=0.1), 0)


def mesh_of_two(rank, size):
    """FSDP in one dimension, tensor parallel in the other: groups of the same process, in flight together."""
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    parallelize_module(net, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(net, mesh=mesh["data"])
    return train(net, torch.optim.SGD(net.parameters(), lr=0.1), rank // 2)


def pipeline(rank, size):
    layers = list(model(size))
    stage = PipelineStage(nn.Sequential(*layers[2 * rank:2 * rank + 2]), rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=lambda out, target: (out - target).square().mean())
    losses = []
    for step in range(STEPS):
        inputs, target, told = batch(0, step), batch(1, step), []
        if rank == 0:
            schedule.step(inputs)
        elif rank == size - 1:
            schedule.step(target=target, losses=told)
        else:
            schedule.step()
        losses += [loss.item() for loss in told]
    return losses


def both(function, size, *arguments):
    theirs, ours = (run(function, size, *arguments, backend=name, timeout=120) for name in ("gloo", "baton"))
    told = f"{function.__name__} at {size} ranks: {ours} beside Gloo's {theirs}"
    if size == 2:  # sums of two have one order
        assert ours == theirs, told
    for mine, other in zip(ours, theirs):
        assert len(mine) == len(other) and all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(mine, other)), told


# Promise(torch): DDP, FSDP2, tensor parallel, 1F1B pipelines and ZeRO train as over Gloo | losses are equal, to the last digit at two ranks
def test_ddp():
    for size in (2, 4):
        both(ddp, size, None)
    for hook in ("allreduce_hook", "fp16_compress_hook", "bf16_compress_hook"):
        both(ddp, 2, hook)


def test_others():
    for function, sizes in ((zero, [2]), (fsdp, [2, 4]), (tensor_parallel, [2, 4]), (mesh_of_two, [4]), (pipeline, [2, 4])):
        for size in sizes:
            both(function, size)


def test_checkpoint_for_other_ranks():
    with tempfile.TemporaryDirectory() as folder:
        run(fsdp, 4, os.path.join(folder, "x"))
        sums = [run(loaded, size, os.path.join(folder, "x"))[0] for size in (2, 4)]
        assert abs(sums[0] - sums[1]) < 1e-9, sums


if __name__ == "__main__":
    ranks.main(globals())
