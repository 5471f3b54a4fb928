// Fits of what computing and loading cost, and their comparison.
#include "engine/serve/cache/load_choice.h"

#include <algorithm>
#include <chrono>

namespace baton::engine::serve {
namespace {

constexpr double kDecay = 0.97;       // of older points, with each new one
constexpr size_t kFewestTokens = 16;  // of a step that says what a token costs

}  // namespace

void LinearFit::add(double x, double y, double weight) {
  for (double* sum : {&weight_, &x_, &y_, &xx_, &xy_}) *sum *= kDecay;
  weight_ += weight;
  x_ += weight * x;
  y_ += weight * y;
  xx_ += weight * x * x;
  xy_ += weight * x * y;
}

double LinearFit::at(double x) const {
  if (!known()) return 0;
  const double mean_x = x_ / weight_;
  const double mean_y = y_ / weight_;
  const double spread = xx_ / weight_ - mean_x * mean_x;
  double slope = 0;
  if (spread > 1e-9 * mean_x * mean_x) {
    slope = std::max(0.0, (xy_ / weight_ - mean_x * mean_y) / spread);
  }
  double intercept = mean_y - slope * mean_x;
  if (intercept < 0) {  // through the origin instead
    intercept = 0;
    slope = xx_ > 0 ? xy_ / xx_ : 0;
  }
  return intercept + slope * x;
}

void LoadChoice::computed(size_t first, size_t tokens, Time took) {
  if (tokens < kFewestTokens) return;
  const auto n = static_cast<double>(tokens);
  compute_.add(static_cast<double>(first) + n / 2, seconds_of(took) / n, n);
}

void LoadChoice::loaded(size_t blocks, LoadPlace place, Time took) {
  loads_[static_cast<size_t>(place)].add(static_cast<double>(blocks), seconds_of(took));
}

double LoadChoice::compute_seconds(size_t first, size_t tokens) const {
  const auto n = static_cast<double>(tokens);
  return n * compute_.at(static_cast<double>(first) + n / 2);
}

double LoadChoice::load_seconds(size_t blocks, LoadPlace place) const {
  return loads_[static_cast<size_t>(place)].at(static_cast<double>(blocks));
}

bool LoadChoice::load_is_quicker(size_t first, size_t tokens, size_t blocks, LoadPlace place) {
  const bool known = compute_.known() && loads_[static_cast<size_t>(place)].known();
  if (!known || load_seconds(blocks, place) <= compute_seconds(first, tokens) ||
      ++refused_ >= kTryAgain) {
    refused_ = 0;
    return true;
  }
  return false;
}

}  // namespace baton::engine::serve
