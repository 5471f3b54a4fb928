// The loss over the steps of a run, drawn as one SVG file that needs nothing else.
#pragma once

#include <string>
#include <string_view>

#include "absl/types/span.h"

namespace baton::engine::train {

struct LossPoint {
  int step = 0;  // from 0
  double loss = 0;
  double held_out_bits = 0;  // per byte; 0: not measured after this step
};

// Title, axes with round numbers, a dot per step (of at most a thousand), their running mean, and
// the held-out bits per byte as labelled marks. Ignores losses that are no numbers.
std::string draw_loss_curve(absl::Span<const LossPoint> points, std::string_view title);

}  // namespace baton::engine::train
