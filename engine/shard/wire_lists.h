// Lists of numbers (their length, then the numbers), statuses and times as bytes. Internal to
// engine/shard.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
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

}  // namespace baton::engine::shard
