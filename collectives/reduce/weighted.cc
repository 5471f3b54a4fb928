// Weighted sums and scaled 8-bit rows, over the lanes of reduce-inl.h.
#include "collectives/reduce/reduce.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "collectives/reduce/instruction_sets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "collectives/reduce/weighted.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "hwy/highway.h"

#include "collectives/reduce/reduce-inl.h"

HWY_BEFORE_NAMESPACE();
namespace baton::collectives::reduce {
namespace HWY_NAMESPACE {

// A copy of the last elements, fewer than a vector has perhaps, filled up with zeros.
template <class Lanes>
class LastVector {
 public:
  using T = typename Lanes::Element;
  explicit LastVector(size_t count) : bytes_(count * sizeof(T)) {}
  HWY_INLINE hn::Vec<F> load(const void* from) {
    std::memcpy(padded_, from, bytes_);
    return Lanes::load(padded_);
  }
  HWY_INLINE void store(hn::Vec<F> v, void* to) {
    Lanes::store(v, padded_);
    std::memcpy(to, padded_, bytes_);
  }

 private:
  const size_t bytes_;
  T padded_[hn::MaxLanes(F())] = {};
};

template <class Lanes>
void sum_rows(void* target, const void* const* rows, const float* weights, size_t row_count,
              size_t count) {
  using T = typename Lanes::Element;
  const F f;
  const size_t lanes = hn::Lanes(f);
  T* const out = static_cast<T*>(target);
  const auto row = [&](size_t r) { return static_cast<const T*>(rows[r]); };
  size_t i = 0;
  for (; i + 4 * lanes <= count; i += 4 * lanes) {
    auto by = hn::Set(f, weights[0]);
    const T* from = row(0) + i;
    auto v0 = hn::Mul(Lanes::load(from), by), v1 = hn::Mul(Lanes::load(from + lanes), by),
         v2 = hn::Mul(Lanes::load(from + 2 * lanes), by),
         v3 = hn::Mul(Lanes::load(from + 3 * lanes), by);
    for (size_t r = 1; r < row_count; ++r) {
      by = hn::Set(f, weights[r]);
      from = row(r) + i;
      v0 = hn::MulAdd(Lanes::load(from), by, v0);
      v1 = hn::MulAdd(Lanes::load(from + lanes), by, v1);
      v2 = hn::MulAdd(Lanes::load(from + 2 * lanes), by, v2);
      v3 = hn::MulAdd(Lanes::load(from + 3 * lanes), by, v3);
    }
    Lanes::store(v0, out + i);
    Lanes::store(v1, out + i + lanes);
    Lanes::store(v2, out + i + 2 * lanes);
    Lanes::store(v3, out + i + 3 * lanes);
  }
  for (; i < count; i += lanes) {
    LastVector<Lanes> last(std::min(lanes, count - i));
    auto v = hn::Mul(last.load(row(0) + i), hn::Set(f, weights[0]));
    for (size_t r = 1; r < row_count; ++r) {
      v = hn::MulAdd(last.load(row(r) + i), hn::Set(f, weights[r]), v);
    }
    last.store(v, out + i);
  }
}

template <class Lanes>
void rows_to_e4m3(const void* from, size_t count, uint8_t* target, float* scales) {
  using T = typename Lanes::Element;
  constexpr float kMost = 448.0f;
  const F f;
  const size_t lanes = hn::Lanes(f);
  for (size_t begin = 0; begin < count; begin += kScaledBlock) {
    const T* const in = static_cast<const T*>(from) + begin;
    uint8_t* const out = target + begin;
    const size_t size = std::min(kScaledBlock, count - begin);
    auto most = hn::Zero(f);
    auto odd = hn::Zero(f);  // NaN where there is a NaN or an infinity, else 0
    size_t i = 0;
    const auto look = [&](hn::Vec<F> v) HWY_ATTR {
      most = hn::Max(most, hn::Abs(v));
      odd = hn::MulAdd(v, hn::Zero(f), odd);
    };
    for (; i + lanes <= size; i += lanes) look(Lanes::load(in + i));
    if (i < size) look(LastVector<Lanes>(size - i).load(in + i));
    const float largest = hn::GetLane(hn::MaxOfLanes(f, most));
    const bool finite = hn::GetLane(hn::SumOfLanes(f, odd)) == 0.0f;
    float scale = largest / kMost;
    if (!(scale >= std::numeric_limits<float>::min())) scale = 1.0f;
    if (!finite) scale = std::numeric_limits<float>::quiet_NaN();
    scales[begin / kScaledBlock] = scale;
    const auto by = hn::Set(f, 1.0f / scale);
    for (i = 0; i + lanes <= size; i += lanes) {
      E4M3Lanes::store(hn::Mul(Lanes::load(in + i), by), out + i);
    }
    if (i < size) {
      LastVector<E4M3Lanes>(size - i).store(hn::Mul(LastVector<Lanes>(size - i).load(in + i), by),
                                            out + i);
    }
  }
}

void e4m3_to_f32(const uint8_t* row, const float* scales, size_t count, float* target) {
  const F f;
  const size_t lanes = hn::Lanes(f);
  for (size_t begin = 0; begin < count; begin += kScaledBlock) {
    const auto by = hn::Set(f, scales[begin / kScaledBlock]);
    const size_t end = std::min(begin + kScaledBlock, count);
    size_t i = begin;
    for (; i + lanes <= end; i += lanes) {
      hn::StoreU(hn::Mul(E4M3Lanes::load(row + i), by), f, target + i);
    }
    if (i < end) {
      LastVector<PlainLanes<float>>(end - i).store(
          hn::Mul(LastVector<E4M3Lanes>(end - i).load(row + i), by), target + i);
    }
  }
}

void sum_any(DataType type, void* target, const void* const* rows, const float* weights,
             size_t row_count, size_t count) {
  if (type == DataType::kF32) {
    sum_rows<PlainLanes<float>>(target, rows, weights, row_count, count);
  } else if (type == DataType::kF16) {
    sum_rows<F16Lanes>(target, rows, weights, row_count, count);
  } else {
    sum_rows<BF16Lanes>(target, rows, weights, row_count, count);
  }
}

void to_e4m3_any(DataType type, const void* row, size_t count, uint8_t* target, float* scales) {
  if (type == DataType::kF32) {
    rows_to_e4m3<PlainLanes<float>>(row, count, target, scales);
  } else if (type == DataType::kF16) {
    rows_to_e4m3<F16Lanes>(row, count, target, scales);
  } else {
    rows_to_e4m3<BF16Lanes>(row, count, target, scales);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace baton::collectives::reduce
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace baton::collectives::reduce {
namespace {
HWY_EXPORT(sum_any);
HWY_EXPORT(to_e4m3_any);
HWY_EXPORT(e4m3_to_f32);
}  // namespace

void weighted_sum(DataType type, void* target, absl::Span<const void* const> rows,
                  absl::Span<const float> weights, size_t count) {
  if (rows.empty()) {
    std::memset(target, 0, count * size_of(type));
    return;
  }
  HWY_DYNAMIC_DISPATCH(sum_any)(type, target, rows.data(), weights.data(), rows.size(), count);
}

void to_e4m3(DataType type, const void* row, size_t count, uint8_t* target, float* scales) {
  HWY_DYNAMIC_DISPATCH(to_e4m3_any)(type, row, count, target, scales);
}

void from_e4m3(const uint8_t* row, const float* scales, size_t count, float* target) {
  HWY_DYNAMIC_DISPATCH(e4m3_to_f32)(row, scales, count, target);
}

}  // namespace baton::collectives::reduce
#endif  // HWY_ONCE
