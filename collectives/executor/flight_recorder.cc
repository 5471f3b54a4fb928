// The flight recorder: a ring of slots, each guarded by its own version, and its file.
#include "collectives/executor/flight_recorder.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <new>

#include <nlohmann/json.hpp>
#include <system_error>
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "transport/base/limits/refusals.h"
#include "transport/base/nearest_name.h"
#include "transport/base/prefetch.h"

namespace baton::collectives::executor {
namespace {

constexpr size_t kWords = sizeof(FlightEvent) / sizeof(uint64_t);
using Words = std::array<uint64_t, kWords>;
static_assert(sizeof(Words) == sizeof(FlightEvent), "an event has holes: its words are undefined");

std::string_view name_of(FlightEvent::Kind kind) {
  constexpr const char* kNames[] = {"begin", "end", "send", "receive", "lost", "abort"};
  static_assert(std::size(kNames) == static_cast<size_t>(FlightEvent::Kind::kAbort) + 1);
  return base::name_at(kNames, kind, "?");
}

// Towards the peer, or from it.
std::string_view arrow_of(FlightEvent::Kind kind) {
  switch (kind) {
    case FlightEvent::Kind::kSend:
      return "->";
    case FlightEvent::Kind::kReceive:
      return "<-";
    default:
      return "of";
  }
}

bool of_a_chunk(FlightEvent::Kind kind) {
  return kind == FlightEvent::Kind::kSend || kind == FlightEvent::Kind::kReceive;
}

std::string human_bytes(uint64_t bytes) {
  if (bytes < 1024) return absl::StrFormat("%u B", bytes);
  double size = static_cast<double>(bytes);
  const char* unit = "B";
  for (const char* next : {"KiB", "MiB", "GiB"}) {
    if (size < 1024) break;
    size /= 1024;
    unit = next;
  }
  return absl::StrFormat("%.1f %s", size, unit);
}

bool write_all(int fd, std::string_view text) {
  if (!base::file_may_have(text.size()).ok()) return errno = EFBIG, false;
  while (!text.empty()) {
    const ssize_t wrote = write(fd, text.data(), text.size());
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) return false;
    text.remove_prefix(static_cast<size_t>(wrote));
  }
  return true;
}

// The user's own plain file, emptied.
int open_own(const std::string& path) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK, 0600);
  if (fd < 0) return -1;
  struct stat status {};
  if (fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && status.st_uid == geteuid() &&
      status.st_nlink == 1 && ftruncate(fd, 0) == 0) {
    return fd;
  }
  close(fd);
  errno = EPERM;
  return -1;
}

}  // namespace

// `version` is 2 * (n + 1) when the n-th event lies here, and one less while it is being written.
struct FlightRecorder::Slot {
  std::atomic<uint64_t> version;
  std::array<std::atomic<uint64_t>, kWords> words;
};

FlightRecorder::FlightRecorder(uint32_t rank, size_t capacity)
    : rank_(rank),
      capacity_(std::bit_ceil(std::max<size_t>(capacity, 1))),
      slots_(static_cast<Slot*>(std::calloc(capacity_, sizeof(Slot)))) {
  if (slots_ == nullptr) throw std::bad_alloc();
}

FlightRecorder::~FlightRecorder() = default;

void FlightRecorder::Free::operator()(Slot* slots) const { std::free(slots); }

// Locked instructions would cost a small call a tenth of its time.
void FlightRecorder::record(const FlightEvent& event) {
  const uint64_t number = next_.load(std::memory_order_relaxed);
  const uint64_t whole = 2 * (number + 1);
  Slot& slot = slots_[number & (capacity_ - 1)];
  slot.version.store(whole - 1, std::memory_order_relaxed);
  // Release and acquire on the words themselves: a reader that sees a new word then sees the odd
  // version.
  const Words words = std::bit_cast<Words>(event);
  for (size_t i = 0; i < kWords; ++i) slot.words[i].store(words[i], std::memory_order_release);
  slot.version.store(whole, std::memory_order_release);
  next_.store(number + 1, std::memory_order_release);
  // It has not been touched for a whole ring.
  base::prefetch_to_write(&slots_[(number + 1) & (capacity_ - 1)]);
}

