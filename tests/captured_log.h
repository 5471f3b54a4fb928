// The log's lines, for tests: those of every thread, as long as it lives.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "transport/base/log.h"

namespace baton {

class CapturedLog {
 public:
  explicit CapturedLog(LogLevel least) {
    set_log_level(least);
    set_log_sink([this](LogLevel level, std::string_view line) {
      lines.emplace_back((level == LogLevel::kWarning ? "warning: " : "") + std::string(line));
    });
  }
  ~CapturedLog() {
    set_log_sink(nullptr);
    set_log_level(LogLevel::kError);
  }
  CapturedLog(const CapturedLog&) = delete;
  CapturedLog& operator=(const CapturedLog&) = delete;

  std::vector<std::string> lines;  // "warning: " before a warning
};

}  // namespace baton
