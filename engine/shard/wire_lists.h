// Lists of numbers as bytes: their length, then the numbers. Internal to engine/shard.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "transport/base/wire.h"

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

}  // namespace baton::engine::shard