std::vector<FlightEvent> FlightRecorder::events() const {
  const uint64_t end = next_.load(std::memory_order_acquire);
  std::vector<FlightEvent> out;
  out.reserve(std::min<uint64_t>(end, capacity_));
  for (uint64_t number = end > capacity_ ? end - capacity_ : 0; number < end; ++number) {
    const Slot& slot = slots_[number & (capacity_ - 1)];
    if (slot.version.load(std::memory_order_acquire) != 2 * (number + 1)) continue;
    Words words;
    for (size_t i = 0; i < kWords; ++i) words[i] = slot.words[i].load(std::memory_order_acquire);
    if (slot.version.load(std::memory_order_relaxed) != 2 * (number + 1)) continue;
    out.push_back(std::bit_cast<FlightEvent>(words));
  }
  return out;
}

std::string FlightRecorder::text() const {
  std::string out;
  for (const FlightEvent& event : events()) {
    absl::StrAppendFormat(&out, "%.6f rank %u %-7s %s #%u", seconds_of(event.at), rank_,
                          std::string(name_of(event.kind)),
                          std::string(baton::name_of(event.collective)), event.sequence);
    if (of_a_chunk(event.kind)) {
      absl::StrAppendFormat(&out, " chunk %u step %u lane %u", event.piece, event.step, event.lane);
    }
    if (event.peer != UINT32_MAX) {
      absl::StrAppendFormat(&out, " %s rank %u", std::string(arrow_of(event.kind)), event.peer);
    }
    if (event.bytes > 0) absl::StrAppendFormat(&out, " %s", human_bytes(event.bytes));
    if (event.status != 0) {
      absl::StrAppendFormat(&out, " %s",
                            absl::StatusCodeToString(static_cast<absl::StatusCode>(event.status)));
    }
    out += '\n';
  }
  return out;
}

std::string FlightRecorder::to_json() const {
  nlohmann::json list = nlohmann::json::array();
  for (const FlightEvent& event : events()) {
    nlohmann::json one = {{"at", seconds_of(event.at)},
                          {"kind", name_of(event.kind)},
                          {"collective", baton::name_of(event.collective)},
                          {"sequence", event.sequence}};
    if (of_a_chunk(event.kind)) {
      one["piece"] = event.piece;
      one["step"] = event.step;
      one["lane"] = event.lane;
    }
    if (event.peer != UINT32_MAX) one["peer"] = event.peer;
    if (event.bytes > 0) one["bytes"] = event.bytes;
    if (event.status != 0) {
      one["status"] = absl::StatusCodeToString(static_cast<absl::StatusCode>(event.status));
    }
    list.push_back(std::move(one));
  }
  return nlohmann::json({{"rank", rank_.load()}, {"events", std::move(list)}}).dump();
}

std::string flight_path(const std::string& group, uint32_t rank) {
  const char* wanted = std::getenv("BATON_FLIGHT_RECORDER");
  std::string prefix = wanted == nullptr ? "" : wanted;
  if (prefix == "none") return "";
  if (prefix.empty()) {
    std::string name = group;
    for (char& c : name) {
      if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
    }
    std::error_code error;
    const auto directory = std::filesystem::temp_directory_path(error);
    prefix = absl::StrFormat("%s/baton-flight-%u-%s", error ? "/tmp" : directory.c_str(), geteuid(),
                             name.substr(0, 64));
  }
  return absl::StrCat(prefix, ".", rank, ".json");
}

std::string dump_flight_record(const FlightRecorder& recorder, const std::string& path) {
  if (path.empty()) return "";
  const int fd = open_own(path);
  bool written = fd >= 0 && write_all(fd, recorder.to_json());
  const int why = errno;
  if (fd >= 0) written &= close(fd) == 0;
  if (written) return absl::StrCat("; its last events are in ", path);
  return absl::StrFormat(
      "; its last events could not be written to %s (%s): set "
      "BATON_FLIGHT_RECORDER to a place that can",
      path, std::generic_category().message(why));
}

}  // namespace baton::collectives::executor
