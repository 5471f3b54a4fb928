"""A checkpoint that any number of ranks reads: torchrun --nproc-per-node 4 examples/torch/checkpoint.py save FOLDER,
then torchrun --nproc-per-node 2 examples/torch/checkpoint.py load FOLDER"""
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import baton.torch  # noqa: F401  registers the backend

what, folder = sys.argv[1:]
dist.init_process_group("baton")
torch.manual_seed(0 if what == "save" else dist.get_rank())
net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))

state = {"net": net.state_dict()}
if what == "save":
    checkpoint.save(state, checkpoint_id=folder)
else:
    checkpoint.load(state, checkpoint_id=folder)
    net.load_state_dict(state["net"])

total = sum(parameter.full_tensor().sum().item() for parameter in net.parameters())
if dist.get_rank() == 0:
    print(f"{what} at {dist.get_world_size()} ranks: the parameters sum to {total:.6f}")
dist.destroy_process_group()
