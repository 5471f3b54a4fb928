// The session and the memory that its mover copies through.
#include "engine/handoff/hand_off.h"

#include <sys/mman.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/handoff/cache_mover.h"
#include "engine/handoff/staging.h"
#include "transport/base/limits/memory_left.h"
#include "transport/net/endpoint.h"

namespace baton::engine::handoff {

absl::Status HandOff::use_cache_of(HandOff& hand_off, const KvCache& cache,
                                   std::optional<int> device, int file) {
  const KvGeometry& geometry = cache.geometry();
  const kvtransfer::Descriptor memory{.address = reinterpret_cast<uint64_t>(cache.base()),
                                      .bytes = geometry.cache_bytes(cache.num_blocks()),
                                      .device = static_cast<uint64_t>(device.value_or(0))};
  const absl::Status status = file >= 0 ? hand_off.agent()->register_mapped(memory, file)
                                        : hand_off.agent()->register_memory(
                                              absl::MakeConstSpan(&memory, 1),
                                              device.has_value() ? kvtransfer::MemoryKind::kVram
                                                                 : kvtransfer::MemoryKind::kDram);
  if (!status.ok()) return status;
  kvtransfer::KvWorker me = hand_off.options_.shard;
  me.heads = static_cast<uint32_t>(geometry.kv_heads) * me.ranks;
  return hand_off.use(std::make_unique<CacheMover>(
      cache, device, me, *hand_off.agent(), *hand_off.staging_,
      CacheMover::Identity{.model = hand_off.options_.model,
                           .fingerprint = hand_off.options_.fingerprint},
      hand_off.options_.worker.timeline));
}

absl::StatusOr<std::unique_ptr<HandOff>> HandOff::create(HandOffOptions options) {
  if (options.name.empty() || options.model.empty()) {
    return absl::InvalidArgumentError(
        "handing KV over needs a name for the agent and one for its checkpoint");
  }
  absl::StatusOr<std::unique_ptr<Staging>> staging = Staging::make(options.staging_bytes);
  if (!staging.ok()) return staging.status();
  // A host that is said to be this machine's loopback is listened on, whichever family it is of.
  if (options.worker.listen_host.empty()) {
    options.worker.listen_host = net::loopback_host(options.host) ? options.host : "*";
  }
  absl::StatusOr<std::unique_ptr<kvtransfer::KvSession>> session =
      kvtransfer::KvSession::create(options);
  if (!session.ok()) return session.status();
  const kvtransfer::Descriptor range{.address = reinterpret_cast<uint64_t>((*staging)->base()),
                                     .bytes = (*staging)->bytes(),
                                     .device = 0};
  absl::Status status = (*session)->agent()->register_memory(absl::MakeConstSpan(&range, 1));
  if (!status.ok()) return status;
  return std::unique_ptr<HandOff>(
      new HandOff(std::move(**session), std::move(options), *std::move(staging), &use_cache_of));
}

absl::StatusOr<std::unique_ptr<Staging>> Staging::make(size_t bytes) {
  absl::Status fits =
      base::memory_fits("staging for KV that is handed over (--kv-staging-mib)", bytes);
  if (!fits.ok()) return fits;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no memory for ", bytes >> 20,
                     " MiB of staging for KV that is handed over: use less --kv-staging-mib"));
  }
  return std::unique_ptr<Staging>(new Staging(static_cast<std::byte*>(memory), bytes));
}

Staging::~Staging() { munmap(base_, bytes_); }

}  // namespace baton::engine::handoff
