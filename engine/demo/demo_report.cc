// The demo's report: tables in text and HTML, and timelines as inline SVG.
#include "engine/demo/demo_report.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/files/json_fields.h"
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

using nlohmann::json;

constexpr const char* kStyle = R"css(
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #667; --paper: #fff; --line: #d5d9e0;
  --compute: #3b6fb6; --transfer: #d9822b; --wait: #b9c0cc; --decode: #2e8b62; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ec; --soft: #9aa3b2; --paper: #15181d;
  --line: #343a45; --compute: #6b9be0; --transfer: #e9a45c; --wait: #4a5261; --decode: #5bbd92; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
p.note, figcaption { color: var(--soft); font-size: .9rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .8rem 0; }
th, td { padding: .3rem .9rem; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
th { font-weight: 600; color: var(--soft); font-size: .9rem; }
figure { margin: 1rem 0; } svg { width: 100%; height: auto; display: block; }
svg text { font: 12px system-ui, sans-serif; fill: var(--soft); }
.compute { fill: var(--compute); } .transfer { fill: var(--transfer); } .wait { fill: var(--wait); }
.decode { fill: var(--decode); } .grid { stroke: var(--line); stroke-width: 1; }
.first { stroke: var(--ink); stroke-width: 1.5; stroke-dasharray: 4 3; }
blockquote { margin: .8rem 0; padding-left: 1rem; border-left: 3px solid var(--line); }
blockquote b { font-weight: 500; color: var(--compute); }
.key span { display: inline-block; margin-right: 1.2rem; font-size: .9rem; color: var(--soft); }
.key i { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px;
  margin-right: .35rem; vertical-align: -1px; }
)css";

std::string escape(std::string_view text) {
  std::string out;
  for (char c : text) {
    if (c == '<') {
      out += "&lt;";
    } else if (c == '>') {
      out += "&gt;";
    } else if (c == '&') {
      out += "&amp;";
    } else {
      out += c;
    }
  }
  return out;
}

struct Slice {
  std::string name;
  std::string kind;  // CSS class
  int row = 0;
  double begin = 0, end = 0;  // ms from the start of prefill
};

struct Drawing {
  std::vector<Slice> slices;
  double first_token = 0;
};

constexpr const char* kRows[] = {"prefill computes", "KV on the link", "decode"};

double at(const json& event, const char* key) {
  return number_field(event, key, 0, 1e18, 0).value_or(0) * 1e-3;
}

// The request in the timeline whose time to first token is closest to the median: what it computed
// and moved. Each request was run alone, so whatever lies between the beginning of its prefill and
// that of the next one belongs to it.
Drawing typical_request(const DemoLinkRun& run) {
  std::vector<const json*> events;
  std::map<int64_t, std::string> names;
  for (const json& event : member(run.timeline, "traceEvents")) {
    const std::string phase = string_field(event, "ph", "").value_or("");
    const int64_t pid = int_field(event, "pid", 0, INT64_MAX, 0).value_or(0);
    if (phase == "M" && member(event, "name") == "process_name") {
      names[pid] = string_field(member(event, "args"), "name", "").value_or("");
    } else if (phase == "X") {
      events.push_back(&event);
    }
  }
  std::sort(events.begin(), events.end(),
            [](const json* a, const json* b) { return at(*a, "ts") < at(*b, "ts"); });
  // A prompt may be computed in several chunks: only a new request begins a new window.
  std::vector<double> starts;
  int64_t last_request = -1;
  for (const json* event : events) {
    const int64_t pid = int_field(*event, "pid", 0, INT64_MAX, 0).value_or(0);
    if (member(*event, "cat") != "compute" || names[pid] == "decode") continue;
    const int64_t request =
        int_field(member(*event, "args"), "request", 0, INT64_MAX, 0).value_or(0);
    if (request != last_request) starts.push_back(at(*event, "ts"));
    last_request = request;
  }
  const double median = serve::percentile(run.ttft_ms, 50);
  Drawing best;
  for (size_t i = 0; i < starts.size(); ++i) {
    const double end = i + 1 < starts.size() ? starts[i + 1] : 1e300;
    Drawing drawing;
    for (const json* event : events) {
      const double begin = at(*event, "ts");
      if (begin < starts[i] || begin >= end) continue;
      const std::string track = string_field(*event, "cat", "").value_or("");
      if (track != "compute" && track != "transfer" && track != "wait") continue;
      const bool decode = names[int_field(*event, "pid", 0, INT64_MAX, 0).value_or(0)] == "decode";
      Slice slice;
      slice.name = string_field(*event, "name", "").value_or("");
      slice.kind = decode && track == "compute" ? "decode" : track;
      slice.row = track == "transfer" ? 1 : decode ? 2 : 0;
      slice.begin = begin - starts[i];
      slice.end = slice.begin + at(*event, "dur");
      // The token comes from decode; prefill may still finish a layer that no request waits for.
      if (slice.kind == (run.has_transfer ? "decode" : "compute")) {
        drawing.first_token = std::max(drawing.first_token, slice.end);
      }
      drawing.slices.push_back(std::move(slice));
    }
    if (best.slices.empty() ||
        std::abs(drawing.first_token - median) < std::abs(best.first_token - median)) {
      best = std::move(drawing);
    }
  }
  return best;
}

