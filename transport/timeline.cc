// Collects spans and writes them as trace events that Perfetto and chrome://tracing read.
#include "transport/timeline.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "transport/base/limits/refusals.h"

namespace baton {
namespace {

// A JSON string. Bytes that are not UTF-8 become U+FFFD.
std::string json_string(std::string_view text) {
  return nlohmann::json(std::string(text))
      .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

double microseconds(Time time) { return static_cast<double>(time.count()) / 1e3; }

}  // namespace

Timeline::Timeline(std::string process_name, size_t capacity)
    : process_name_(std::move(process_name)), capacity_(capacity) {}

void Timeline::add(Span span) {
  std::lock_guard lock(mutex_);
  if (spans_.size() < capacity_) {
    spans_.push_back(std::move(span));
  } else {
    ++dropped_;
  }
}

std::vector<Span> Timeline::spans() const {
  std::lock_guard lock(mutex_);
  return spans_;
}

size_t Timeline::dropped() const {
  std::lock_guard lock(mutex_);
  return dropped_;
}

std::string Timeline::to_json() const {
  std::lock_guard lock(mutex_);
  const int pid = getpid();
  std::string out = absl::StrFormat(
      "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"dropped\":%u},\"traceEvents\":[\n"
      "{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":%d,\"args\":{\"name\":%s}}",
      dropped_, pid, json_string(process_name_));
  std::vector<std::string_view> tracks;
  const auto number_of = [&](std::string_view track) {
    for (size_t i = 0; i < tracks.size(); ++i) {
      if (tracks[i] == track) return i + 1;
    }
    tracks.push_back(track);
    absl::StrAppendFormat(
        &out,
        ",\n{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":%d,\"tid\":%u,\"args\":{\"name\":%s}}",
        pid, tracks.size(), json_string(track));
    return tracks.size();
  };
  for (const Span& span : spans_) {
    const size_t track = number_of(span.track);
    absl::StrAppendFormat(&out,
                          ",\n{\"ph\":\"X\",\"name\":%s,\"cat\":%s,\"pid\":%d,\"tid\":%u,"
                          "\"ts\":%.3f,\"dur\":%.3f,\"args\":{\"request\":%u,\"bytes\":%u}}",
                          json_string(span.name), json_string(span.track), pid, track,
                          microseconds(span.begin), microseconds(span.end - span.begin),
                          span.request, span.bytes);
  }
  out += "\n]}\n";
  return out;
}

absl::Status Timeline::write(const std::string& path) const {
  const std::string json = to_json();
  if (absl::Status may = base::file_may_have(json.size()); !may.ok()) return may;
  FILE* file = std::fopen(path.c_str(), "wb");
  int error = file == nullptr ? errno : 0;
  if (file != nullptr) {
    if (std::fwrite(json.data(), 1, json.size(), file) != json.size()) error = errno;
    if (std::fclose(file) != 0 && error == 0) error = errno;
  }
  if (error == 0) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("cannot write the timeline to ", path, ": ", strerror(error)));
}

}  // namespace baton
