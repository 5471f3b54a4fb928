// Rates of transfers, and what they wait for.
#include "tests/gpudirect/machine/transfer_rig.h"

#include "absl/strings/str_format.h"
#include "gpudirect/device_memory.h"
#include "gpudirect/registered_pages.h"
#include "tests/gpudirect/machine/transfer_pair.h"
#include "tests/gpudirect/machine/waiting.h"
#include "tests/std.h"

namespace baton::gpudirect {
namespace {

constexpr size_t kUrgent = 64 << 10;
constexpr size_t kSmallBulk = 128 << 10;  // nothing urgent
// Of what holds the device: the word that it waits for, and what it says at its end.
constexpr size_t kWord = 4096;
constexpr size_t kReached = 1 << 20;

double part_of(std::vector<double> all, double part) {
  std::sort(all.begin(), all.end());
  return all[std::min(all.size() - 1, static_cast<size_t>(part * static_cast<double>(all.size())))];
}

// The rate of transfers over that of `reference`, taken in turns.
Figure rate_beside(TransferPair& rig, const TransferSizes& sizes, std::string name,
                   const char* beside, double goal, double (TransferPair::*reference)(size_t),
                   size_t each = SIZE_MAX) {
  std::vector<double> ours, theirs;
  for (int round = 0; round < sizes.rounds; ++round) {
    const auto seed = static_cast<uint32_t>(round);
    rig.fill(sizes.transfer, seed);
    // Threads and caches have had to do with other things since.
    rig.run(kSmallBulk);
    const double begin = rig_now();
    rig.run_parts(sizes.transfer, each);
    ours.push_back(rig_now() - begin);
    rig.compare(sizes.transfer);
    (rig.*reference)(kSmallBulk);
    theirs.push_back((rig.*reference)(sizes.transfer));
  }
  const double took = part_of(ours, 0.5);
  return {std::move(name),
          absl::StrFormat("%u bytes, %.1f GB/s; %s %.1f GB/s", sizes.transfer,
                          static_cast<double>(sizes.transfer) / took / 1e9, beside,
                          static_cast<double>(sizes.transfer) / part_of(theirs, 0.5) / 1e9),
          part_of(theirs, 0.5) / took, "of it", goal};
}

// One urgent transfer after the other, with bulk always under way.
std::vector<Figure> urgent_behind_bulk(TransferPair& rig, const TransferSizes& sizes) {
  std::vector<double> waits;
  TransferId bulk;
  for (int i = 0; i < sizes.urgent; ++i) {
    if (bulk.generation == 0 || ended(rig.worker().state(bulk).value_or(TransferState::kDone))) {
      rig.worker().release(bulk).IgnoreError();
      bulk = must(rig.worker().submit(rig.request(kUrgent, sizes.bulk - kUrgent)));
    }
    const double begin = rig_now();
    rig.run(kUrgent);
    waits.push_back((rig_now() - begin) * 1e6);
  }
  must(rig.worker().wait(bulk));
  const std::string shape = absl::StrFormat("%u bytes behind %u", kUrgent, sizes.bulk);
  return {{"urgent, p50", shape, part_of(waits, 0.5), "us", std::nullopt, true},
          {"urgent, p99", shape, part_of(waits, 0.99), "us", 250, true}};
}

// Bytes move while a kernel has every multiprocessor, which ends when it is told to.
Figure while_a_kernel_runs(const Device& device, const Launcher& launcher,
                           const TransferSizes& sizes) {
  TransferPair rig(device, false, false, sizes.transfer);
  // All that has to be loaded and made is, before.
  rig.settle();
  rig.fill(sizes.transfer, 99);
  const auto words = must(RegisteredPages::make(device, 2 * sizeof(uint64_t)));
  const auto memory =
      must(DeviceSlab::create(device, kWord + kReached, {.rdma = false, .shareable = false}));
  const Stream stream = device.stream(Direction::kBetween);  // staging needs the two others
  // In the device's memory: thousands of blocks that ask the host would leave no room on the link.
  const DevicePointer word = memory->span().data;
  const auto set_word = [&](uint64_t value) {
    words->as<uint64_t>()[value] = value;
    queue_copy(device, word, words->address() + value * sizeof(uint64_t), sizeof(uint64_t),
               device.stream(Direction::kToDevice));
    wait_for(device, device.stream(Direction::kToDevice));
  };
  set_word(0);
  const kernels::WaitWord hold{pointer_of<const uint64_t>(word), 1, sizes.hold_nanoseconds,
                               pointer_of<uint32_t>(word + kWord)};
  {
    const Device::Current current(device);
    must(launcher.wait_word(hold, UINT32_MAX, stream));
  }
  const double begin = rig_now();
  const auto id = rig.worker().submit(rig.request(0, sizes.transfer));
  const absl::Status moved = id.ok() ? rig.worker().wait(*id) : id.status();
  const double took = rig_now() - begin;
  bool still_running = false;
  {
    const Device::Current current(device);
    still_running = device.driver().cuStreamQuery(stream) == kNotReady;
  }
  set_word(1);
  wait_for(device, stream);
  must(moved);
  rig.compare(sizes.transfer);
  return {"bytes arrive while a kernel holds the device",
          absl::StrFormat("%u bytes in %.0f us", sizes.transfer, took * 1e6),
          still_running ? 1.0 : 0.0, "(1: yes)", 1};
}

}  // namespace

std::string json_of(const Figure& figure) {
  return absl::StrFormat(
      R"({"name": "%s", "shape": "%s", "value": %.4g, "unit": "%s", "goal": %s, "met": %s})",
      figure.name, figure.shape, figure.value, figure.unit,
      figure.goal.has_value()
          ? absl::StrFormat("\"%s %g\"", figure.at_most ? "<=" : ">=", *figure.goal)
          : "null",
      figure.met() ? "true" : "false");
}

std::vector<Figure> take_transfer_figures(const Device& device, const Launcher& launcher,
                                          const TransferSizes& sizes) {
  std::vector<Figure> figures;
  {
    TransferPair rig(device, false, true, std::max(sizes.bulk, sizes.transfer));
    rig.settle();
    figures.push_back(rate_beside(rig, sizes, "device, shm, device: staged", "both copies at once",
                                  0.90, &TransferPair::both_ways));
    figures.push_back(rate_beside(rig, sizes, "device, shm, device: staged, an eighth at a time",
                                  "both copies at once", 0.90, &TransferPair::both_ways,
                                  sizes.transfer / 8));
    for (Figure& figure : urgent_behind_bulk(rig, sizes)) figures.push_back(std::move(figure));
  }
  {
    TransferPair rig(device, true, true, sizes.transfer);
    if (rig.worker().explain(rig.peer()).find("CUDA IPC") == std::string::npos) {
      figures.push_back({"device to device by a mapping", "not mapped here", 0, "of it", 0.90});
    } else {
      figures.push_back(rate_beside(rig, sizes, "device to device by a mapping", "a plain copy",
                                    0.90, &TransferPair::on_device));
    }
  }
  figures.push_back(while_a_kernel_runs(device, launcher, sizes));
  return figures;
}

}  // namespace baton::gpudirect
