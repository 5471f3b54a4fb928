// Lists of numbers (their length, then the numbers), statuses, times and reports as bytes. Internal
// to engine/shard.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "transport/base/wire.h"
#include "transport/clock.h"

namespace baton::engine::shard {

template <typename T>
void put_list(std::string& out, const std::vector<T>& list) {
  base::put_number(out, static_cast<uint32_t>(list.size()));
  out.append(reinterpret_cast<const char*>(list.data()), list.size() * sizeof(T));
}

template <typename T>
std::vector<T> take_list(base::WireReader& reader) {
  const size_t count = reader.number<uint32_t>();
  const std::string_view bytes = reader.take(count * sizeof(T));
  std::vector<T> list(bytes.size() / sizeof(T));
  if (!bytes.empty()) std::memcpy(list.data(), bytes.data(), bytes.size());
  return list;
}

inline constexpr size_t kMaxWhy = 512;  // of a status's message; the rest of it is cut off

inline void put_status(std::string& out, const absl::Status& status) {
  base::put_number(out, static_cast<uint8_t>(status.code()));
  base::put_text(out, std::string(status.message()).substr(0, kMaxWhy));
}

inline absl::Status take_status(base::WireReader& reader) {
  const auto code = static_cast<absl::StatusCode>(reader.number<uint8_t>());
  return absl::Status(code, std::string(reader.text(kMaxWhy)));
}

inline void put_time(std::string& out, Time time) {
  base::put_number(out, int64_t{std::chrono::nanoseconds(time).count()});
}

inline Time take_time(base::WireReader& reader) {
  return std::chrono::nanoseconds(reader.number<int64_t>());
}

// A report: numbers, whether there is more to say, and events, of which each has a kind, an id and
// whatever its kind needs. In `size` bytes. Takes from `events` what finds room; `put_rest(out,
// event)` appends what follows kind and id.
template <typename Event, typename PutRest>
std::string put_report(size_t size, std::initializer_list<uint64_t> numbers,
                       std::deque<Event>& events, PutRest put_rest) {
  std::string listed;
  std::string next;
  uint16_t count = 0;
  const size_t head = numbers.size() * sizeof(uint64_t) + sizeof(count) + 1;
  while (!events.empty()) {
    const Event& event = events.front();
    next.clear();
    base::put_number(next, static_cast<uint8_t>(event.kind));
    base::put_number(next, event.id);
    put_rest(next, event);
    if (head + listed.size() + next.size() > size) break;
    listed += next;
    ++count;
    events.pop_front();
  }
  std::string out;
  for (const uint64_t number : numbers) base::put_number(out, number);
  base::put_number(out, static_cast<uint8_t>(!events.empty()));
  base::put_number(out, count);
  out += listed;
  out.resize(size);
  return out;
}

// The same back. False: no rank of this version sends such bytes. Kinds are `first` to `last`.
template <typename Event, typename Kind, typename TakeRest>
bool take_report(std::string_view bytes, size_t size, std::initializer_list<uint64_t*> numbers,
                 Kind first, Kind last, std::vector<Event>* events, bool* more,
                 TakeRest take_rest) {
  if (bytes.size() != size) return false;
  base::WireReader reader(bytes);
  for (uint64_t* number : numbers) *number = reader.number<uint64_t>();
  *more = reader.number<uint8_t>() != 0;
  const auto count = reader.number<uint16_t>();
  for (uint16_t i = 0; i < count && !reader.failed(); ++i) {
    Event& event = events->emplace_back();
    event.kind = static_cast<Kind>(reader.number<uint8_t>());
    if (event.kind < first || event.kind > last) return false;
    event.id = reader.number<uint64_t>();
    take_rest(reader, event);
  }
  return !reader.failed();
}

}  // namespace baton::engine::shard
