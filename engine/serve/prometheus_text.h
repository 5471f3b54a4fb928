// Metrics in Prometheus' text format: a page of them, and the histograms on it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/files/utf8.h"

namespace baton::engine::serve {

// Counts values by the smallest bound that they do not exceed.
class Histogram {
 public:
  // `bounds` ascend, and outlive it.
  explicit Histogram(std::span<const double> bounds)
      : bounds_(bounds), counts_(bounds.size() + 1) {}
  void add(double value) {
    const auto bucket = std::lower_bound(bounds_.begin(), bounds_.end(), value) - bounds_.begin();
    ++counts_[static_cast<size_t>(bucket)];
    sum_ += value;
  }

 private:
  friend class PrometheusPage;
  std::span<const double> bounds_;
  std::vector<uint64_t> counts_;
  double sum_ = 0;
};

// Appends metrics whose names begin alike.
class PrometheusPage {
 public:
  PrometheusPage(std::string_view prefix, std::string* out) : prefix_(prefix), out_(*out) {}

  void header(std::string_view name, std::string_view help, std::string_view type) {
    absl::StrAppend(&out_, "# HELP ", prefix_, view(name), " ", view(help), "\n# TYPE ", prefix_,
                    view(name), " ", view(type), "\n");
  }
  // A line of a metric that has its header; `labels`: as label() makes them.
  template <typename Value>
  void line(std::string_view name, std::string_view labels, Value value) {
    std::string all(labels);
    if (!all.empty()) all = absl::StrCat("{", all.substr(0, all.size() - 1), "}");
    absl::StrAppend(&out_, prefix_, view(name), all, " ", value, "\n");
  }
  template <typename Value>
  void single(std::string_view name, std::string_view help, std::string_view type, Value value) {
    header(name, help, type);
    line(name, "", value);
  }
  void histogram(std::string_view name, std::string_view help, const Histogram& values) {
    header(name, help, "histogram");
    const std::string bucket = absl::StrCat(view(name), "_bucket");
    uint64_t total = 0;
    for (size_t i = 0; i < values.counts_.size(); ++i) {
      total += values.counts_[i];
      const bool last = i == values.bounds_.size();
      line(bucket, label("le", last ? "+Inf" : absl::StrCat(values.bounds_[i])), total);
    }
    line(absl::StrCat(view(name), "_sum"), "", values.sum_);
    line(absl::StrCat(view(name), "_count"), "", total);
  }
  // With a comma behind it.
  static std::string label(std::string_view name, std::string_view value) {
    std::string escaped;
    for (const char c : value) {
      if (c == '\n') {
        escaped += "\\n";
      } else {
        if (c == '"' || c == '\\') escaped += '\\';
        escaped += c;
      }
    }
    return absl::StrCat(view(name), "=\"", escaped, "\",");
  }

 private:
  const std::string prefix_;
  std::string& out_;
};

}  // namespace baton::engine::serve
