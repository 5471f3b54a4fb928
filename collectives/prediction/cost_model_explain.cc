// The cost model's candidates, as a table for people.
#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "collectives/prediction/cost_model.h"

namespace baton::collectives::prediction {
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

}  // namespace baton::collectives::prediction
