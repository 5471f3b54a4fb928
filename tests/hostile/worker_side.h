// A worker with a block of memory of its own, which a thread may drive.
#pragma once

#include "tests/test.h"
#include "transport/pool.h"
#include "transport/progress_thread.h"
#include "transport/worker.h"

namespace baton::hostile {

inline constexpr size_t kSideBytes = 1 << 20;

struct WorkerSide {
  explicit WorkerSide(const std::string& provider, SettingValues settings = {})
      : worker(*Worker::create({.name = "side",
                                .providers = {provider},
                                .key = *ClusterKey::from_bytes("0123456789abcdef"),
                                .settings = std::move(settings)})),
        pool(*MemoryPool::create(*worker, {.slab_bytes = 2 << 20})),
        block(*pool->allocate(kSideBytes)) {}
  ~WorkerSide() { end(); }
  void end() {
    thread.reset();
    pool.reset();
    worker.reset();
  }
  void drive() { thread.emplace(*worker); }
  // Writes the first bytes of its block over those of the other side.
  TransferRequest write(const WorkerSide& other, size_t bytes = kSideBytes) const {
    return {.op = Op::kWrite,
            .peer = peer,
            .local = block.region,
            .local_layout = Layout::contiguous(block.offset, bytes),
            .remote = *other.worker->remote_region(other.block.region),
            .remote_layout = Layout::contiguous(other.block.offset, bytes)};
  }

  std::unique_ptr<Worker> worker;
  std::unique_ptr<MemoryPool> pool;
  Block block;
  PeerId peer;
  std::optional<ProgressThread> thread;
};

}  // namespace baton::hostile
