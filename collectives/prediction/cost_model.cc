// The cost model: predicting every candidate of a call, and choosing the fastest.
#include "collectives/prediction/cost_model.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_format.h"
#include "collectives/prediction/cost_model_shape.h"
#include "transport/base/wire.h"

namespace baton::collectives::prediction {

using schedules::ScheduleSpec;

namespace {

constexpr size_t kLeastChunk = 16 << 10;
constexpr size_t kCacheLine = 64;
constexpr size_t kMostShapes = 512;

struct ShapeKey {
  ScheduleSpec spec;
  uint32_t node_size = 1;
  bool operator==(const ShapeKey&) const = default;
  template <typename H>
  friend H AbslHashValue(H hash, const ShapeKey& key) {
    const ScheduleSpec& s = key.spec;
    return H::combine(std::move(hash), static_cast<int>(s.collective),
                      static_cast<int>(s.algorithm), s.ranks, s.node_size, s.channels, s.ordered,
                      key.node_size);
  }
};

size_t divide_up(size_t a, size_t b) { return a / b + (a % b != 0 ? 1 : 0); }

// Whole elements, and whole cache lines where a part is longer than a few.
size_t round_part(size_t bytes, size_t element_bytes, bool up) {
  size_t unit = element_bytes;
  if (bytes >= 16 * kCacheLine && kCacheLine % element_bytes == 0) unit = kCacheLine;
  return std::max(element_bytes, up ? divide_up(bytes, unit) * unit : bytes / unit * unit);
}

// Remembered for all models of the process: its groups, and its ranks where it has several, count
// alike.
absl::StatusOr<std::shared_ptr<const ScheduleShape>> shape_of(const ScheduleSpec& spec,
                                                              uint32_t node_size) {
  static std::mutex mutex;
  static auto& known = *new absl::flat_hash_map<ShapeKey, std::shared_ptr<const ScheduleShape>>;
  if (absl::Status status = schedules::validate(spec); !status.ok()) return status;
  ShapeKey key{spec, node_size};
  key.spec.root = 0;  // as far as time goes, the schedule is the same for all roots
  const std::lock_guard lock(mutex);
  if (const auto at = known.find(key); at != known.end()) return at->second;
  absl::StatusOr<ScheduleShape> counted = count_shape(key.spec, node_size);
  if (!counted.ok()) return counted.status();
  if (known.size() >= kMostShapes) known.clear();
  return known.emplace(key, std::make_shared<const ScheduleShape>(*std::move(counted)))
      .first->second;
}

// Seconds for parts of so many bytes, of which pieces in flight take turns in `lanes`.
double predict(const ScheduleShape& shape, const CostParameters& cost, const CallShape& call,
               size_t part_bytes, uint32_t lanes) {
  const size_t whole = std::max<size_t>(1, divide_up(call.bytes, shape.parts));
  const size_t part = std::clamp<size_t>(part_bytes, 1, whole);
  const double pieces = static_cast<double>(whole) / static_cast<double>(part);
  const double turns = std::ceil(std::ceil(pieces) / lanes);
  const bool barrier = call.collective == Collective::kBarrier;
  const PieceSeconds seconds =
      price(shape, cost, barrier || call.bytes == 0 ? 0 : static_cast<double>(part));
  // The first piece fills the pipeline; then either a core or a port is always busy, or each lane
  // waits for its own piece before it begins the next.
  return seconds.alone + std::max((pieces - 1) * seconds.busy, (turns - 1) * seconds.next);
}

}  // namespace

CostModel::CostModel(CostParameters parameters, size_t slot_bytes, uint32_t lanes)
    : slot_bytes_(std::max<size_t>(1, slot_bytes)), lanes_(std::max(1u, lanes)) {
  set_parameters(parameters);
}

void CostModel::set_parameters(const CostParameters& parameters) {
  parameters_ = parameters;
  parameters_.node_size = std::max(1u, parameters.node_size);
}

absl::StatusOr<std::vector<Choice>> CostModel::candidates(const CallShape& call,
                                                          const Override& fixed) const {
  std::vector<Algorithm> algorithms = schedules::algorithms_for(call.collective, call.ordered);
  if (fixed.algorithm) algorithms = {*fixed.algorithm};
  std::vector<Choice> out;
  absl::Status refused = absl::InvalidArgumentError(
      absl::StrFormat("%s runs by no schedule", std::string(name_of(call.collective))));
  for (Algorithm algorithm : algorithms) {
    const bool hierarchical = algorithm == Algorithm::kHierarchical;
    const uint32_t node_size = parameters_.node_size;
    if (hierarchical && !fixed.algorithm && (node_size == 1 || node_size >= call.ranks)) {
      continue;  // no hierarchy
    }
    for (uint32_t channels : {1u, 2u}) {
      if (fixed.channels != 0 && channels > 1) break;
      Choice choice;
      choice.spec = {.collective = call.collective,
                     .algorithm = algorithm,
                     .ranks = call.ranks,
                     .root = call.root,
                     .node_size = hierarchical ? node_size : 1,
                     .channels = fixed.channels != 0 ? fixed.channels : channels,
                     .ordered = call.ordered};
      if (call.uneven && !schedules::takes_uneven_blocks(choice.spec)) {
        refused = absl::InvalidArgumentError(absl::StrFormat(
            "%s does not take blocks of different lengths: use direct", choice.spec.to_string()));
        continue;
      }
      const auto shape = shape_of(choice.spec, node_size);
      if (!shape.ok()) {
        if (channels == 1) refused = shape.status();
        continue;
      }
      if (channels == 2 && !(*shape)->channels_differ) continue;
      const size_t message_parts = (*shape)->max_message_parts;
      const size_t whole = std::max<size_t>(1, divide_up(call.bytes, (*shape)->parts));
      const size_t most =
          fixed.chunk_bytes != 0 ? std::min(fixed.chunk_bytes, slot_bytes_) : slot_bytes_;
      if (message_parts * call.element_bytes > slot_bytes_) {
        refused = absl::InvalidArgumentError(absl::StrFormat(
            "a message of %s carries %u parts of at least %u bytes, but slots hold %u bytes: use "
            "larger slots or another algorithm",
            choice.spec.to_string(), message_parts, call.element_bytes, slot_bytes_));
        continue;
      }
      const size_t least = fixed.chunk_bytes != 0 ? most : std::min(kLeastChunk, most);
      size_t before = 0;
      for (size_t chunk = most; chunk >= least && chunk > 0; chunk /= 2) {
        // As few pieces as this chunk allows, all alike.
        const size_t full = round_part(chunk / message_parts, call.element_bytes, false);
        const size_t pieces = divide_up(whole, full);
        if (channels == 2 && pieces < 2) continue;  // the second would have nothing to do
        choice.part_bytes =
            std::min(full, round_part(divide_up(whole, pieces), call.element_bytes, true));
        if (choice.part_bytes == before) continue;
        before = choice.part_bytes;
        choice.seconds = predict(**shape, parameters_, call, choice.part_bytes, lanes_);
        out.push_back(choice);
      }
    }
  }
  if (out.empty()) return refused;
  std::stable_sort(out.begin(), out.end(),
                   [](const Choice& a, const Choice& b) { return a.seconds < b.seconds; });
  return out;
}

absl::StatusOr<Choice> CostModel::choose(const CallShape& call, const Override& fixed) const {
  absl::StatusOr<std::vector<Choice>> all = candidates(call, fixed);
  if (!all.ok()) return all.status();
  return all->front();
}

// The cost model's candidates, as a table for people.

namespace {

std::string size_text(size_t bytes) {
  if (bytes >= size_t{1} << 30) return absl::StrFormat("%.1f GiB", bytes / double{1 << 30});
  if (bytes >= size_t{1} << 20) return absl::StrFormat("%.1f MiB", bytes / double{1 << 20});
  if (bytes >= size_t{1} << 10) return absl::StrFormat("%.1f KiB", bytes / double{1 << 10});
  return absl::StrFormat("%u B", bytes);
}

}  // namespace

std::string explain(const CallShape& call, absl::Span<const Choice> candidates,
                    double actual_seconds) {
  std::string out =
      absl::StrFormat("%s of %s among %u ranks%s\n", std::string(name_of(call.collective)),
                      size_text(call.bytes), call.ranks, call.ordered ? ", ordered" : "");
  if (candidates.empty()) return out + "  no candidates\n";
  absl::StrAppendFormat(&out, "  %-20s %8s %10s %14s %8s %12s\n", "algorithm", "channels", "chunk",
                        "predicted (us)", "to best", "actual (us)");
  const double best = std::max(candidates.front().seconds, 1e-12);
  std::vector<schedules::ScheduleSpec> shown;  // with the best of their chunks
  for (const Choice& choice : candidates) {
    if (std::find(shown.begin(), shown.end(), choice.spec) != shown.end()) continue;
    const bool chosen = shown.empty();
    shown.push_back(choice.spec);
    const size_t chunk =
        choice.part_bytes * std::max(1u, schedules::max_message_parts(choice.spec));
    absl::StrAppendFormat(&out, "%s %-20s %8u %10s %14.2f %7.2fx", chosen ? "*" : " ",
                          std::string(name_of(choice.spec.algorithm)), choice.spec.channels,
                          size_text(chunk), choice.seconds * 1e6, choice.seconds / best);
    if (chosen && actual_seconds > 0) {
      absl::StrAppendFormat(&out, " %12.2f", actual_seconds * 1e6);
    }
    out += '\n';
  }
  return out;
}

// What machines and links cost, from rank to rank: encoding, decoding, agreeing.

namespace {

constexpr uint32_t kMagic = 0x32504342;  // "BCP2"
constexpr double kMostSeconds = 1e6;     // more is no measurement

using Field = double& (*)(CostParameters&);
constexpr Field kFields[] = {
    [](CostParameters& p) -> double& { return p.local.alpha; },
    [](CostParameters& p) -> double& { return p.local.beta; },
    [](CostParameters& p) -> double& { return p.remote.alpha; },
    [](CostParameters& p) -> double& { return p.remote.beta; },
    [](CostParameters& p) -> double& { return p.gamma; },
    [](CostParameters& p) -> double& { return p.step; },
    [](CostParameters& p) -> double& { return p.shared_step; },
};

bool is_cost(double seconds) {
  return std::isfinite(seconds) && seconds >= 0 && seconds <= kMostSeconds;
}

// The lower one of the two in the middle: a value that a rank has measured.
template <typename T>
T median(std::vector<T>& values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>((values.size() - 1) / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

CostParameters agree(absl::Span<const CostParameters> measured) {
  CostParameters agreed;
  std::vector<double> values;
  for (Field field : kFields) {
    values.clear();
    for (CostParameters one : measured) {
      if (is_cost(field(one))) values.push_back(field(one));
    }
    if (!values.empty()) field(agreed) = median(values);
  }
  std::vector<uint32_t> sizes;
  for (const CostParameters& one : measured) {
    if (one.node_size > 0) sizes.push_back(one.node_size);
  }
  if (!sizes.empty()) agreed.node_size = median(sizes);
  return agreed;
}

std::string encode(const CostParameters& parameters) {
  std::string bytes;
  bytes.reserve(kEncodedCostBytes);
  base::put_number(bytes, kMagic);
  base::put_number(bytes, parameters.node_size);
  CostParameters copy = parameters;
  for (Field field : kFields) base::put_number(bytes, std::bit_cast<uint64_t>(field(copy)));
  return bytes;
}

absl::StatusOr<CostParameters> decode_cost_parameters(std::string_view bytes) {
  base::WireReader reader(bytes);
  const auto magic = reader.number<uint32_t>();
  CostParameters parameters;
  parameters.node_size = reader.number<uint32_t>();
  for (Field field : kFields) {
    field(parameters) = std::bit_cast<double>(reader.number<uint64_t>());
  }
  if (!reader.finished() || magic != kMagic) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%d bytes are not the encoded costs of a machine: those are %d bytes and begin with BCP2",
        bytes.size(), kEncodedCostBytes));
  }
  return parameters;
}

}  // namespace baton::collectives::prediction
