// all_reduce among threads, timed.
#include "tests/gpudirect/machine/collectives_rig.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "collectives/communicator.h"
#include "collectives/rendezvous.h"
#include "tests/gpudirect/machine/waiting.h"
#include "tests/std.h"
#include "transport/base/quantile.h"
#include "transport/internal/device_memory.h"

namespace baton::gpudirect {
namespace {

constexpr int kWarmUp = 3;

// A rank's calls. Their times, in seconds.
absl::StatusOr<std::vector<double>> times_of_rank(const CommunicatorOptions& options,
                                                  const CollectiveSizes& sizes) {
  auto comm = Communicator::create(options);
  if (!comm.ok()) return comm.status();
  auto in = internal::device_memory()->allocate(0, sizes.bytes);
  if (!in.ok()) return in.status();
  auto out = internal::device_memory()->allocate(0, sizes.bytes);
  if (!out.ok()) return out.status();
  const size_t count = sizes.bytes / sizeof(float);
  std::vector<float> values(count, static_cast<float>(options.rank + 1));
  absl::Status status =
      (*in)->put(0, {reinterpret_cast<const std::byte*>(values.data()), sizes.bytes});
  std::vector<double> times;
  for (int i = 0; i < kWarmUp + sizes.rounds && status.ok(); ++i) {
    status = (*comm)->barrier();
    const double begin = rig_now();
    if (status.ok()) {
      status = (*comm)->all_reduce((*in)->data(), (*out)->data(), count, DataType::kF32,
                                   ReduceOp::kSum, {.ordered = true});
    }
    if (i >= kWarmUp) times.push_back(rig_now() - begin);
  }
  if (status.ok()) {
    status = (*out)->get(0, {reinterpret_cast<std::byte*>(values.data()), sizes.bytes});
  }
  if (!status.ok()) return status;
  const auto right = static_cast<float>(sizes.ranks * (sizes.ranks + 1) / 2);
  if (values != std::vector<float>(count, right)) {
    return absl::DataLossError("all_reduce on memory of a device is wrong");
  }
  return times;
}

// The median of the slowest rank.
absl::StatusOr<double> seconds(const std::string& sums, const CollectiveSizes& sizes) {
  const auto key = ClusterKey::from_bytes("a key for figures, 24 B.");
  if (!key.ok()) return key.status();
  const auto server =
      collectives::RendezvousServer::start(*key, "", 0, static_cast<uint32_t>(sizes.ranks));
  if (!server.ok()) return server.status();
  std::mutex mutex;
  absl::Status status;
  double slowest = 0;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < sizes.ranks; ++rank) {
    CommunicatorOptions options;
    options.rank = rank;
    options.ranks = sizes.ranks;
    options.rendezvous = (*server)->address();
    options.tune = false;
    options.worker.providers = {"shm"};
    options.worker.key = *key;
    options.worker.settings = {{"staging.sums", sums}};
    threads.emplace_back([&, options] {
      const auto times = times_of_rank(options, sizes);
      const std::lock_guard lock(mutex);
      status.Update(times.status());
      if (times.ok()) slowest = std::max(slowest, base::median(*times));
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (!status.ok()) return status;
  return slowest;
}

}  // namespace

absl::StatusOr<std::vector<Figure>> take_collective_figures(const CollectiveSizes& sizes) {
  const std::string shape = absl::StrFormat("%u MiB of f32, %d ranks on one device, ordered",
                                            sizes.bytes >> 20, sizes.ranks);
  // nccl-tests' bus bandwidth, times seconds.
  const double bus = static_cast<double>(sizes.bytes) * 2 * (sizes.ranks - 1) / sizes.ranks * 1e-9;
  std::vector<Figure> figures;
  std::vector<double> took;
  for (const char* sums : {"kernel", "cpus", "auto"}) {
    const auto each = seconds(sums, sizes);
    if (!each.ok()) return each.status();
    took.push_back(*each);
    figures.push_back({absl::StrCat("all_reduce on a device, staging.sums=", sums), shape,
                       bus / *each, "GB/s of the bus"});
  }
  figures.push_back({"sums are chosen within 1.15 of the better way", shape,
                     took[2] / std::min(took[0], took[1]), "of it", 1.15, true});
  return figures;
}

}  // namespace baton::gpudirect
