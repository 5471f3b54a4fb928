"""FSDP2 over Baton: torchrun --nproc-per-node 2 examples/torch/fsdp.py"""
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import baton.torch  # noqa: F401  registers the backend

dist.init_process_group("baton")
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (size,))

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
for layer in net:
    fully_shard(layer, mesh=mesh)  # a rank keeps its part of each parameter; a layer is gathered when it runs
fully_shard(net, mesh=mesh)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
torch.manual_seed(rank)
inputs = torch.randn(256, 16)
target = inputs.sum(1, keepdim=True)

for step in range(50):
    loss = (net(inputs) - target).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

if rank == 0:
    print(f"loss of rank 0 of {size} after 50 steps: {loss.item():.3f}")
dist.destroy_process_group()
