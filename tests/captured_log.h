// The log's lines, for tests: those of every thread, as long as it lives.
#pragma once

#include <algorithm>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "transport/base/log.h"

namespace baton {

class CapturedLog {
 public:
  explicit CapturedLog(base::LogLevel least) {
    base::set_log_level(least);
    base::set_log_sink([this](base::LogLevel level, std::string_view line) {
      const std::lock_guard lock(mutex_);
      lines.emplace_back((level == base::LogLevel::kWarning ? "warning: " : "") +
                         std::string(line));
    });
  }
  ~CapturedLog() {
    base::set_log_sink(nullptr);
    base::set_log_level(base::LogLevel::kError);
  }
  CapturedLog(const CapturedLog&) = delete;
  CapturedLog& operator=(const CapturedLog&) = delete;

  // Also while others log.
  bool has(std::string_view words) {
    const std::lock_guard lock(mutex_);
    return std::any_of(lines.begin(), lines.end(), [&](const std::string& line) {
      return line.find(words) != std::string::npos;
    });
  }

  std::vector<std::string> lines;  // "warning: " before a warning

 private:
  std::mutex mutex_;
};

}  // namespace baton
