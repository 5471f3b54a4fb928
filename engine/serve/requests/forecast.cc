// An engine's steps, reckoned ahead.
#include "engine/serve/requests/forecast.h"

#include <algorithm>

namespace baton::engine::serve {
namespace {

struct Running {
  size_t at = 0;  // in the result
  size_t prompt = 0, output = 0;
  bool first_token = false;  // is what its client waits for
};

}  // namespace

std::vector<double> forecast(std::span<const Pending> batch, std::span<const Pending> queue,
                             const StepSizes& sizes, const StepCost& cost) {
  std::vector<double> ends(batch.size() + queue.size());
  std::vector<Running> running;
  const auto start = [&](const Pending& one, size_t at) {
    running.push_back({at, one.prompt, std::max<size_t>(one.output, 1), one.stream && !one.begun});
  };
  for (size_t i = 0; i < batch.size(); ++i) start(batch[i], i);
  size_t next = 0;
  double now = 0;
  while (!running.empty() || next < queue.size()) {
    // A step: those that run first, then as many more as there is room for.
    size_t budget = sizes.tokens, tokens = 0, shortest = SIZE_MAX, served = 0;
    bool alike = next == queue.size() || running.size() >= sizes.places;  // as the next steps are
    std::vector<size_t> chunks;
    for (size_t i = 0; budget > 0; ++i) {
      if (i == running.size()) {
        if (next == queue.size() || i >= std::max<size_t>(sizes.places, 1)) break;
        start(queue[next], batch.size() + next);
        ++next;
        alike = false;
      }
      const Running& one = running[i];
      const size_t chunk = one.prompt > 0 ? std::min(one.prompt, budget) : 1;
      alike &= one.prompt == 0 && !one.first_token;
      shortest = std::min(shortest, one.output);
      budget -= chunk;
      tokens += chunk;
      chunks.push_back(chunk);
    }
    served = chunks.size();
    alike &= served == running.size();
    const size_t steps = alike ? shortest : 1;
    now += static_cast<double>(steps) * cost.of(tokens);
    size_t kept = 0;
    for (size_t i = 0; i < running.size(); ++i) {
      Running& one = running[i];
      bool wrote = i < served;
      if (wrote && one.prompt > 0) {
        one.prompt -= chunks[i];
        wrote = one.prompt == 0;  // the step that ends a prompt writes a token
      }
      if (wrote) {
        one.output -= steps;
        if (one.first_token || (one.output == 0 && ends[one.at] == 0)) ends[one.at] = now;
        one.first_token = false;
      }
      if (one.output > 0) running[kept++] = one;
    }
    running.resize(kept);
  }
  for (size_t i = 0; i < batch.size(); ++i) {
    if (batch[i].stream && batch[i].begun) ends[i] = 0;
  }
  return ends;
}

}  // namespace baton::engine::serve
