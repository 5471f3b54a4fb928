// Workers that go down and come back, and what the log says of them.
#include "engine/router/workers.h"

#include <utility>

#include "transport/base/log.h"

namespace baton::engine::router {
namespace {

// So often a worker that has never answered is looked at before the log says that it does not.
constexpr int kLooksAtStart = 10;

}  // namespace

void Workers::set_down(WorkerGroup& group, size_t worker, std::string why) {
  Standing& standing = group.standings[worker];
  group.why_down[worker] = std::move(why);
  if (group.picker.is_up(worker) && standing.answered) standing.down_at = Clock::steady().now();
  group.picker.set_up(worker, false);
  // Servers that are started together do not answer at once.
  if (!standing.answered && ++standing.looks < kLooksAtStart) return;
  if (std::exchange(standing.told, true)) return;
  base::log_event(base::LogLevel::kWarning, "router: %s worker %s is not used: %s", group.role,
                  group.name(worker), group.why_down[worker]);
}

void Workers::set_up(WorkerGroup& group, size_t worker) {
  Standing& standing = group.standings[worker];
  const bool was_up = group.picker.is_up(worker);
  group.picker.set_up(worker, true);
  const bool first = !std::exchange(standing.answered, true);
  const bool told = std::exchange(standing.told, false);
  if (!told && was_up && !first) return;
  base::log_event(told ? base::LogLevel::kWarning : base::LogLevel::kInfo,
                  "router: %s worker %s is used%s", group.role, group.name(worker),
                  told && !first ? " again" : "");
}

Workers::Hope Workers::hope(const WorkerPicker::Model& model, bool resume, Time now) const {
  Hope best = Hope::kNone;
  for (const size_t i : decode.picker.fitting(model, resume)) {
    const Standing& standing = decode.standings[i];
    if (decode.picker.is_up(i)) return Hope::kNow;
    if (standing.answered && now - standing.down_at < comeback) best = Hope::kSoon;
  }
  return best;
}

}  // namespace baton::engine::router
