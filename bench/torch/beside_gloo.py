"""torch.distributed over Baton beside Gloo, in the same processes and in turns: beside_gloo.py [--ranks N] [--require tcp] [--json FILE]

Each row is measured in rounds, the two taking turns; the figures are medians of the rounds. Times are of the slowest rank.
BATON_TORCH=python measures the backend in Python.
"""
import argparse
import datetime
import json
import os
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import baton.torch

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--ranks", type=int, default=2)
parser.add_argument("--rounds", type=int, default=5, help="turns of each backend")
parser.add_argument("--seconds", type=float, default=0.3, help="of a turn of a call")
parser.add_argument("--require", default="", help="the one provider that Baton may use: shm, tcp, rdma")
parser.add_argument("--json", help="file for the rows")
parser.add_argument("--only", default="", help="rows whose name has this")
options = parser.parse_args()
NAMES = ("baton", "gloo")


def calls(group, size):
    """(name, bytes, call)"""
    for exponent in (6, 10, 12, 14, 16, 18, 20, 22, 24):
        count = 2 ** exponent // 4
        yield "all_reduce", 4 * count, lambda x=torch.zeros(count): dist.all_reduce(x, group=group)
    for exponent in (10, 16, 20, 24):
        whole = torch.zeros(2 ** exponent // 4 // size * size)
        part = torch.zeros(whole.numel() // size)
        other = torch.zeros_like(whole)
        yield "reduce_scatter", 4 * whole.numel(), lambda p=part, w=whole: dist.reduce_scatter_tensor(p, w, group=group)
        yield "all_gather", 4 * whole.numel(), lambda p=part, w=whole: dist.all_gather_into_tensor(w, p, group=group)
        yield "all_to_all", 4 * whole.numel(), lambda o=other, w=whole: dist.all_to_all_single(o, w, group=group)
    yield "barrier", 0, lambda: dist.barrier(group=group)
    yield "all_gather_object", 0, lambda: dist.all_gather_object([None] * size, {"step": 1}, group=group)


def model():
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(768, 768) for _ in range(8)))


def steps(net):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    data = torch.randn(8, 768)

    def step():
        net(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return step


def trainers(group, size):
    yield "step of one rank alone", 0, steps(model())
    yield "DDP step", 0, steps(DistributedDataParallel(model(), process_group=group))
    net = model()
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    yield "FSDP2 step", 0, steps(net)


def slowest(value):
    told = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(told, dist.ReduceOp.MAX)  # over Gloo
    return told.item()


def turn(call, count):
    """Seconds of each of the calls."""
    dist.barrier()
    took = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        took.append(time.perf_counter() - start)
    return took


def measure(rank, size, path):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size,
                            timeout=datetime.timedelta(minutes=5))
    groups = {"gloo": dist.group.WORLD,
              "baton": dist.new_group(backend="baton", pg_options=baton.torch.Options(require=options.require))}
    kinds = {name: [*calls(group, size), *trainers(group, size)] for name, group in groups.items()}
    rows = []
    for index, (what, bytes, _) in enumerate(kinds["gloo"]):
        if options.only and options.only not in what:
            continue
        told = {name: [] for name in NAMES}
        counts = {}
        for name in NAMES:  # the first calls of a size try what is fastest
            warm = turn(kinds[name][index][2], 20)
            counts[name] = int(min(max(options.seconds / slowest(statistics.median(warm)), 5), 3000))
            turn(kinds[name][index][2], min(counts[name], 200))
        for _ in range(options.rounds):
            for name in NAMES:
                took = sorted(turn(kinds[name][index][2], counts[name]))
                told[name].append((slowest(took[len(took) // 2]), slowest(took[len(took) * 9 // 10])))
        row = {"what": what, "bytes": bytes, "ranks": size}
        for name in NAMES:
            row[f"{name}_us"] = round(statistics.median(p50 for p50, _ in told[name]) * 1e6, 1)
            row[f"{name}_p90_us"] = round(statistics.median(p90 for _, p90 in told[name]) * 1e6, 1)
        rows.append(row)
        if rank == 0:
            show(row)
    if rank == 0:
        exposed(rows)
        if options.json:
            with open(options.json, "w") as out:
                json.dump({"torch": torch.__version__, "backend": baton.torch.implementation(), "rows": rows}, out, indent=1)
    dist.barrier()
    dist.destroy_process_group()


def show(row):
    name = row["what"] + (f" {row['bytes']} B" if row["bytes"] else "")
    print(f"{name:<28}{row['baton_us']:>12.1f}{row['baton_p90_us']:>12.1f}{row['gloo_us']:>12.1f}{row['gloo_p90_us']:>12.1f}"
          f"{row['gloo_us'] / row['baton_us']:>9.2f}x", flush=True)


def exposed(rows):
    """The time that DDP's communication adds to a step."""
    by_name = {row["what"]: row for row in rows}
    if "DDP step" not in by_name or "step of one rank alone" not in by_name:
        return
    alone = min(by_name["step of one rank alone"][f"{name}_us"] for name in NAMES)
    row = {"what": "DDP, what is exposed", "bytes": 0, "ranks": options.ranks}
    for name in NAMES:
        for part in ("us", "p90_us"):
            row[f"{name}_{part}"] = max(by_name["DDP step"][f"{name}_{part}"] - alone, 0.1)
    rows.append(row)
    show(row)


print(f"torch {torch.__version__}, the backend in {baton.torch.implementation()}, {options.ranks} ranks; us, p50 and p90")
print(f"{'':<28}{'baton':>12}{'p90':>12}{'gloo':>12}{'p90':>12}{'faster':>10}", flush=True)
with tempfile.TemporaryDirectory() as folder:
    children = []
    for rank in range(options.ranks):
        child = os.fork()
        if child == 0:
            try:
                measure(rank, options.ranks, os.path.join(folder, "store"))
            except BaseException:
                import traceback
                traceback.print_exc()
                os._exit(1)
            sys.stdout.flush()
            os._exit(0)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
sys.exit(1 if any(codes) else 0)
