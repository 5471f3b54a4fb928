// Pricing sums, and handing them to the kernel of a device.
#include "collectives/executor/device_sums.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <limits>

#include "collectives/executor/control_block.h"
#include "collectives/reduce/reduce.h"

namespace baton::collectives::executor {
namespace {

using baton::internal::VectorSum;
using baton::internal::VectorSums;
using schedules::Step;

static_assert(kLanes <= VectorSums::kSlots, "a lane is a slot");

// The contract's types stand in the order of ours.
static_assert(static_cast<int>(VectorSum::Element::kF16) == static_cast<int>(DataType::kF16));
static_assert(static_cast<int>(VectorSum::Element::kBF16) == static_cast<int>(DataType::kBF16));
static_assert(static_cast<int>(VectorSum::Element::kF64) == static_cast<int>(DataType::kF64));
static_assert(static_cast<int>(VectorSum::Element::kI64) == static_cast<int>(DataType::kI64));

}  // namespace

bool kernel_combines(DataType type, ReduceOp op) {
  // Sums and products are the same with a sign.
  if (type == DataType::kU32 || type == DataType::kU64) {
    return op == ReduceOp::kSum || op == ReduceOp::kProd || op == ReduceOp::kPreMulSum;
  }
  return type <= DataType::kI64 && op <= ReduceOp::kPreMulSum;
}

VectorSum::Element element_of(DataType type) {
  if (type == DataType::kU32) return VectorSum::Element::kI32;
  if (type == DataType::kU64) return VectorSum::Element::kI64;
  return static_cast<VectorSum::Element>(type);
}

VectorSum::Operation operation_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
    case ReduceOp::kPreMulSum:
      return VectorSum::Operation::kSum;
    case ReduceOp::kProd:
      return VectorSum::Operation::kProd;
    case ReduceOp::kMin:
      return VectorSum::Operation::kMin;
    case ReduceOp::kMax:
      return VectorSum::Operation::kMax;
    case ReduceOp::kAnd:
    case ReduceOp::kOr:
    case ReduceOp::kXor:
      break;  // see kernel_combines()
  }
  return VectorSum::Operation::kSum;
}

namespace {

// As much as caches hold: what is combined has just been received.
constexpr size_t kMeasuredBytes = 256 << 10;
constexpr int kMeasurements = 5;

constexpr std::byte kNotPinned{};  // an address of no call's memory

}  // namespace

double DeviceSums::cpu_seconds_per_byte(DataType type) {
  std::optional<double>& price = cpu_[static_cast<size_t>(type)];
  if (price.has_value()) return *price;
  std::vector<std::byte> vectors(2 * kMeasuredBytes);
  std::byte* const second = vectors.data() + kMeasuredBytes;
  double least = std::numeric_limits<double>::infinity();
  for (int i = 0; i < kMeasurements; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    reduce::reduce(type, ReduceOp::kSum, vectors.data(), vectors.data(), second,
                   kMeasuredBytes / size_of(type));
    least = std::min(
        least, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  price = least / static_cast<double>(2 * kMeasuredBytes);
  return *price;
}

SumPrices DeviceSums::prices(const std::vector<PreparedProgram>& programs, const Geometry& geometry,
                             DataType type, ReduceOp op, const std::vector<bool>& in_place,
                             bool input_on_device) {
  const Priced call{&programs, geometry.count, geometry.part_elements, type, op, input_on_device};
  if (call == priced_) return prices_;
  SumPrices out;
  const size_t pieces = geometry.pieces();
  VectorSum sum{.element = element_of(type), .operation = operation_of(op)};
  for (size_t channel = 0; channel < std::min(programs.size(), pieces); ++channel) {
    const size_t times = (pieces - channel + programs.size() - 1) / programs.size();
    for (const Step& step : programs[channel].steps) {
      const bool fold = step.kind == Step::Kind::kFold;
      if (!fold && step.kind != Step::Kind::kReceiveReduce) continue;
      sources_.assign(fold ? in_place.size() : 2, {});
      if (fold && input_on_device) sources_.front().on_device = true;
      if (step.kind == Step::Kind::kReceiveReduce && in_place[step.peer]) {
        sources_.back().data = &kNotPinned;
      }
      sum.sources = sources_;
      // A call of a single piece may have less than a part.
      sum.count = (fold ? 1 : step.parts) *
                  std::min(geometry.part_elements, std::max<size_t>(1, geometry.count));
      out.sums += times;
      out.most_sources = std::max(out.most_sources, sources_.size());
      const auto bytes = static_cast<double>(sources_.size() * sum.count * geometry.element_bytes);
      out.by_cpu += static_cast<double>(times) * bytes * cpu_seconds_per_byte(type);
      out.by_kernel += static_cast<double>(times) * kernel_->seconds(sum);
    }
  }
  priced_ = call;
  prices_ = out;
  return out;
}

// One that cannot be pinned costs a copy more.
void DeviceSums::pin_new_regions() {
  for (; pinned_ < memory_.regions().size(); ++pinned_) {
    const MemoryRegion& region = memory_.regions()[pinned_].local;
    kernel_->pin({region.base, region.size}).IgnoreError();
  }
}

absl::Status DeviceSums::begin(uint32_t lane, DataType type, ReduceOp op, std::byte* target,
                               absl::Span<const void* const> sources, size_t count,
                               uint32_t divide_by, const DeviceInput& input, size_t original) {
  pin_new_regions();
  sources_.clear();
  for (size_t i = 0; i < sources.size(); ++i) {
    const auto* const at = static_cast<const std::byte*>(sources[i]);
    const bool there = i == original && input.device != nullptr && at >= input.host &&
                       at + count * size_of(type) <= input.host + input.bytes;
    sources_.push_back(there ? VectorSum::Source{input.device + (at - input.host), true}
                             : VectorSum::Source{at, false});
  }
  return kernel_->begin(lane, {.element = element_of(type),
                               .operation = operation_of(op),
                               .divide_by = divide_by,
                               .count = count,
                               .sources = sources_,
                               .target = target});
}

void DeviceSums::stop() {
  for (size_t slot = 0; slot < VectorSums::kSlots; ++slot) {
    while (!kernel_->ended(slot).has_value()) sched_yield();
  }
}

}  // namespace baton::collectives::executor
