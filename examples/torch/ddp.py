"""DDP over Baton: torchrun --nproc-per-node 2 examples/torch/ddp.py"""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import baton.torch  # noqa: F401  registers the backend

dist.init_process_group("baton")  # with CUDA tensors elsewhere: "cpu:baton,cuda:nccl"
rank, size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
net = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1)))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
torch.manual_seed(rank)  # each rank has data of its own
inputs = torch.randn(256, 16)
target = inputs.sum(1, keepdim=True)

for step in range(50):
    loss = (net(inputs) - target).square().mean()
    loss.backward()  # the gradients' sums move while earlier layers are computed
    optimizer.step()
    optimizer.zero_grad()

loss = loss.detach()
dist.all_reduce(loss, dist.ReduceOp.AVG)
if rank == 0:
    print(f"loss of {size} ranks after 50 steps: {loss.item():.3f}")
dist.destroy_process_group()
