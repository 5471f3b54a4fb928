// The demo's report: a line of what was moved, and a table of times over the slow link.
#include "engine/demo/demo_report.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/files/trace_spans.h"
#include "engine/serve/metrics.h"

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

namespace {

std::string link_sentence(const DemoResults& results) {
  return absl::StrFormat(
      "A link of %.1f MB/s: sending the %.2f MB of KV of a prompt of %d tokens takes %.2f of the "
      "time that computing it takes",
      results.link_bytes_per_second * 1e-6, static_cast<double>(results.link_bytes) * 1e-6,
      results.link_prompt, results.ratio);
}

}  // namespace

std::string moved_line(const DemoResults& results) {
  return absl::StrFormat("  KV moved: %.2f MB in %d requests; route: %s\n",
                         static_cast<double>(results.moved.bytes) * 1e-6, results.moved.requests,
                         results.route);
}

std::string link_table(const DemoResults& results) {
  std::string out = absl::StrFormat("  %s.\n  %-18s %14s %14s %14s\n", link_sentence(results), "",
                                    "TTFT median", "x one process", "hidden");
  const double alone = serve::percentile(results.link_runs[0].ttft_ms, 50);
  for (const DemoLinkRun& run : results.link_runs) {
    const double median = serve::percentile(run.ttft_ms, 50);
    absl::StrAppendFormat(
        &out, "  %-18s %11.2f ms %14.2f %14s\n", run.name, median, median / alone,
        run.has_transfer ? absl::StrFormat("%.0f %%", 100 * run.overlap.hidden_share()) : "");
  }
  return out;
}

}  // namespace baton::engine::demo
