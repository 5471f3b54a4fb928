// What something costs, as a sum of parts that are never negative: y = c0 x0 + c1 x1 + ...
//
// Least squares of relative errors, so that what is small is known as well as what is large. Points
// lose weight with age. One that is far above what was expected counts only if the last one of
// about its size was as far: a moment in which the machine was busy is no news, a place that has
// become slow is. Then, and where one is far below, older points lose weight until they agree with
// it.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace baton::engine::serve {

template <size_t N>
class CostFit {
 public:
  using Terms = std::array<double, N>;

  // `size`: how much it is that costs `y`, which is positive.
  void add(size_t size, const Terms& x, double y) {
    const bool far_above = points_ > 0 && y > kFar * at(x);
    const uint64_t about = uint64_t{1} << (std::bit_width(size) % 64);
    const bool again = (far_above_ & about) != 0;
    far_above_ = far_above && !again ? far_above_ | about : far_above_ & ~about;
    ++points_;
    if (far_above && !again) return;
    const double weight = 1 / (y * y);
    for (double keep = kDecay; keep > kLeast; keep *= kForget) {
      Sums sums = sums_;
      for (size_t i = 0; i < N; ++i) {
        sums.xy[i] = keep * sums.xy[i] + weight * x[i] * y;
        for (size_t j = 0; j < N; ++j) sums.xx[i][j] = keep * sums.xx[i][j] + weight * x[i] * x[j];
      }
      parts_ = fit(sums);
      if (keep * kForget > kLeast && (y > kFar * at(x) || kFar * y < at(x))) continue;
      sums_ = sums;
      return;
    }
  }
  size_t points() const { return points_; }
  // 0 where nothing is known.
  double at(const Terms& x) const {
    double sum = 0;
    for (size_t i = 0; i < N; ++i) sum += parts_[i] * x[i];
    return sum;
  }

 private:
  static constexpr double kDecay = 0.97;  // of older points, with each new one
  static constexpr double kForget = 0.5;  // of those that are wrong, again and again
  static constexpr double kLeast = 1e-9;
  static constexpr double kFar = 3;
  static constexpr double kSame = 1e-6;

  struct Sums {
    std::array<std::array<double, N>, N> xx{};
    Terms xy{};
  };

  // The best choice of nonzero parts without negative parts; of equally good ones, that with the
  // first parts. There are so few that all are tried.
  static Terms fit(const Sums& sums) {
    Terms best{};
    double least = 0;  // the error without any part, less a constant
    for (uint32_t some = 1; some < (1U << N); ++some) {
      Terms parts{};
      if (!solve(sums, some, &parts)) continue;
      double error = 0;
      for (size_t i = 0; i < N; ++i) {
        error -= 2 * parts[i] * sums.xy[i];
        for (size_t j = 0; j < N; ++j) error += parts[i] * sums.xx[i][j] * parts[j];
      }
      if (error >= least + kSame * least) continue;  // they are negative
      least = error;
      best = parts;
    }
    return best;
  }

  // The normal equations of these parts, by elimination; false: they say too little, or a part
  // would be negative.
  static bool solve(const Sums& sums, uint32_t some, Terms* parts) {
    std::array<size_t, N> at{};
    size_t n = 0;
    for (size_t i = 0; i < N; ++i) {
      if ((some >> i & 1) != 0) at[n++] = i;
    }
    std::array<std::array<double, N>, N> a{};
    Terms b{};
    for (size_t i = 0; i < n; ++i) {
      b[i] = sums.xy[at[i]];
      for (size_t j = 0; j < n; ++j) a[i][j] = sums.xx[at[i]][at[j]];
    }
    for (size_t i = 0; i < n; ++i) {
      if (a[i][i] <= kSame * sums.xx[at[i]][at[i]]) return false;  // another part says the same
      for (size_t k = i + 1; k < n; ++k) {
        const double factor = a[k][i] / a[i][i];
        for (size_t j = i; j < n; ++j) a[k][j] -= factor * a[i][j];
        b[k] -= factor * b[i];
      }
    }
    for (size_t i = n; i-- > 0;) {
      for (size_t j = i + 1; j < n; ++j) b[i] -= a[i][j] * b[j];
      b[i] /= a[i][i];
      if (b[i] < 0) return false;
      (*parts)[at[i]] = b[i];
    }
    return true;
  }

  Sums sums_;
  Terms parts_{};
  size_t points_ = 0;
  uint64_t far_above_ = 0;  // the last one of about a size was, by the number of its bits
};

}  // namespace baton::engine::serve