// Slices of the link may wait for each other: where they overlap, the later one begins when the
// earlier one ends.
void untangle(std::vector<Slice>* slices) {
  double busy_until = 0;
  for (Slice& slice : *slices) {
    if (slice.row != 1) continue;
    slice.begin = std::min(std::max(slice.begin, busy_until), slice.end);
    busy_until = std::max(busy_until, slice.end);
  }
}

std::string svg(Drawing drawing, double span_ms, bool pair) {
  constexpr double kLeft = 120, kWidth = 820, kRowHeight = 30;
  const int rows = pair ? 3 : 1;
  const double height = rows * kRowHeight + 26;
  const auto x = [&](double t) { return kLeft + t / span_ms * kWidth; };
  untangle(&drawing.slices);
  std::string out = absl::StrFormat("<svg viewBox=\"0 0 960 %.0f\" role=\"img\">\n", height);
  double step = 1;
  while (span_ms / step > 12) step *= step * 2 > 10 ? 5 : 2;
  for (double t = 0; t <= span_ms; t += step) {
    absl::StrAppendFormat(&out,
                          "<line class=\"grid\" x1=\"%.1f\" x2=\"%.1f\" y1=\"0\" y2=\"%.0f\"/>"
                          "<text x=\"%.1f\" y=\"%.0f\" text-anchor=\"middle\">%g</text>\n",
                          x(t), x(t), height - 20, x(t), height - 6, t);
  }
  for (int row = 0; row < rows; ++row) {
    absl::StrAppendFormat(&out, "<text x=\"0\" y=\"%.0f\">%s</text>\n", row * kRowHeight + 19.0,
                          pair ? kRows[row] : "computes");
  }
  for (const Slice& slice : drawing.slices) {
    absl::StrAppendFormat(
        &out,
        "<rect class=\"%s\" x=\"%.2f\" y=\"%.0f\" width=\"%.2f\" height=\"20\" rx=\"2\">"
        "<title>%s: %.2f to %.2f ms</title></rect>\n",
        slice.kind, x(slice.begin), slice.row * kRowHeight + 4.0,
        std::max(x(slice.end) - x(slice.begin) - 0.8, 0.8), escape(slice.name), slice.begin,
        slice.end);
  }
  absl::StrAppendFormat(
      &out, "<line class=\"first\" x1=\"%.1f\" x2=\"%.1f\" y1=\"0\" y2=\"%.0f\"/></svg>\n",
      x(drawing.first_token), x(drawing.first_token), height - 20);
  return out;
}

std::string link_sentence(const DemoResults& results) {
  return absl::StrFormat(
      "A link of %.1f MB/s: sending the %.2f MB of KV of a prompt of %d tokens takes %.2f of the "
      "time that computing it takes",
      results.link_bytes_per_second * 1e-6, static_cast<double>(results.link_bytes) * 1e-6,
      results.link_prompt, results.ratio);
}

std::string moved_sentence(const DemoResults& results) {
  return absl::StrFormat(
      "KV moved: %.2f MB in %d requests; sent in one go it travels at %.2f GB/s; route: %s",
      static_cast<double>(results.moved.bytes) * 1e-6, results.moved.requests,
      results.route_gb_per_second, results.route);
}

}  // namespace

