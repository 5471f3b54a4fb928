// What the fake's handles really are.
#pragma once

#include <cerrno>
#include <mutex>

#include "tests/std.h"
#include "tests/verbs/fake/fake_verbs.h"
#include "transport/base/ring.h"

namespace baton {

struct FakeContext {
  verbs_context extended{};
  FakeVerbs* fake = nullptr;
  size_t device = 0;
  size_t pinned = 0;
  size_t regions = 0;
  size_t users = 0;
  base::Ring<ibv_async_event> events;
  ibv_context& context() { return extended.context; }
};

struct FakePd {
  ibv_pd pd{};
  size_t users = 0;
};

struct FakeMr {
  ibv_mr mr{};
  unsigned access = 0;
  // Of a dma-buf: where the adapter reaches the bytes, whatever the processor may do at mr.addr.
  std::byte* mapped = nullptr;
  size_t mapped_bytes = 0;
  size_t offset = 0;
  FakeOptions::Worth worth = FakeOptions::Worth::kGood;
};

struct FakeChannel {
  ibv_comp_channel channel{};
  base::Ring<ibv_cq*> events;
};

struct FakeCq {
  ibv_cq cq{};
  struct Entry {
    ibv_wc completion{};
    FakeQp* qp = nullptr;
    uint32_t retires = 0;  // slots of the send queue that polling this gives back
  };
  base::Ring<Entry> entries;
  bool armed = false;
  bool broken = false;  // nothing comes out of it any more
  size_t users = 0;
};

struct FakeWork {
  static constexpr size_t kMaxSge = 32;
  static constexpr size_t kMaxInline = 512;
  ibv_send_wr request{};
  std::array<ibv_sge, kMaxSge> sge;
  std::array<char, kMaxInline> inlined;
  uint64_t bytes = 0;
  bool signalled = false;
  bool delivered = false;  // and its acknowledgement was lost
};

struct FakeReceive {
  uint64_t id = 0;
  ibv_sge sge{};
};

struct FakeSrq {
  ibv_srq srq{};
  uint32_t most = 0;
  bool broken = false;  // takes no more receives, and gives none out
  base::Ring<FakeReceive> receives;
  size_t users = 0;
};

struct FakeQp {
  ibv_qp qp{};
  FakeContext* context = nullptr;
  ibv_qp_init_attr limits{};
  ibv_qp_attr attributes{};
  base::Ring<FakeWork> sends;
  base::Ring<FakeReceive> receives;
  uint32_t used = 0;         // slots of the send queue
  uint32_t finished = 0;     // of those, executed without a completion yet
  uint32_t unsignalled = 0;  // posted since the last signalled one
  uint64_t done = 0;         // bytes of the first work request
  bool waiting = false;
  Time waiting_since{};
  // In the error state: a shared receive that it had taken, and still owes a completion for.
  std::optional<FakeReceive> held;
  int held_polls = 0;
  // Where messages go: its own receives, or the shared ones.
  base::Ring<FakeReceive>& receive_ring() {
    return qp.srq != nullptr ? reinterpret_cast<FakeSrq*>(qp.srq)->receives : receives;
  }
  FakeCq& send_queue() const { return *reinterpret_cast<FakeCq*>(qp.send_cq); }
  FakeCq& receive_queue() const { return *reinterpret_cast<FakeCq*>(qp.recv_cq); }
};

// The handle is the first member of each, so a pointer to one is a pointer to the other.
template <typename Fake, typename Handle>
Fake& fake_of(Handle* handle) {
  return *reinterpret_cast<Fake*>(handle);
}
inline FakeContext& fake_of_context(ibv_context* context) {
  return fake_of<FakeContext>(verbs_get_ctx(context));
}

// The fake's table of calls, in parts: each file has the calls of one kind of object.

// What every call begins with.
struct FakeCall {
  static FakeVerbs& of(ibv_context* context) { return *fake_of_context(context).fake; }
  static std::nullptr_t failed(int error) {
    errno = error;
    return nullptr;
  }
  using Lock = std::lock_guard<std::mutex>;
  // The fake of a context, for this call alone.
  class Locked {
   public:
    explicit Locked(ibv_context* context) : fake_(of(context)), lock_(fake_.mutex_) {}
    FakeVerbs* operator->() const { return &fake_; }

   private:
    FakeVerbs& fake_;
    const Lock lock_;
  };
};

void add_device_calls(verbs::VerbsApi& api);      // fake_devices.cc
void add_memory_calls(verbs::VerbsApi& api);      // fake_memory.cc
void add_completion_calls(verbs::VerbsApi& api);  // fake_completions.cc
void add_queue_calls(verbs::VerbsApi& api);       // fake_queues.cc

// Those that libibverbs reaches through a context.
void add_completion_calls(ibv_context_ops& ops);
void add_queue_calls(ibv_context_ops& ops);

// One count off an eventfd; false where there is none.
bool take_count(int fd);

}  // namespace baton
