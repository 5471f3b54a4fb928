// When requests that are under way will have what their clients wait for, if nothing more comes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "transport/clock.h"

namespace baton::engine::serve {

// One choice of a request that has not ended.
struct Pending {
  uint64_t id = 0;
  Time arrival{};
  size_t prompt = 0;    // tokens to compute before its next one
  size_t output = 1;    // tokens that it is expected to write yet
  bool stream = false;  // its client waits for the first token, others for the last
  bool begun = false;   // it has written some
};

// What a step of an engine costs, in seconds.
struct StepCost {
  double fixed = 0, per_token = 0;
  double of(size_t tokens) const { return fixed + per_token * static_cast<double>(tokens); }
};

struct StepSizes {
  size_t places = SIZE_MAX;  // requests in a step
  size_t tokens = SIZE_MAX;  // that it computes
};

// Goes through the steps of an engine as its scheduler makes them: first come, first served,
// prompts in chunks, one token of every answer that has begun. Returns the seconds from now until
// each request has what its client waits for, those of `batch` first; 0 of streams that have begun.
// Costs as much as the prompts have steps and as there are requests, not as answers have tokens.
std::vector<double> forecast(std::span<const Pending> batch, std::span<const Pending> queue,
                             const StepSizes& sizes, const StepCost& cost);

}  // namespace baton::engine::serve
