// Floors of `baton kv_bw`: memcpy and plain sockets.
#include "bench/kv/floors.h"

#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "bench/baselines/floors.h"
#include "bench/report/bench_memory.h"
#include "transport/internal/device_memory.h"

namespace baton::bench {
namespace {

// GB/s of `count` times `bytes` since `begin`.
double rate_since(Time begin, size_t bytes, size_t count) {
  const std::chrono::duration<double, std::nano> took = Clock::steady().now() - begin;
  return static_cast<double>(bytes * count) / took.count();
}

}  // namespace

// The other pool takes the place of the peer's memory. Copies always go out of our own memory,
// also for a read: they must not bring in what the transfer is checked for.
absl::StatusOr<Floor> memcpy_floor(KvSession& session) {
  struct Copy {
    std::byte* to;
    const std::byte* from;
    size_t bytes;
  };
  const size_t other = session.remote_bytes(), bytes = session.workload().bytes();
  auto made = MemoryPool::create(session.worker(), {.slab_bytes = other});
  if (!made.ok()) return made.status();
  const std::shared_ptr<MemoryPool> pool = *std::move(made);
  auto block = pool->allocate(other);
  if (!block.ok()) return block.status();
  poison(block->data, block->size);

  std::vector<Copy> copies;
  const TransferRequest& request = session.request();
  TransferCursor cursor(request.local_layout, request.remote_layout, 0, bytes);
  for (Piece piece; cursor.next(piece);) {
    copies.push_back({block->data + piece.remote_offset,
                      session.local().host() + piece.local_offset, piece.bytes});
  }
  return Floor{{.name = "memcpy", .note = "memcpy of the same pages, in one process"},
               [pool, copies = std::move(copies), bytes](size_t count) {
                 const Time begin = Clock::steady().now();
                 for (size_t i = 0; i < count; ++i) {
                   for (const Copy& copy : copies) std::memcpy(copy.to, copy.from, copy.bytes);
                   asm volatile("" ::: "memory");  // every round counts
                 }
                 return rate_since(begin, bytes, count);
               }};
}

absl::StatusOr<Floor> device_floor(KvSession& session, int device) {
  const internal::DeviceMemory* const devices = internal::device_memory();
  const size_t bytes = session.workload().bytes();
  auto target = devices->allocate(device, bytes);
  if (!target.ok()) return target.status();
  auto copies = devices->copies(device);
  if (!copies.ok()) return copies.status();
  const internal::DeviceRun run = {
      .to = (*target)->data(), .from = session.local().region().base, .bytes = bytes};
  // The copies end before their target does.
  struct Parts {
    std::unique_ptr<internal::DeviceBuffer> target;
    std::unique_ptr<internal::DeviceCopies> copies;
  };
  const auto parts = std::make_shared<Parts>(Parts{*std::move(target), *std::move(copies)});
  return Floor{{.name = "device copy", .note = "a copy of as many bytes in one run"},
               [parts, run](size_t count) -> absl::StatusOr<double> {
                 const Time begin = Clock::steady().now();
                 for (size_t i = 0; i < count; ++i) {
                   absl::Status status = parts->copies->begin(0, {&run, 1});
                   if (!status.ok()) return status;
                   std::optional<absl::Status> ended;
                   while (!(ended = parts->copies->ended(0)).has_value()) {
                   }
                   if (!ended->ok()) return *ended;
                 }
                 return rate_since(begin, run.bytes, count);
               }};
}

absl::StatusOr<Floor> sockets_floor(const KvBwOptions& options, size_t bytes, Cores cores,
                                    const std::string& route) {
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
  const std::string note = absl::StrFormat("%d blocking socket%s, %s", sockets,
                                           sockets == 1 ? "" : "s", plain.congestion);
  return Floor{{.name = "plain_sockets", .note = note}, [plain](size_t count) mutable {
                 plain.rounds = static_cast<int>(count);
                 return plain_sockets(plain);
               }};
}

}  // namespace baton::bench
