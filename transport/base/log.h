// The log: one line on stderr for each event that no caller hears of. BATON_LOG sets the least
// level that is written: trace, debug, info, warning (the default), error or off.
// BATON_LOG_FORMAT=json makes each line a JSON object (docs/operations.md).
//   log_event(LogLevel::kInfo, "%s: %s is up: %s", self, peer, route);
//
// Never on the data path: a peer, a rail, a registration, a refusal; not a transfer, not a slice.
// A line that is not wanted costs one load of an atomic.
// Any thread may log.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_format.h"

namespace baton::base {

enum class LogLevel : uint8_t { kTrace, kDebug, kInfo, kWarning, kError, kOff };

// "trace" and so on. InvalidArgument: no level has this name; the text lists the levels and the
// nearest name.
absl::StatusOr<LogLevel> parse_log_level(std::string_view text);

// InvalidArgument where BATON_LOG or BATON_LOG_FORMAT is wrong; the default holds then.
absl::Status log_level_status();

// In place of BATON_LOG.
void set_log_level(LogLevel level);

// Whether events of this level are written.
bool log_wanted(LogLevel level);

// Receives log lines instead of stderr, for a program with a log of its own; null: stderr again.
// Lines come from any thread, one at a time. The sink must not log.
using LogSink = std::function<void(LogLevel level, std::string_view line)>;
void set_log_sink(LogSink sink);

// Writes the line, wanted or not.
void write_log(LogLevel level, std::string_view line);

template <typename... Args>
void log_event(LogLevel level, const absl::FormatSpec<Args...>& format, const Args&... args) {
  if (log_wanted(level)) write_log(level, absl::StrFormat(format, args...));
}

}  // namespace baton::base
