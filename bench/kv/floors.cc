// Floors of `baton kv_bw`: memcpy and plain sockets.
#include "bench/kv/floors.h"

#include <cstdio>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "bench/baselines/plain_sockets.h"
#include "bench/report/pattern.h"
#include "transport/internal/device_memory.h"

namespace baton::bench {
namespace {

class MemcpyFloor final : public Floor {
 public:
  // The other pool takes the place of the peer's memory. Copies always go out of our own memory,
  // also for a read: they must not bring in what the transfer is checked for.
  static absl::StatusOr<std::unique_ptr<Floor>> make(KvSession& session) {
    const size_t other = session.remote_bytes();
    auto pool = MemoryPool::create(session.worker(), {.slab_bytes = other});
    if (!pool.ok()) return pool.status();
    auto block = (*pool)->allocate(other);
    if (!block.ok()) return block.status();
    poison(block->data, block->size);
    std::unique_ptr<MemcpyFloor> floor(new MemcpyFloor(*std::move(pool)));

    const TransferRequest& request = session.request();
    TransferCursor cursor(request.local_layout, request.remote_layout, 0,
                          session.workload().bytes());
    for (Piece piece; cursor.next(piece);) {
      floor->copies_.push_back({block->data + piece.remote_offset,
                                session.local().host() + piece.local_offset, piece.bytes});
    }
    floor->bytes_ = session.workload().bytes();
    return floor;
  }

  const Reference& reference() const override { return reference_; }

  absl::StatusOr<double> run(size_t count) override {
    const Time begin = Clock::steady().now();
    for (size_t i = 0; i < count; ++i) {
      for (const Copy& copy : copies_) std::memcpy(copy.to, copy.from, copy.bytes);
      asm volatile("" ::: "memory");  // every round counts
    }
    const std::chrono::duration<double, std::nano> took = Clock::steady().now() - begin;
    return static_cast<double>(bytes_ * count) / took.count();
  }

 private:
  struct Copy {
    std::byte* to;
    const std::byte* from;
    size_t bytes;
  };

  explicit MemcpyFloor(std::unique_ptr<MemoryPool> pool) : pool_(std::move(pool)) {}

  std::unique_ptr<MemoryPool> pool_;
  std::vector<Copy> copies_;
  size_t bytes_ = 0;
  Reference reference_{.name = "memcpy", .note = "memcpy of the same pages, in one process"};
};

class DeviceFloor final : public Floor {
 public:
  static absl::StatusOr<std::unique_ptr<Floor>> make(KvSession& session, int device) {
    const internal::DeviceMemory* const devices = internal::device_memory();
    std::unique_ptr<DeviceFloor> floor(new DeviceFloor);
    floor->run_.bytes = session.workload().bytes();
    auto target = devices->allocate(device, floor->run_.bytes);
    if (!target.ok()) return target.status();
    floor->target_ = *std::move(target);
    auto copies = devices->copies(device);
    if (!copies.ok()) return copies.status();
    floor->copies_ = *std::move(copies);
    floor->run_.from = session.local().region().base;
    floor->run_.to = floor->target_->data();
    return floor;
  }

  const Reference& reference() const override { return reference_; }

  absl::StatusOr<double> run(size_t count) override {
    const Time begin = Clock::steady().now();
    for (size_t i = 0; i < count; ++i) {
      if (absl::Status status = copies_->begin(0, {&run_, 1}); !status.ok()) return status;
      std::optional<absl::Status> ended;
      while (!(ended = copies_->ended(0)).has_value()) {
      }
      if (!ended->ok()) return *ended;
    }
    const std::chrono::duration<double, std::nano> took = Clock::steady().now() - begin;
    return static_cast<double>(run_.bytes * count) / took.count();
  }

 private:
  DeviceFloor() = default;

  std::unique_ptr<internal::DeviceBuffer> target_;
  std::unique_ptr<internal::DeviceCopies> copies_;  // ends first
  internal::DeviceRun run_;
  Reference reference_{.name = "device copy", .note = "a copy of as many bytes in one run"};
};

class SocketsFloor final : public Floor {
 public:
  explicit SocketsFloor(PlainSocketsOptions options) : options_(std::move(options)) {
    reference_.name = "plain_sockets";
    reference_.note = absl::StrFormat("%d blocking socket%s, %s", options_.sockets,
                                      options_.sockets == 1 ? "" : "s", options_.congestion);
  }

  const Reference& reference() const override { return reference_; }

  absl::StatusOr<double> run(size_t count) override {
    options_.rounds = static_cast<int>(count);
    return plain_sockets(options_);
  }

 private:
  PlainSocketsOptions options_;
  Reference reference_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Floor>> memcpy_floor(KvSession& session) {
  return MemcpyFloor::make(session);
}

absl::StatusOr<std::unique_ptr<Floor>> device_floor(KvSession& session, int device) {
  return DeviceFloor::make(session, device);
}

absl::StatusOr<std::unique_ptr<Floor>> sockets_floor(const KvBwOptions& options, size_t bytes,
                                                     Cores cores, const std::string& route) {
  // The route names what is in force: "tcp 127.0.0.1:4000 (cubic, 2 sockets)".
  char congestion[32] = "";
  int sockets = 0;
  const size_t open = route.find('(');
  if (open == std::string::npos ||
      std::sscanf(route.c_str() + open, "(%31[^,], %d socket", congestion, &sockets) != 2) {
    return absl::InternalError(
        absl::StrFormat("the route \"%s\" names neither congestion control nor sockets", route));
  }
  PlainSocketsOptions plain;
  plain.sockets = sockets;
  plain.congestion = congestion;
  plain.bytes = bytes;
  plain.sender_cpu = cores.target;
  if (const std::string kib = options.setting("tcp.buffer_kib", ""); !kib.empty()) {
    plain.buffer_bytes = std::stoul(kib) << 10;  // the provider has checked it
  }
  return std::make_unique<SocketsFloor>(std::move(plain));
}

}  // namespace baton::bench
