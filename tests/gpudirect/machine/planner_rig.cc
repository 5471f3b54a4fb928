// The planner beside the best fixed choice.
#include "absl/strings/str_format.h"
#include "gpudirect/copies/copier.h"
#include "gpudirect/device_memory.h"
#include "gpudirect/registered_pages.h"
#include "tests/gpudirect/machine/transfer_rig.h"
#include "tests/gpudirect/machine/waiting.h"
#include "tests/std.h"
#include "transport/base/quantile.h"

namespace baton::gpudirect {
namespace {

constexpr int kRounds = 25;
constexpr int kLeastRounds = 5;  // after which a way that cannot be the best is left out
constexpr double kAlike = 1.10;

double least(const std::vector<double>& values) {
  return values.empty() ? std::numeric_limits<double>::infinity()
                        : *std::min_element(values.begin(), values.end());
}

// Pages with gaps on the device, in a row on the host; or with gaps of two sizes, which no copy of
// rows has.
enum class Gaps : uint8_t { kEven, kUneven };
size_t gaps_before(Gaps gaps, size_t page, size_t size) {
  return page * size + (gaps == Gaps::kEven || page % 2 == 0 ? 0 : size / 2);
}
std::vector<CopyPiece> pages_of(CopyRoute route, Gaps gaps, size_t size, size_t count,
                                DevicePointer device, DevicePointer host) {
  std::vector<CopyPiece> pieces(count);
  for (size_t i = 0; i < count; ++i) {
    const DevicePointer apart = device + i * size + gaps_before(gaps, i, size);
    const DevicePointer in_row = host + i * size;
    pieces[i] = route == CopyRoute::kToHost ? CopyPiece{apart, in_row, size}
                                            : CopyPiece{in_row, apart, size};
  }
  return pieces;
}

// How much longer copy() takes than the best way. Medians of rounds, in each of which all take
// their turns in another order: who comes behind a kernel, say, waits a little longer.
double regret_of(const Device& device, Stream stream, Copier& copier, CopyRoute route,
                 const std::vector<CopyPiece>& pieces) {
  constexpr size_t kChosen = kCopyWays;
  std::array<std::vector<double>, kCopyWays + 1> times;
  std::array<size_t, kCopyWays + 1> order;
  std::iota(order.begin(), order.end(), size_t{0});
  std::mt19937_64 random(pieces.size());
  for (int round = 0; round < kRounds; ++round) {
    std::shuffle(order.begin(), order.end(), random);
    double shortest = std::numeric_limits<double>::infinity();
    for (const std::vector<double>& of_way : times) shortest = std::min(shortest, least(of_way));
    for (const size_t i : order) {
      const bool hopeless = round >= kLeastRounds && least(times[i]) > 2 * shortest;
      if (i != kChosen && hopeless) continue;
      const double from = rig_now();
      const absl::Status status = i == kChosen
                                      ? copier.copy(route, pieces)
                                      : copier.copy_by(static_cast<CopyWay>(i), route, pieces);
      if (absl::IsFailedPrecondition(status)) continue;
      must(status);
      wait_for(device, stream);
      times[i].push_back(rig_now() - from);
    }
  }
  double best = std::numeric_limits<double>::infinity();
  for (size_t way = 0; way < kCopyWays; ++way) {
    if (!times[way].empty()) best = std::min(best, base::median(times[way]));
  }
  return base::median(times[kChosen]) / best;
}

struct Regrets {
  size_t lists = 0;
  size_t good = 0;
  double worst = 1;
  std::string worst_at;

  Figure figure(const char* name) const {
    return {name, absl::StrFormat("%u lists; worst %.2f: %s", lists, worst, worst_at),
            static_cast<double>(good) / static_cast<double>(lists), "of lists", 0.95};
  }
};

}  // namespace

std::vector<Figure> take_planner_figures(const Device& device, const Launcher& launcher,
                                         const TransferSizes& sizes) {
  const Device::Current current(device);
  const Stream stream = device.stream(Direction::kToHost);
  const auto copier = must(Copier::open(device, &launcher, stream));
  const double begin = rig_now();
  must(copier->measure());
  const double measured = (rig_now() - begin) * 1e3;
  const auto slab =
      must(DeviceSlab::create(device, 2 * sizes.grid_bytes, {.rdma = false, .shareable = false}));
  const auto host = must(RegisteredPages::make(device, sizes.grid_bytes));

  std::array<Regrets, 2> regrets;
  for (const CopyRoute route : {CopyRoute::kToHost, CopyRoute::kToDevice}) {
    for (size_t size = 512; size <= (256 << 10); size *= 2) {
      for (size_t count = 1; count <= 2048 && size * count <= sizes.grid_bytes; count *= 2) {
        for (const Gaps gaps : {Gaps::kUneven, Gaps::kEven}) {
          const std::vector<CopyPiece> pieces =
              pages_of(route, gaps, size, count, slab->span().data, host->address());
          const double regret = regret_of(device, stream, *copier, route, pieces);
          Regrets& all = regrets[static_cast<size_t>(gaps)];
          ++all.lists;
          if (regret <= kAlike) ++all.good;
          if (regret > all.worst) {
            all.worst = regret;
            all.worst_at = absl::StrFormat("%u x %u %s", count, size, name_of(route));
          }
        }
      }
    }
  }
  return {regrets[0].figure("planner within 1.10 of the best fixed way"),
          regrets[1].figure("planner within 1.10 of the best fixed way, uneven lists"),
          {"planner's measurement", "", measured, "ms", 150, true}};
}

}  // namespace baton::gpudirect
