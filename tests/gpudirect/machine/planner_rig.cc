// The planner beside the best fixed choice, and the queue from kernels to the host.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <limits>
#include <memory>
#include <thread>

#include "absl/strings/str_format.h"
#include "gpudirect/copies/copier.h"
#include "gpudirect/device_memory.h"
#include "gpudirect/registered_pages.h"
#include "gpudirect/triggers/trigger_fifo.h"
#include "tests/gpudirect/machine/transfer_rig.h"
#include "tests/gpudirect/machine/waiting.h"

namespace baton::gpudirect {
namespace {

constexpr int kTries = 5;
constexpr double kAlike = 1.10;

}  // namespace

absl::StatusOr<std::vector<Figure>> take_planner_figures(const Device& device,
                                                         const Launcher& launcher,
                                                         const TransferSizes& sizes) {
  const Device::Current current(device);
  const Stream stream = device.stream(Direction::kToHost);
  auto copier = Copier::open(device, &launcher, stream);
  if (!copier.ok()) return copier.status();
  const double begin = rig_now();
  if (absl::Status s = (*copier)->measure(); !s.ok()) return s;
  const double measured = (rig_now() - begin) * 1e3;
  auto slab = DeviceSlab::create(device, 2 * sizes.grid_bytes, {.rdma = false, .shareable = false});
  auto host = RegisteredPages::make(device, sizes.grid_bytes);
  if (!slab.ok()) return slab.status();
  if (!host.ok()) return host.status();

  size_t cells = 0, good = 0;
  double worst = 1;
  std::string worst_at;
  for (const CopyRoute route : {CopyRoute::kToHost, CopyRoute::kToDevice}) {
    for (size_t size = 512; size <= (256 << 10); size *= 2) {
      for (size_t count = 1; count <= 2048; count *= 2) {
        if (size * count > sizes.grid_bytes) break;
        std::vector<CopyPiece> pieces(count);
        for (size_t i = 0; i < count; ++i) {
          const DevicePointer apart = (*slab)->span().data + 2 * i * size;
          const DevicePointer in_row = (*host)->address() + i * size;
          pieces[i] = route == CopyRoute::kToHost ? CopyPiece{apart, in_row, size}
                                                  : CopyPiece{in_row, apart, size};
        }
        double best = std::numeric_limits<double>::infinity();
        double chosen = best;
        // In turns: what is busy elsewhere slows all of them.
        for (int i = 0; i < kTries; ++i) {
          const auto time = [&](auto&& copy, double& least) {
            const double from = rig_now();
            absl::Status status = copy();
            if (status.ok()) status = wait_for(device, stream);
            if (status.ok()) least = std::min(least, rig_now() - from);
            return absl::IsFailedPrecondition(status) ? absl::OkStatus() : status;
          };
          for (size_t way = 0; way < kCopyWays; ++way) {
            absl::Status status = time(
                [&] { return (*copier)->copy_by(static_cast<CopyWay>(way), route, pieces); }, best);
            if (!status.ok()) return status;
          }
          absl::Status status = time([&] { return (*copier)->copy(route, pieces); }, chosen);
          if (!status.ok()) return status;
        }
        ++cells;
        const double regret = chosen / best;
        good += regret <= kAlike ? 1 : 0;
        if (regret > worst) {
          worst = regret;
          worst_at = absl::StrFormat("%u x %u %s", count, size, name_of(route));
        }
      }
    }
  }
  return std::vector<Figure>{
      {"planner within 1.10 of the best fixed way",
       absl::StrFormat("%u lists; worst %.2f: %s", cells, worst, worst_at),
       static_cast<double>(good) / static_cast<double>(cells), "of lists", 0.95},
      {"planner's measurement", "", measured, "ms", 150, true}};
}

absl::StatusOr<std::vector<Figure>> take_trigger_figures(const Device& device,
                                                         const Launcher& launcher,
                                                         const TransferSizes& sizes) {
  const Device::Current current(device);
  const Stream stream = device.stream(Direction::kBetween);
  auto fifo = TriggerFifo::open(device, 4096);
  if (!fifo.ok()) return fifo.status();
  TriggerConsumer& consumer = (*fifo)->consumer();
  const uint32_t transfer = consumer.prepare(1);
  auto slab = DeviceSlab::create(device, sizes.triggers * (sizeof(Trigger) + sizeof(uint32_t)),
                                 {.rdma = false, .shareable = false});
  auto words =
      RegisteredPages::make(device, std::max<size_t>(4096, sizes.triggers * sizeof(Trigger)));
  if (!slab.ok()) return slab.status();
  if (!words.ok()) return words.status();
  auto* const triggers = (*words)->as<Trigger>();
  std::fill(triggers, triggers + sizes.triggers, Trigger{transfer, 0, 1, 0});
  const DevicePointer there = (*slab)->span().data;
  if (absl::Status s = (*words)->copy_to(there, sizes.triggers * sizeof(Trigger)); !s.ok())
    return s;

  // Rate: kernels push as fast as the host takes, and wait where the queue is full.
  const kernels::PushTriggers push{(*fifo)->device_handle(), pointer_of<const Trigger>(there),
                                   pointer_of<uint32_t>(there + sizes.triggers * sizeof(Trigger)),
                                   static_cast<uint32_t>(sizes.triggers), sizes.answer_nanoseconds};
  if (absl::Status s = launcher.push_triggers(push, UINT32_MAX, stream); !s.ok()) return s;
  size_t taken = 0;
  double first = 0, last = 0;
  absl::Status pushed;
  std::atomic<bool> over{false};
  // The fake runs a kernel when it is asked, and for as long as the kernel takes.
  std::thread asking([&] {
    const Device::Current here(device);
    pushed = wait_for(device, stream);
    over.store(true, std::memory_order_release);
  });
  for (bool more = true; more;) {
    more = !over.load(std::memory_order_acquire);
    while (const size_t some = consumer.take(4096, [](const Trigger&) {})) {
      last = rig_now();
      if (taken == 0) first = last;
      taken += some;
    }
  }
  asking.join();
  if (!pushed.ok()) return pushed;
  std::vector<Figure> figures{
      {"triggers",
       absl::StrFormat("%u of %u pushed in one launch were taken", taken, sizes.triggers),
       static_cast<double>(taken) / std::max(last - first, 1e-9) / 1e6, "M/s", 5}};

  // A word to a running kernel, and its trigger back.
  auto* const word = (*words)->as<uint64_t>();
  std::atomic_ref(*word).store(0);
  const kernels::AnswerWords answer{
      (*fifo)->device_handle(), {transfer, 0, 1, 0}, word, sizes.answers, sizes.answer_nanoseconds};
  if (absl::Status s = launcher.answer_words(answer, 1, stream); !s.ok()) return s;
  std::vector<double> trips;
  const double end = rig_now() + std::chrono::duration<double>(kRigPatience).count();
  asking = std::thread([&] {
    const Device::Current here(device);
    wait_for(device, stream).IgnoreError();
  });
  for (uint64_t i = 1; i <= sizes.answers && rig_now() < end; ++i) {
    const double begin = rig_now();
    std::atomic_ref(*word).store(i, std::memory_order_release);
    const double patience = begin + static_cast<double>(sizes.answer_nanoseconds) / 1e9;
    size_t answered = 0;
    while (answered == 0 && rig_now() < patience)
      answered = consumer.take(1, [](const Trigger&) {});
    if (answered == 0) break;
    trips.push_back((rig_now() - begin) * 1e6);
  }
  asking.join();
  if (absl::Status s = wait_for(device, stream); !s.ok()) return s;
  if (trips.empty()) return absl::DeadlineExceededError("a kernel answered no word");
  std::sort(trips.begin(), trips.end());
  figures.push_back({"trigger, half a round trip, p50",
                     absl::StrFormat("%u words answered", trips.size()),
                     trips[trips.size() / 2] / 2, "us", 2, true});
  return figures;
}

}  // namespace baton::gpudirect