std::string latency_table(const DemoResults& results) {
  std::string out = absl::StrFormat("  %-18s %18s %18s %18s\n", "milliseconds", "TTFT p50/p99",
                                    "TPOT p50/p99", "ITL p50/p99");
  for (const DemoLatencies& row : results.latencies) {
    absl::StrAppendFormat(&out, "  %-18s %9.2f /%7.2f %9.3f /%7.3f %9.3f /%7.3f\n", row.name,
                          serve::percentile(row.ttft, 50), serve::percentile(row.ttft, 99),
                          serve::percentile(row.tpot, 50), serve::percentile(row.tpot, 99),
                          serve::percentile(row.itl, 50), serve::percentile(row.itl, 99));
  }
  return absl::StrCat(out, "  ", moved_sentence(results), "\n");
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

std::string html_report(const DemoResults& results) {
  std::string out = absl::StrCat(
      "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\">"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">"
      "<title>Baton demo</title>\n<style>",
      kStyle, "</style>\n<h1>One page of KV, from prefill to decode</h1>\n");
  absl::StrAppendFormat(
      &out,
      "<p>%s (%.2f million parameters, %d layers) continued %d prompts of %d to %d tokens, once in "
      "one process and twice in a prefill and a decode process joined by Baton. <b>All %d tokens "
      "are identical.</b></p>\n<blockquote>%s <b>%s</b></blockquote>\n",
      escape(results.model), static_cast<double>(results.parameters) * 1e-6, results.layers,
      results.prompts, results.shortest_prompt, results.longest_prompt, results.tokens_compared,
      escape(results.sample_prompt), escape(results.sample_text));

  out +=
      "<h2>Over the link that is there</h2>\n<table><tr><th>milliseconds<th>TTFT p50<th>p99"
      "<th>TPOT p50<th>p99<th>ITL p50<th>p99</tr>\n";
  for (const DemoLatencies& row : results.latencies) {
    absl::StrAppendFormat(&out, "<tr><td>%s<td>%.2f<td>%.2f<td>%.3f<td>%.3f<td>%.3f<td>%.3f</tr>\n",
                          escape(row.name), serve::percentile(row.ttft, 50),
                          serve::percentile(row.ttft, 99), serve::percentile(row.tpot, 50),
                          serve::percentile(row.tpot, 99), serve::percentile(row.itl, 50),
                          serve::percentile(row.itl, 99));
  }
  absl::StrAppend(&out, "</table>\n<p>", escape(moved_sentence(results)), ".</p>\n");

  absl::StrAppend(&out, "<h2>Over a slow link</h2>\n<p>", escape(link_sentence(results)),
                  ".</p>\n<table><tr><th><th>TTFT median<th>of one process"
                  "<th>transfer hidden</tr>\n");
  const double alone = serve::percentile(results.link_runs[0].ttft_ms, 50);
  for (const DemoLinkRun& run : results.link_runs) {
    const double median = serve::percentile(run.ttft_ms, 50);
    absl::StrAppendFormat(
        &out, "<tr><td>%s<td>%.2f ms<td>%.2f x<td>%s</tr>\n", escape(run.name), median,
        median / alone,
        run.has_transfer ? absl::StrFormat("%.0f %%", 100 * run.overlap.hidden_share()) : "");
  }
  absl::StrAppendFormat(
      &out,
      "</table>\n<p class=\"note\">Medians of %d runs each. Hidden: the share of the transfer's "
      "time during which prefill computed the same request, from timeline.json; <code>baton demo "
      "--check timeline.json</code> computes it again.</p>\n",
      results.link_runs[0].ttft_ms.size());

  std::vector<Drawing> drawings;
  double span_ms = 0;
  for (const DemoLinkRun& run : results.link_runs) {
    drawings.push_back(typical_request(run));
    for (const Slice& slice : drawings.back().slices) span_ms = std::max(span_ms, slice.end);
  }
  out +=
      "<h2>Where the time goes</h2>\n<p class=\"key\"><span><i style=\"background:"
      "var(--compute)\"></i>layers of the prompt</span><span><i style=\"background:"
      "var(--transfer)\"></i>a layer's KV on the link</span><span><i style=\"background:"
      "var(--wait)\"></i>decode waits for a layer</span><span><i style=\"background:"
      "var(--decode)\"></i>decode computes</span></p>\n";
  for (size_t i = 0; i < drawings.size(); ++i) {
    const DemoLinkRun& run = results.link_runs[i];
    absl::StrAppend(&out, "<figure>\n",
                    svg(drawings[i], std::max(span_ms * 1.02, 1e-3), run.has_transfer),
                    "<figcaption>", escape(run.name),
                    ": a typical request, in milliseconds; the dashed line is the first "
                    "token.</figcaption></figure>\n");
  }
  return out.append("</html>\n");
}

}  // namespace baton::engine::demo
