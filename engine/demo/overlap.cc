// Computes overlap from a timeline's spans.
#include "engine/demo/overlap.h"

#include <map>
#include <utility>

#include "engine/files/trace_spans.h"

namespace baton::engine::demo {

absl::StatusOr<Overlap> measure_overlap(std::string_view text) {
  const absl::StatusOr<std::vector<TraceSpan>> read = read_spans(text);
  if (!read.ok()) return read.status();
  struct Spans {
    std::vector<Interval> transfer, compute;
  };
  std::map<std::pair<int64_t, int64_t>, Spans> requests;  // by process and request
  Overlap total;
  for (const TraceSpan& span : *read) {
    if (span.category != "transfer" && span.category != "compute") continue;
    Spans& spans = requests[{span.process, span.request}];
    const bool transfer = span.category == "transfer";
    (transfer ? spans.transfer : spans.compute).push_back(span.time);
    if (transfer) total.bytes += span.bytes;
  }
  for (auto& [key, spans] : requests) {
    const std::vector<Interval> transfer = merged(std::move(spans.transfer));
    const std::vector<Interval> compute = merged(std::move(spans.compute));
    if (transfer.empty()) continue;
    total.transfer_us += length_us(transfer);
    total.compute_us += length_us(compute);
    total.hidden_us += overlap_us(transfer, compute);
    ++total.requests;
  }
  return total;
}

}  // namespace baton::engine::demo
