// Whether the KV of a prompt is quicker loaded than computed: both rates as they are measured.
//
// Computing token p costs a + b p (the second part is attention), loading n blocks c + d n; the
// four numbers are least-squares fits over what has happened lately, for each place that blocks
// come from. What has not been measured yet is tried. A place that has lost every comparison for a
// while is tried again, for it may have become quicker.
#pragma once

#include <cstddef>
#include <cstdint>

#include "transport/clock.h"

namespace baton::engine::serve {

// Where the blocks of a load come from: the slowest of their places.
enum class LoadPlace : uint8_t { kHost, kDisk, kPeer };

// When blocks that are in a place are loaded.
enum class LoadWhen : uint8_t { kQuicker, kAlways, kNever };

// y = intercept + slope * x, both at least 0, fitted over points that lose weight with age.
class LinearFit {
 public:
  // `weight`: how much the point counts.
  void add(double x, double y, double weight = 1);
  bool known() const { return weight_ > 0; }
  double at(double x) const;

 private:
  double weight_ = 0, x_ = 0, y_ = 0, xx_ = 0, xy_ = 0;  // sums
};

// Not thread-safe.
class LoadChoice {
 public:
  // A step computed tokens [first, first + tokens) of one prompt, and nothing else.
  void computed(size_t first, size_t tokens, Time took);
  // A load brought blocks.
  void loaded(size_t blocks, LoadPlace place, Time took);

  // To bring `blocks` blocks that hold tokens [first, first + tokens): load them?
  bool load_is_quicker(size_t first, size_t tokens, size_t blocks, LoadPlace place);

  // What it reckons with, in seconds; 0 where nothing is known.
  double compute_seconds(size_t first, size_t tokens) const;
  double load_seconds(size_t blocks, LoadPlace place) const;

 private:
  static constexpr uint32_t kTryAgain = 64;  // refusals

  LinearFit compute_;   // seconds per token, over the position
  LinearFit loads_[3];  // seconds of a load, over its blocks, for each place
  uint32_t refused_ = 0;
};

}  // namespace baton::engine::serve
