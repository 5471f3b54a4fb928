// The one place that knows the logging library.
#include "transport/base/log.h"

#include <spdlog/logger.h>
#include <spdlog/sinks/stdout_color_sinks.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "transport/base/nearest_name.h"
#include "transport/base/threads/forks.h"

namespace baton::base {
namespace {

constexpr std::array<std::string_view, 6> kNames = {"trace",   "debug", "info",
                                                    "warning", "error", "off"};
constexpr std::array kLevels = {spdlog::level::trace, spdlog::level::debug, spdlog::level::info,
                                spdlog::level::warn,  spdlog::level::err,   spdlog::level::off};

absl::StatusOr<LogLevel> level_of_environment() {
  const char* text = std::getenv("BATON_LOG");
  if (text == nullptr || *text == '\0') return LogLevel::kWarning;
  absl::StatusOr<LogLevel> level = parse_log_level(text);
  if (level.ok()) return level;
  return absl::InvalidArgumentError(
      absl::StrCat("BATON_LOG=", text, ": ", level.status().message()));
}

absl::StatusOr<bool> json_of_environment() {
  const char* text = std::getenv("BATON_LOG_FORMAT");
  const std::string_view format = text == nullptr ? "" : text;
  if (format.empty() || format == "text") return false;
  if (format == "json") return true;
  return absl::InvalidArgumentError(
      absl::StrCat("BATON_LOG_FORMAT=", text, ": give text or json",
                   did_you_mean(std::string(format), {"text", "json"})));
}

// Never destroyed: threads may log until the program's last moment.
struct Log {
  Log()
      : asked(level_of_environment()),
        asked_json(json_of_environment()),
        json(asked_json.value_or(false)),
        least(asked.value_or(LogLevel::kWarning)),
        logger("baton", std::make_shared<spdlog::sinks::stderr_color_sink_mt>()) {
    logger.set_level(spdlog::level::trace);  // log_wanted() has decided
    logger.set_pattern(
        json ? R"({"time":"%Y-%m-%dT%H:%M:%S.%e%z","level":"%l","pid":%P,"message":%v})"
             : "%Y-%m-%d %H:%M:%S.%e baton[%P] %^%l%$: %v");
  }

  const absl::StatusOr<LogLevel> asked;
  const absl::StatusOr<bool> asked_json;
  const bool json;
  std::atomic<LogLevel> least;
  std::mutex mutex;  // guards `sink`, and is held while a line is written
  LogSink sink;
  spdlog::logger logger;
};

Log& the_log() {
  static Log& log = *new Log;
  return log;
}

}  // namespace

absl::StatusOr<LogLevel> parse_log_level(std::string_view text) {
  for (size_t i = 0; i < kNames.size(); ++i) {
    if (kNames[i] == text) return static_cast<LogLevel>(i);
  }
  const std::vector<std::string> known(kNames.begin(), kNames.end());
  return absl::InvalidArgumentError(
      absl::StrCat("give trace, debug, info, warning, error or off", did_you_mean(text, known)));
}

absl::Status log_level_status() {
  absl::Status status = the_log().asked.status();
  status.Update(the_log().asked_json.status());
  return status;
}

void set_log_level(LogLevel level) { the_log().least.store(level, std::memory_order_relaxed); }

bool log_wanted(LogLevel level) {
  return level >= the_log().least.load(std::memory_order_relaxed) && level != LogLevel::kOff;
}

void set_log_sink(LogSink sink) {
  Log& log = the_log();
  const ForkWaits fork_waits(ForkWaits::kMoment);
  std::lock_guard lock(log.mutex);
  log.sink = std::move(sink);
}

void write_log(LogLevel level, std::string_view line) {
  Log& log = the_log();
  const ForkWaits fork_waits(ForkWaits::kMoment);
  std::lock_guard lock(log.mutex);
  if (log.sink) return log.sink(level, line);
  if (!log.json) return log.logger.log(kLevels[static_cast<size_t>(level)], line);
  const std::string message = nlohmann::json(std::string(line))
                                  .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  log.logger.log(kLevels[static_cast<size_t>(level)], message);
}

}  // namespace baton::base
